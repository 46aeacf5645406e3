"""Two GPUs: in one process, and in two with all-reduces between the GEMMs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import torch

from ..case import CUBLAS, CUDNN, Outcome, case, outcome, two_gpus
from ..memory import Others
from ..ops import Call, Handed, local, runtime

SHAPES = [(1, 64, 512, 65536), (1, 16, 1024, 16384)]


@case(
    "D1",
    "two GPUs in one process: graphs of both replayed at once",
    "A32",
    (*CUDNN, *CUBLAS),
    needs=(two_gpus,),
    seconds=150,
)
def one_process(lane: str) -> Outcome:
    devices = [torch.device("cuda:0"), torch.device("cuda:1")]
    addresses: dict[str, set[int]] = {}
    calls, references, graphs, others = [], [], [], []
    for device in devices:
        with torch.cuda.device(device):
            # torch.cuda.graph's own stream is made once, on the device that captures first: a
            # graph of another device captured with it would be empty.
            stream = torch.cuda.Stream(device)
            for number, shape in enumerate(SHAPES):
                call = Call(lane, shape, seed=number, device=device)
                references.append(call.eager())
                handed: Handed | None = local.handed
                if handed is not None:
                    addresses.setdefault(str(device), set()).add(handed.address)
                graphs.append(call.captured(20, stream=stream))
                calls.append(call)
            others.append(Others(8, device=device))
    # With the other device current, too: the operands say where a call runs. The releases' cuDNN
    # handle takes no stream then, which is an error and harms nothing.
    crossed = []
    for call, reference in zip(calls, references, strict=True):
        with torch.cuda.device(1 - call.device.index):
            try:
                crossed.append("right" if torch.equal(call.eager(), reference) else "wrong")
            except RuntimeError as error:
                if "cudnnSetStream" not in str(error):
                    raise
                crossed.append("refused by cudnnSetStream")
    wrong, rounds = 0, 200
    for _ in range(rounds):
        for call in calls:
            call.out.zero_()
        for device in devices:
            torch.cuda.synchronize(device)
        streams = []
        for call, graph in zip(calls, graphs, strict=True):
            with torch.cuda.device(call.device):
                stream = torch.cuda.Stream(call.device)
                streams.append(stream)
                with torch.cuda.stream(stream):
                    graph.replay()
        for device in devices:
            torch.cuda.synchronize(device)
        wrong += sum(
            not torch.equal(call.out, reference)
            for call, reference in zip(calls, references, strict=True)
        )
    overwritten = 0
    for device, each in zip(devices, others, strict=True):
        with torch.cuda.device(device):
            overwritten += each.overwritten()
    figures: dict[str, object] = {
        "wrong of": f"{wrong} of {rounds * len(calls)}",
        "bytes of others overwritten": overwritten,
        "with the other device current": ", ".join(sorted(set(crossed))),
    }
    shared = set.intersection(*addresses.values()) if len(addresses) == 2 else set()
    fine = wrong == 0 and overwritten == 0 and "wrong" not in crossed and not shared
    figures["addresses on both"] = len(shared)
    fork = runtime()
    if fork is not None:
        by_device: dict[str, int] = {}
        for lane_of in fork.stats()["lanes"]:
            by_device[lane_of["device"]] = by_device.get(lane_of["device"], 0) + 1
        figures["lanes by device"] = json.dumps(by_device)
        fine = fine and set(by_device) == {"cuda:0", "cuda:1"}
    return outcome(fine, figures=figures)


@case(
    "D2",
    "two GPUs, a process each: graphs with NCCL all-reduces between the GEMMs",
    "A32 A37",
    CUDNN,
    needs=(two_gpus,),
    seconds=200,
)
def two_processes(lane: str) -> Outcome:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    module = f"{__package__.rsplit('.', 1)[0]}.ranks"
    started = [
        subprocess.Popen(
            [sys.executable, "-m", module, lane],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    figures: dict[str, object] = {}
    fine = True
    for rank, process in enumerate(started):
        try:
            out, err = process.communicate(timeout=180)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            err = "no answer after 180 s: " + err
        try:
            seen = json.loads(out.strip().splitlines()[-1])
        except (IndexError, ValueError):
            seen = {"passed": False, "said": err[-300:]}
        fine = fine and bool(seen.pop("passed", False)) and process.returncode == 0
        figures.update({f"rank {rank}: {name}": value for name, value in seen.items()})
    return outcome(fine, figures=figures)
