"""Plans: evicted or cleared while captured, and built where they must not be."""

from __future__ import annotations

import functools
import gc
import re
import time
import warnings
from typing import Any

import torch

from .. import ops
from ..case import ALL, BLACKWELL, CUDNN, Absent, Outcome, case, outcome
from ..memory import MIB, churn, driver_bytes
from ..ops import Call, described, is_typed

SHAPE = (1, 16, 12288, 2048)


def _graph_of_each_plan(lane: str) -> list[tuple[Call, torch.cuda.CUDAGraph, torch.Tensor]]:
    made = []
    for plan in Call(lane, SHAPE).plans():
        call = Call(lane, SHAPE, plan=plan.index)
        reference = call.eager()
        made.append((call, call.captured(), reference))
    if not made:
        raise Absent(f"no {lane} plan of {SHAPE} runs")
    return made


def _wrong(made: list[tuple[Call, torch.cuda.CUDAGraph, torch.Tensor]], times: int = 20) -> int:
    return sum(
        not torch.equal(call.replayed(graph), reference)
        for _ in range(times)
        for call, graph, reference in made
    )


def _build(lane: str, count: int, seconds: float, every_plan: bool = False) -> int:
    """Build plans for up to ``count`` new shapes, by eager calls; how many were built."""
    end = time.monotonic() + seconds
    call = Call(lane, (1, count, 9216, 256))
    operand, out = call.a, call.out
    for m in range(1, count + 1):
        call.a = operand[..., :m, :].contiguous()
        call.out = out[..., :m, :].contiguous()
        for plan in call.plans() if every_plan else []:
            call.plan = plan.index
            call()
        call.plan = None
        call()
        if time.monotonic() > end:
            torch.cuda.synchronize()
            return m
    torch.cuda.synchronize()
    return count


@case(
    "B5",
    "a graph of each plan; the plan cache is cleared and other plans are built",
    "A9",
    (*CUDNN, *BLACKWELL),
    seconds=150,
)
def cleared_plans(lane: str) -> Outcome:
    made = _graph_of_each_plan(lane)
    ops.clear_plan_caches()
    gc.collect()
    built = _build(lane, 8, 60, every_plan=lane in CUDNN) if lane in CUDNN else 0
    churn()
    wrong = _wrong(made)
    return outcome(
        wrong == 0,
        figures={
            "plans captured": len(made),
            "shapes built": built,
            "wrong of": f"{wrong} of {20 * len(made)}",
        },
    )


@case(
    "B6",
    "a graph of each plan; the plan cache overflows with 2,100 other shapes",
    "A9 A28",
    CUDNN,
    seconds=240,
)
def overflowing_plans(lane: str) -> Outcome:
    made = _graph_of_each_plan(lane)
    _build(lane, 64, 20)
    before = driver_bytes()
    started = time.monotonic()
    built = _build(lane, 2100, 120)
    seconds = time.monotonic() - started
    limit = max(builder.cache_info().maxsize or 0 for builder in ops.builders())
    evicted = built > limit
    if not evicted:
        ops.clear_plan_caches()
    gc.collect()
    wrong = _wrong(made)
    return outcome(
        wrong == 0,
        note="" if evicted else f"no eviction within the time: {built} shapes, then cleared",
        figures={
            "plans captured": len(made),
            "shapes built": built,
            "LRU limit": limit,
            "MiB of the device since (other cases run beside it)": (driver_bytes() - before) // MIB,
            "ms per shape": round(1000 * seconds / max(built, 1), 1),
            "wrong of": f"{wrong} of {20 * len(made)}",
        },
    )


def _small_lru(limit: int) -> None:
    """The release's builders, each with a cache of ``limit`` plans."""
    for name, builder in list(vars(ops.gemm_base).items()):
        if name.startswith("build_cudnn_gemm_") and hasattr(builder, "cache_clear"):
            setattr(ops.gemm_base, name, functools.lru_cache(maxsize=limit)(builder.__wrapped__))


