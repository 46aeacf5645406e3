"""The process: traced calls before real ones, and exits with graphs alive."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import torch

from .. import ops
from ..case import ALL, BLACKWELL, CUDNN, Outcome, case, outcome
from ..ops import Call, described

EXITS = 50


@case("B31", "the first call is made under FakeTensorMode, the next is a real one", "A31", ALL)
def fake_first(lane: str) -> Outcome:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    call = Call(lane, (1, 16, 1024, 16384))
    real = call.a, call.b, call.scale, call.out
    said = "fetched a workspace"
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        call.a, call.b, call.scale, call.out = (mode.from_tensor(each) for each in real)
        try:
            call.workspace()
        except Exception as error:
            said = described(error)
    call.a, call.b, call.scale, call.out = real
    kept = [
        key
        for cache in (getattr(ops.utils, name, {}) for name in ("_cache_buf", "_stream_cache_buf"))
        for key, value in cache.items()
        if isinstance(value, FakeTensor)
    ]
    figures: dict[str, object] = {"under FakeTensorMode": said, "fake tensors kept": len(kept)}
    try:
        right = call.right()
        fake = isinstance(call.workspace(), FakeTensor)
        reference = call.eager()
        equal = torch.equal(call.replayed(call.captured()), reference)
    except Exception as error:
        return outcome(False, note=f"the real call raised {described(error)}", figures=figures)
    figures.update({"real call right": right, "replay right": equal})
    return outcome(right and equal and not fake and not kept, figures=figures)


def four_graphs(lane: str) -> list[torch.cuda.CUDAGraph]:
    """What each exiting process makes: four graphs with pools of their own, replayed."""
    call = Call(lane, (1, 16, 1024, 16384))
    call.eager()
    graphs = [call.captured() for _ in range(4)]
    for graph in graphs:
        graph.replay()
    return graphs


@case(
    "B32",
    "a process exits with four graphs alive, 50 times, freed memory perturbed",
    "A10",
    (*CUDNN, "fp8-cublas", *BLACKWELL),
    seconds=240,
)
def exits(lane: str) -> Outcome:
    done = subprocess.run(
        [sys.executable, "-m", f"{__package__.rsplit('.', 1)[0]}.exits", lane, str(EXITS)],
        env={**os.environ, "MALLOC_PERTURB_": "165"},
        check=False,
        capture_output=True,
        text=True,
        timeout=220,
    )
    try:
        statuses = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return outcome(False, note=f"exit {done.returncode}: {done.stderr[-300:]}")
    bad = {status: count for status, count in statuses.items() if status != "0"}
    return outcome(
        not bad and sum(statuses.values()) == EXITS,
        note=f"statuses {bad}: {done.stderr[-200:]}" if bad else "",
        figures={"clean exits": f"{statuses.get('0', 0)} of {EXITS}"},
    )
