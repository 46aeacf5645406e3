"""What a workspace holds at entry: every plan, from every filling."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from ..case import ALL, BLACKWELL, CUBLAS, CUDNN, Absent, Outcome, case, outcome
from ..memory import MIB
from ..ops import Call, Shape, user

#: Skinny, square, split-K and batched; the batch is dropped by the ops that have none.
SHAPES: list[Shape] = [
    (1, 1, 1024, 16384),
    (1, 16, 1024, 16384),
    (1, 64, 512, 65536),
    (1, 128, 256, 32768),
    (1, 16, 4096, 4096),
    (1, 16, 12288, 2048),
    (1, 17, 4096, 1024),
    (1, 48, 80, 64),
    (1, 256, 2048, 8192),
    (1, 512, 5120, 5120),
    (1, 2048, 2048, 2048),
    (8, 64, 512, 1024),
]
GUARD = 4096
#: Of each shape; cuBLASLt offers up to 100, in the order of its own heuristics.
ALGORITHMS = 32


def engine(name: str) -> str:
    """``eng0`` of ``matmul_eng0_k2=1``; the whole name where there is none."""
    found = re.search(r"eng\d+", name)
    return found.group() if found else name


#: Byte fillings, and an int32 counter that was left at 2.
FILLINGS: dict[str, Callable[[torch.Tensor], object]] = {
    "0x00": lambda workspace: workspace.fill_(0),
    "0xFF": lambda workspace: workspace.fill_(0xFF),
    "0x5A": lambda workspace: workspace.fill_(0x5A),
    "counter 2": lambda workspace: (
        workspace[: workspace.numel() // 4 * 4].view(torch.int32).fill_(2)
    ),
}


class _Count:
    """Results that are wrong, and those that differ in the last bits, counted on the device."""

    def __init__(self, call: Call, reference: torch.Tensor) -> None:
        self.call, self.reference = call, reference
        self.exact = call.exact().flatten()
        self.scale = self.exact.norm() * call.tolerance
        self.wrong = torch.zeros((), dtype=torch.int64, device=call.device)
        self.differing = torch.zeros((), dtype=torch.int64, device=call.device)

    def look(self) -> None:
        distance = (self.call.out.float().flatten() - self.exact).norm()
        self.wrong += ~(distance < self.scale)  # a NaN is wrong
        self.differing += (self.call.out != self.reference).any()


def _over_a_dirty_workspace(
    call: Call, tactic: object, nbytes: int, times: int
) -> tuple[int, int, int]:
    """(wrong results, results that differ in the last bits, guard bytes written)."""
    whole = torch.full((max(nbytes, 256) + GUARD,), 0xA5, dtype=torch.uint8, device=call.device)
    workspace = whole[: max(nbytes, 256)]
    workspace.zero_()
    call.with_workspace(workspace, tactic)
    torch.cuda.synchronize()
    count = _Count(call, call.out.clone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.with_workspace(workspace, tactic)
    for fill in FILLINGS.values():
        for launch in (lambda: call.with_workspace(workspace, tactic), graph.replay):
            for _ in range(times):
                fill(workspace)
                call.out.zero_()
                launch()
                count.look()
    torch.cuda.synchronize()
    guard = int((whole[max(nbytes, 256) :] != 0xA5).sum())
    return int(count.wrong), int(count.differing), guard


@case(
    "B10",
    "every plan of twelve shapes over a dirty workspace, four fillings, 100 launches and replays",
    "A18 A19",
    (*CUDNN, *BLACKWELL),
    seconds=240,
)
def every_plan(lane: str) -> Outcome:
    plans = using = wrong = differing = guard = 0
    engines: dict[str, list[int]] = {}
    bad: list[str] = []
    for shape in SHAPES:
        call = Call(lane, shape)
        for plan in call.plans():
            engines.setdefault(engine(plan.name), []).append(plan.nbytes)
            seen = _over_a_dirty_workspace(call, plan.index, plan.nbytes, 100)
            plans += 1
            using += plan.nbytes > 0
            wrong, differing, guard = (wrong + seen[0], differing + seen[1], guard + seen[2])
            if seen[0] or seen[2]:
                bad.append(f"{shape} plan {plan.index} {plan.name}: {seen}")
    if not plans:
        raise Absent(f"no {lane} plan runs")
    return outcome(
        wrong == 0 and guard == 0,
        note="; ".join(bad[:4]),
        figures={
            "plans": plans,
            "with a workspace": using,
            "bytes by engine": "; ".join(
                f"{name} {min(sizes)} to {max(sizes)} ({len(sizes)} plans)"
                for name, sizes in sorted(engines.items())
            ),
            "launches and replays": plans * len(FILLINGS) * 200,
            "wrong": wrong,
            "differing in the last bits": differing,
            "bytes written past its end": guard,
        },
    )


@case(
    "B10",
    "32 cuBLASLt algorithms of each of twelve shapes over a dirty workspace, 10 runs and replays",
    "A18 A19",
    CUBLAS,
    seconds=240,
)
def every_algorithm(lane: str) -> Outcome:
    algorithms = wrong = differing = guard = 0
    failed = 0
    bad: list[str] = []
    for shape in SHAPES:
        call = Call(lane, shape)
        for tactic in call.tactics()[:ALGORITHMS]:
            try:
                seen = _over_a_dirty_workspace(call, tactic, 32 * MIB, 10)
            except RuntimeError as error:
                if "CUDA error" in str(error):
                    raise
                failed += 1
                continue
            algorithms += 1
            wrong, differing, guard = (wrong + seen[0], differing + seen[1], guard + seen[2])
            if seen[0] or seen[2]:
                bad.append(f"{shape} algorithm {tactic}: {seen}")
    return outcome(
        wrong == 0 and guard == 0 and algorithms > 0,
        note="; ".join(bad[:4]),
        figures={
            "algorithms": algorithms,
            "that do not run": failed,
            "launches and replays": algorithms * len(FILLINGS) * 20,
            "wrong": wrong,
            "differing in the last bits": differing,
            "bytes written past its end": guard,
        },
    )


@case(
    "B11", "a split-K GEMM is captured; between replays the workspace is scribbled on", "A18", ALL
)
def scribbled(lane: str) -> Outcome:
    calls = [user(lane)]
    if lane in CUDNN:
        calls.append(Call(lane, (1, 64, 512, 65536)))  # the default plan
    wrong, times = 0, 200
    for call in calls:
        reference = call.eager()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            workspace = call.workspace()
            call()
        for number in range(times):
            workspace.random_(0, 256) if number % 2 else workspace.fill_(0xFF)
            wrong += not torch.equal(call.replayed(graph), reference)
    return outcome(wrong == 0, figures={"wrong of": f"{wrong} of {times * len(calls)}"})
