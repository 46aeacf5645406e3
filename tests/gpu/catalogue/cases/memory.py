"""Bytes: who pays for a workspace, from which pool it comes, what happens when there are none."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from .. import ops
from ..case import ALL, BLACKWELL, CUDNN, Outcome, case, outcome
from ..memory import MIB, churn, driver_bytes, tidy
from ..ops import Call, asking, described, is_typed


def _peak(call: Callable[[], object]) -> int:
    """Bytes above what torch's allocator held before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _allocates(call: Call, nbytes: int) -> tuple[dict[str, object], bool]:
    """Peaks of warm calls that ask for ``nbytes``, eager and captured."""
    with asking(nbytes):
        for _ in range(3):
            call.eager()
        eager = max(_peak(call) for _ in range(5))
        driver = driver_bytes()
        for _ in range(50):
            call()
        torch.cuda.synchronize()
        driver = driver_bytes() - driver
        try:
            call.captured()
            captured: object = _peak(call.captured)
        except Exception as error:
            if not is_typed(error):
                raise
            captured = described(error, 80)
    figures: dict[str, object] = {
        "peak of an eager call, bytes": eager,
        "peak of a capture, bytes": captured,
        "device bytes over 50 calls (other cases run beside it)": driver,
    }
    return figures, eager < MIB and isinstance(captured, int) and captured < MIB


@case(
    "B12",
    "torch's allocator under a plan that asks for 34 MiB, and one for 64 MiB, after warm-up",
    "A5",
    (*CUDNN, *BLACKWELL),
    known=("0.7",),
)
def per_call(lane: str) -> Outcome:
    call = Call(lane, (1, 16, 1024, 16384))
    figures, fine = {}, True
    for mib in (34, 64):
        seen, this = _allocates(call, mib * MIB)
        figures.update({f"{mib} MiB: {name}": value for name, value in seen.items()})
        fine = fine and this
    return outcome(fine, figures=figures)


@case(
    "B12",
    "torch's allocator under mm_fp4 CUTLASS at K=5120, N=34816",
    "A5",
    ("fp4-cutlass",),
)
def per_call_cutlass(lane: str) -> Outcome:
    figures, fine = {}, True
    for m in (1, 8, 24, 48, 128, 256):
        call = Call(lane, (1, m, 34816, 5120))
        call.eager()
        call.eager()
        eager, captured = _peak(call), _peak(call.captured)
        figures[f"M={m}, bytes eager / captured"] = f"{eager} / {captured}"
        fine = fine and eager < MIB and captured < MIB
    return outcome(fine, figures=figures)


@case(
    "B17",
    "a temporary is freed in a capture, then the workspace is first used; its bytes afterwards",
    "A7 A8",
    ALL,
    known=("0.6",),
)
def aliased(lane: str) -> Outcome:
    call = Call(lane, (1, 16, 1024, 16384))
    call.eager()
    ops.forget_workspaces()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        temporary = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        temporary.fill_(0xEE)
        del temporary
        workspace = call.workspace()
    workspace.fill_(0x5A)
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    changed = int((workspace != 0x5A).sum())
    return outcome(changed == 0, figures={"workspace bytes that the replay changed": changed})


@case(
    "B18",
    "expandable segments: first use in a capture, the graph dies, the op goes on, exit",
    "A6 A8",
    ALL,
    finishes=True,
    environment=(
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:True"),
    ),
)
def teardown(lane: str) -> Outcome:
    call = Call(lane, (1, 16, 1024, 16384))
    reference = call.eager()
    ops.forget_workspaces()
    tidy()
    graph = call.captured()
    first = torch.equal(call.replayed(graph), reference)
    del graph
    tidy()
    churn()
    eager = torch.equal(call.eager(), reference)
    graph = call.captured()
    second = torch.equal(call.replayed(graph), reference)
    return outcome(
        first and eager and second,
        figures={"first replay": first, "eager after": eager, "second replay": second},
    )


@case(
    "B28",
    "the device is full but for blocks idle in torch's allocator; more workspace is asked for",
    "A35",
    (*CUDNN, *BLACKWELL),
    alone=True,
    seconds=150,
)
def device_full(lane: str) -> Outcome:
    call = Call(lane, (1, 16, 1024, 16384))
    reference = call.eager()
    first = call.captured()
    tidy()
    free, _ = torch.cuda.mem_get_info()
    hog = torch.empty(free - 700 * MIB, dtype=torch.uint8, device="cuda")
    idle = torch.empty(500 * MIB, dtype=torch.uint8, device="cuda")
    del idle
    figures: dict[str, object] = {
        "driver sees free, MiB": torch.cuda.mem_get_info()[0] // MIB,
        "idle in torch, MiB": (torch.cuda.memory_reserved() - torch.cuda.memory_allocated()) // MIB,
    }
    fine = True
    try:
        with asking(1536 * MIB):
            call.captured()
        figures["capture that asks for 1.5 GiB"] = "served"
    except Exception as error:
        figures["capture that asks for 1.5 GiB"] = described(error)
        fine = is_typed(error) or isinstance(error, torch.OutOfMemoryError)
    try:
        with asking(300 * MIB):
            served = torch.equal(call.eager(), reference)
        figures["eager call that asks for 300 MiB"] = f"served, right {served}"
        fine = fine and served
    except Exception as error:
        figures["eager call that asks for 300 MiB"] = described(error)
        fine = False
    try:
        with asking(8192 * MIB):
            call.eager()
        figures["eager call that asks for 8 GiB"] = "served"
    except Exception as error:
        figures["eager call that asks for 8 GiB"] = described(error)
        fine = fine and isinstance(error, torch.OutOfMemoryError)
    equal = torch.equal(call.replayed(first), reference)
    again = torch.equal(call.eager(), reference)
    figures["earlier graph right"], figures["eager right afterwards"] = equal, again
    del hog
    gc.collect()
    return outcome(fine and equal and again, figures=figures)