@case(
    "B7",
    "the plan cache is full; in a capture a known shape is called, in another a new one",
    "A10 A11",
    CUDNN,
)
def full_cache_in_capture(lane: str) -> Outcome:
    _small_lru(32)
    known = Call(lane, (1, 16, 1024, 16384))
    _build(lane, 40, 60)
    reference = known.eager()
    graph = known.captured()
    new = Call(lane, (1, 24, 1024, 8192), seed=3)
    refused, other = "", None
    try:
        other = new.captured()
    except Exception as error:
        refused = described(error)
        if not is_typed(error):
            return outcome(False, note=f"capture of a new shape died: {refused}")
    equal = torch.equal(known.replayed(graph), reference)
    new_reference = new.eager()
    usable = torch.equal(new.replayed(other or new.captured()), new_reference)
    return outcome(
        equal and usable,
        note=f"the new shape was refused ({refused})" if refused else "",
        figures={"LRU of": 32, "replay right": equal, "usable afterwards": usable},
    )


def _try_capture(call: Call) -> tuple[str, BaseException | None, torch.cuda.CUDAGraph | None]:
    try:
        graph = call.captured()
    except Exception as error:
        return described(error), error, None
    return "captured", None, graph


@case(
    "B8",
    "the first call of a process is made under capture; then that of a new shape",
    "A11 A22 A30",
    ALL,
    known=("0.6",),
)
def cold_capture(lane: str) -> Outcome:
    figures: dict[str, Any] = {}
    fine = True
    for how, m in (("first of the process", 16), ("new shape, process warm", 48)):
        call = Call(lane, (1, m, 4096, 4096), seed=m)
        said, error, graph = _try_capture(call)
        typed = error is not None and is_typed(error)
        names = typed and bool(re.search(r"shape|4096", str(error)))
        figures[how] = said + ("" if not typed or names else " (names no shape)")
        ended = not torch.cuda.is_current_stream_capturing()
        try:
            reference = call.eager()
            graph = graph or call.captured()
            usable = torch.equal(call.replayed(graph), reference)
        except Exception as after:
            usable = False
            figures[f"{how}, afterwards"] = described(after)
        figures[f"{how}, usable afterwards"] = usable
        fine = fine and (error is None or typed) and ended and usable
    return outcome(fine, figures=figures)


@case(
    "B9",
    "only the default plan is built; a capture asks for a tactic that is not",
    "A22 A24",
    (*CUDNN, *BLACKWELL),
)
def not_another_plan(lane: str) -> Outcome:
    shape = (1, 16, 1024, 16384)
    plans = Call(lane, shape).plans()
    if len(plans) < 2:
        raise Absent(f"{lane} has {len(plans)} plan of {shape}, the case needs two")
    wanted = plans[-1]
    expected = Call(lane, shape, plan=wanted.index).eager()
    ops.clear_plan_caches()
    Call(lane, shape).eager()
    call = Call(lane, shape, plan=wanted.index)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        said, error, graph = _try_capture(call)
    swallowed = [str(each.message) for each in caught if "falling back" in str(each.message)]
    figures: dict[str, Any] = {"plan": wanted.name, "capture": said}
    if graph is not None:
        equal = torch.equal(call.replayed(graph), expected)
        figures["that plan's result"] = equal
        fine = equal and not swallowed
    else:
        fine = error is not None and is_typed(error)
    if swallowed:
        figures["swallowed"] = swallowed[0][:160]
    figures["usable afterwards"] = call.right()
    return outcome(fine and figures["usable afterwards"], figures=figures)


@case(
    "B26",
    "the last references to old plans are in a cycle that is collected during a capture",
    "A10",
    CUDNN,
)
def collected_in_capture(lane: str) -> Outcome:
    class Cycle:
        def __init__(self, plans: list[Any]) -> None:
            self.plans, self.me = plans, self

    old: list[Any] = []
    ops.local.plans = old
    for m in range(1, 13):
        Call(lane, (1, m, 2048, 2048), seed=m)()
    ops.local.plans = None
    torch.cuda.synchronize()
    count = len({id(plan) for plan in old})
    cycle: Cycle | None = Cycle(old)
    del old
    ops.clear_plan_caches()
    call = Call(lane, (1, 16, 1024, 16384))
    reference = call.eager()
    gc.collect()
    gc.disable()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
            cycle = None
            found = gc.collect()
            call()
    finally:
        gc.enable()
    assert cycle is None
    equal = torch.equal(call.replayed(graph), reference)
    return outcome(equal, figures={"plans dropped": count, "objects collected in it": found})
