"""A server in small: graphs over descending batches, prefills between their replays, churn.

``python -m catalogue.serving --seed S --steps N --minutes M --out FILE`` runs over the FlashInfer
on the path, in one process, and appends one JSON line a sample to FILE, the last with
``"done": true``. The steps depend on the seed alone, so a release and its fork do the same ones.

What stands for what: each *layer* is a weight. Decode batches (graphs) run it on the backend that
an autotuner may well name for small M (cuBLAS, or a cuDNN plan with a small workspace); prefills
run it on cuDNN's own choice, whose first call outgrows the 32 MiB of 0.6.x. All graphs share one
pool, and are replayed one after another on the stream of the prefills, as serving engines do.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import random
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch

from . import ops
from .case import Absent
from .memory import MIB, driver_bytes
from .ops import Call, described

#: Rows of the captured batches, and of the prefills.
BATCHES = (*range(512, 256, -32), *range(256, 128, -16), *range(128, 0, -3))
LONGEST = 2048
PREFILLS = 200
#: Plans that each of the release's caches may keep here, far below the 2,048 that it keeps.
PLANS = 96
CANARY = 7


@dataclass
class Size:
    """How large the model and the run are."""

    n: int = 1024
    k: int = 16384
    batches: tuple[int, ...] = BATCHES
    prefills: int = PREFILLS
    longest: int = LONGEST
    blocks: int = 48
    block_mib: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 34, 40, 64)


SHORT = Size(n=512, k=8192, batches=(64, 32, 16, 8, 4, 1), prefills=10, longest=256, blocks=6)


@dataclass
class Figures:
    """What has happened so far; bytes in bytes, times in microseconds."""

    steps: int = 0
    calls: int = 0
    replays: int = 0
    captures: int = 0
    refused: int = 0
    wrong_calls: int = 0
    wrong_replays: int = 0
    canary_bytes: int = 0
    canary_hits: int = 0
    canaries_checked: int = 0
    call_us: list[float] = field(default_factory=list)
    replay_us: list[float] = field(default_factory=list)


class Layer:
    """A weight and operands for up to ``longest`` rows."""

    def __init__(self, lane: str, size: Size, seed: int, plan: object = None) -> None:
        self.call = Call(lane, (1, size.longest, size.n, size.k), seed=seed, plan=plan)
        self.a, self.out = self.call.a, self.call.out
        self.exact = self.call.exact()

    def run(self, m: int) -> torch.Tensor:
        """Multiply the first ``m`` rows; the result."""
        self.call.a, self.call.out = self.a[..., :m, :], self.out[..., :m, :]
        self.call()
        return self.call.out

    def near(self, m: int) -> bool:
        """Whether the last result of ``m`` rows is near the exact one."""
        exact = self.exact[..., :m, :]
        distance = (self.out[..., :m, :].float() - exact).norm()
        return bool(distance < exact.norm() * self.call.tolerance)


class Captured:
    """A graph of all decode layers at one batch size, with results of its own."""

    def __init__(self, layers: list[Layer], m: int, pool: Any) -> None:
        self.m, self.layers = m, layers
        self.results = [torch.zeros_like(layer.out[..., :m, :]) for layer in layers]
        self.references = []
        for layer in layers:
            result = layer.run(m)
            torch.cuda.synchronize()
            self.references.append(result.clone())
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            for layer, result in zip(layers, self.results, strict=True):
                result.copy_(layer.run(m))

    def replay(self) -> None:
        self.graph.replay()

    def wrong(self) -> torch.Tensor:
        """Number of layers whose result differs, on the device."""
        count = torch.zeros((), dtype=torch.int64, device="cuda")
        for result, reference in zip(self.results, self.references, strict=True):
            count += (result != reference).any()
            result.zero_()
        return count


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Two sums over the bits of a bfloat16 tensor: equal tensors have equal ones."""
    bits = tensor.reshape(-1).view(torch.int16).to(torch.int64)
    weights = torch.arange(bits.numel(), device=tensor.device, dtype=torch.int64) % 8191 + 1
    return torch.stack([bits.sum(), (bits * weights).sum()])


class Server:
    """All of it. Every random choice comes from ``random.Random(seed)``."""

    def __init__(self, seed: int, size: Size) -> None:
        self.size, self.chance, self.figures = size, random.Random(seed), Figures()
        self.notes: list[str] = []
        ops.local.asked = 0
        self._bound_plan_caches()
        self.decode, self.prefill = self._layers()
        rows = range(1, size.longest + 1)
        self.rows = self.chance.sample(rows, min(size.prefills, len(rows)))
        self.sums: dict[tuple[int, int], torch.Tensor] = {}
        self.blocks: deque[torch.Tensor] = deque()
        self.pool = torch.cuda.graph_pool_handle()
        self.graphs: list[Captured] = []

    def _bound_plan_caches(self) -> None:
        import functools

        for name, builder in list(vars(ops.gemm_base).items()):
            if name.startswith("build_cudnn_gemm_") and hasattr(builder, "__wrapped__"):
                bounded = functools.lru_cache(maxsize=PLANS)(builder.__wrapped__)
                setattr(ops.gemm_base, name, bounded)
        # The fork serves no cuDNN call from memory once as many plans were built as the smallest
        # of these caches may hold; smaller caches want a smaller number.
        prepared = ops.prepared()
        if prepared is not None:
            prepared.PLANS = PLANS

    def _layers(self) -> tuple[list[Layer], list[Layer]]:
        size, decode, prefill = self.size, [], []
        data = Path(ops.flashinfer.__file__).parent / "data" / "csrc"
        for seed, (small, large) in enumerate(
            [("fp8-cublas", "fp8-cudnn"), ("fp8-cudnn", "fp8-cudnn"), ("bf16-cudnn", "bf16-cudnn")]
        ):
            if small == "fp8-cublas":
                if data.is_dir():
                    decode.append(Layer(small, size, seed))
                else:
                    self.notes.append("no cuBLAS layer: wheel without flashinfer/data")
            else:
                try:
                    _, plan = ops.small_split_k_plan(small)
                    decode.append(Layer(small, size, seed, plan=plan.tactic))
                except Absent as absent:
                    self.notes.append(str(absent))
            prefill.append(Layer(large, size, 10 + seed))
        if not decode:
            decode = [Layer("fp8-cudnn", size, 0)]
        return decode, prefill

    def capture_all(self) -> None:
        """As an engine starts: the largest batch first, one pool."""
        for m in sorted(self.size.batches, reverse=True):
            self.graphs.append(Captured(self.decode, m, self.pool))
            self.figures.captures += 1
        self._allocate(self.size.blocks)

    # Steps. --------------------------------------------------------------------------------------

    def step(self) -> None:
        """One random thing that a server does."""
        self.figures.steps += 1
        what = self.chance.random()
        if what < 0.62:
            self._replay()
        elif what < 0.90:
            self._call()
        elif what < 0.985:
            self._churn()
        else:
            self._capture_again()

    def _replay(self) -> None:
        for _ in range(self.chance.randint(1, 4)):
            captured = self.chance.choice(self.graphs)
            start = time.perf_counter()
            captured.replay()
            torch.cuda.synchronize()
            self.figures.replay_us.append(1e6 * (time.perf_counter() - start))
            self.figures.replays += 1
            self.figures.wrong_replays += int(captured.wrong())

    def _call(self) -> None:
        m = self.chance.choice(self.rows)
        for number, layer in enumerate(self.prefill):
            layer.out[..., :m, :].zero_()
            torch.cuda.synchronize()
            start = time.perf_counter()
            result = layer.run(m)
            torch.cuda.synchronize()
            self.figures.call_us.append(1e6 * (time.perf_counter() - start))
            self.figures.calls += 1
            seen = checksum(result)
            known = self.sums.get((number, m))
            if known is None:
                right = layer.near(m)
                if right:
                    self.sums[number, m] = seen
            else:
                # Another plan may round otherwise: then near is right, and the new sum counts.
                right = torch.equal(seen, known) or layer.near(m)
            self.figures.wrong_calls += not right

    def _allocate(self, count: int) -> None:
        for _ in range(count):
            mib = self.chance.choice(self.size.block_mib)
            self.blocks.append(torch.full((mib * MIB,), CANARY, dtype=torch.uint8, device="cuda"))

    def _check(self, block: torch.Tensor) -> None:
        hit = int((block != CANARY).sum())
        self.figures.canaries_checked += 1
        self.figures.canary_bytes += hit
        self.figures.canary_hits += hit > 0
        if hit:
            block.fill_(CANARY)

    def _churn(self) -> None:
        for _ in range(self.chance.randint(1, 6)):
            if not self.blocks:
                break
            self.blocks.rotate(self.chance.randint(0, len(self.blocks)))
            self._check(self.blocks.popleft())
        self._allocate(max(self.size.blocks - len(self.blocks), 0))

    def _capture_again(self) -> None:
        place = self.chance.randrange(len(self.graphs))
        m = self.graphs[place].m
        try:
            self.graphs[place] = Captured(self.decode, m, self.pool)
            self.figures.captures += 1
        except RuntimeError as error:
            if not ops.is_typed(error):
                raise
            self.figures.refused += 1

    def check_all(self) -> None:
        """Every canary, and every graph once."""
        for block in self.blocks:
            self._check(block)
        for captured in self.graphs:
            captured.replay()
            torch.cuda.synchronize()
            self.figures.replays += 1
            self.figures.wrong_replays += int(captured.wrong())


def percentile(values: list[float], share: float) -> float:
    """``share`` of ``values`` are at most this; 0 of none."""
    ordered = sorted(values)
    return round(ordered[min(int(share * len(ordered)), len(ordered) - 1)], 1) if ordered else 0.0


def sample(server: Server, started: float) -> dict[str, Any]:
    """Plain data; times over the whole run so far."""
    figures = asdict(server.figures)
    for name in ("call_us", "replay_us"):
        values = figures.pop(name)
        figures[f"{name}_p50"] = percentile(values, 0.50)
        figures[f"{name}_p99"] = percentile(values, 0.99)
    cached = sum(builder.cache_info().currsize for builder in ops.builders())
    held = len(getattr(ops.gemm_base, "_CUDNN_GRAPHS_USED_BY_CUDA_GRAPHS", {}))
    lanes, lane_bytes = 0, 0
    fork = ops.runtime()
    if fork is not None:
        stats = fork.stats()
        held, lanes, lane_bytes = stats["plans_held"], len(stats["lanes"]), stats["lane_bytes"]
    return {
        **figures,
        "seconds": round(time.monotonic() - started, 2),
        "device_bytes": driver_bytes(),
        "torch_reserved": torch.cuda.memory_reserved(),
        "torch_allocated": torch.cuda.memory_allocated(),
        "plans_cached": cached,
        "plans_held": held,
        "lanes": lanes,
        "lane_bytes": lane_bytes,
        "notes": server.notes,
    }


def run(seed: int, steps: int, minutes: float, size: Size, out: TextIO, every: float) -> None:
    """Steps until ``steps`` are done, or ``minutes`` are over; samples to ``out``."""
    started = time.monotonic()

    def write(line: dict[str, Any]) -> None:
        out.write(json.dumps(line) + "\n")
        out.flush()

    server = Server(seed, size)
    server.capture_all()
    write(sample(server, started))
    serving = last = time.monotonic()
    died = ""
    try:
        while server.figures.steps < steps:
            server.step()
            now = time.monotonic()
            if now - last > every:
                last = now
                write(sample(server, started))
            if now - serving > 60 * minutes:
                break
        server.check_all()
    except Exception as error:
        died = described(error)
    line: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # of a context that is lost
        line = sample(server, started)
    line.update(steps=server.figures.steps, done=True, died=died)
    for name in ("wrong_calls", "wrong_replays", "canary_bytes", "canary_hits"):
        line.setdefault(name, getattr(server.figures, name))
    write(line)


def main() -> None:
    made = argparse.ArgumentParser(prog="catalogue.serving")
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--steps", type=int, default=10**9)
    made.add_argument("--minutes", type=float, default=4.0)
    made.add_argument("--every", type=float, default=2.0, help="seconds between samples")
    made.add_argument("--short", action="store_true", help="a small model, for a memory checker")
    made.add_argument("--out", type=Path, required=True)
    options = made.parse_args()
    torch.manual_seed(options.seed)
    gc.collect()
    with options.out.open("w") as out:
        size = SHORT if options.short else Size()
        run(options.seed, options.steps, options.minutes, size, out, options.every)
    sys.stderr.flush()
    os._exit(0)  # graphs are alive: their teardown is a case of its own


if __name__ == "__main__":
    main()
