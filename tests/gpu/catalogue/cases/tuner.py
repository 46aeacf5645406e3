"""The autotuner: scratch, both ways of profiling, tuned cache files, override shape."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
from pathlib import Path
from typing import Any

import torch

from .. import ops
from ..case import ALL, BLACKWELL, CUBLAS, CUDNN, Absent, Outcome, case, outcome, override_shape
from ..memory import MIB, Others, tidy
from ..ops import Call, asking, described, is_typed, runtime

BUCKETS = (16, 64)
#: Where the release of a version leaves its tuned files for its fork.
SHARED = "CATALOGUE_SHARED"

_CONFIGURATIONS = {
    "fp8": ("_FP8_GEMM_SM100_TUNING_CONFIG",),
    "bf16": ("_BF16_GEMM_SM100_TUNING_CONFIG",),
    "mxfp8": ("_MM_MXFP8_TUNING_CONFIG",),
    "fp4": ("_MM_FP4_TUNING_CONFIG_128x4", "_MM_FP4_TUNING_CONFIG_8x4"),
}


def _autotune(tune: bool, cache: str | None = None) -> Any:
    function = ops.needed(ops.autotuner, "autotune")
    offered = inspect.signature(function).parameters
    arguments: dict[str, Any] = {"cache": cache, "tuning_buckets": BUCKETS}
    return function(tune, **{name: value for name, value in arguments.items() if name in offered})


def _profile(op: str, graph_and_cold: bool) -> None:
    """Profile ``op`` by graph replays from a cold cache, or by plain hot calls."""
    for name in _CONFIGURATIONS[op]:
        settings = ops.needed(ops.gemm_base, name)
        both = {"use_cuda_graph": graph_and_cold, "use_cold_l2_cache": graph_and_cold}
        known = {field.name for field in dataclasses.fields(settings)}
        if not both.keys() <= known:
            raise Absent(f"this version's TuningConfig has no {sorted(both.keys() - known)}")
        setattr(ops.gemm_base, name, dataclasses.replace(settings, **both))


def _growths_in_captures() -> int:
    fork = runtime()
    if fork is None:
        return 0
    return sum(
        1 for growth in fork.stats()["growths"] if growth["capture"] is not None and growth["old"]
    )


def _captures(call: Call) -> tuple[dict[str, Any], bool, torch.cuda.CUDAGraph | None]:
    """Capture at once, no eager call before; what the op was handed and asked for."""
    plans: list[Any] = []
    ops.local.plans, ops.local.handed = plans, None
    before = _growths_in_captures()
    try:
        graph = call.captured()
    except Exception as error:
        return {"capture": described(error)}, is_typed(error), None
    finally:
        ops.local.plans = None
    figures: dict[str, Any] = {"capture": "made"}
    handed = ops.local.handed
    asked = 0
    for plan in plans:
        try:
            asked = max(asked, int(plan.get_workspace_size()))
        except Exception:
            continue
    if handed is not None:
        figures["handed, bytes"] = handed.nbytes
    if asked:
        figures["plan asks for, bytes"] = asked
    if runtime() is not None:
        figures["growths in it"] = _growths_in_captures() - before
        return figures, figures["growths in it"] == 0, graph
    return figures, handed is None or asked <= handed.nbytes, graph


@case(
    "B19",
    "tune by hot calls and by cold graph replays; capture at once; then capture an untuned M",
    "A20 A21",
    ALL,
    seconds=240,
)
def tuned_then_captured(lane: str) -> Outcome:
    figures: dict[str, Any] = {}
    fine = True
    op = lane.split("-")[0]
    for how, cold in (("hot calls", False), ("cold graph replays", True)):
        ops.autotuner.AutoTuner.get().clear_cache()
        ops.clear_plan_caches()
        ops.forget_workspaces()
        tidy()
        _profile(op, cold)
        call = Call(lane, (1, 64, 1024, 16384), seed=4)
        other = Call(lane, (1, 48, 1024, 16384), seed=5)
        before = torch.cuda.memory_allocated()
        with _autotune(True):
            call()
        torch.cuda.synchronize()
        tidy()
        kept = torch.cuda.memory_allocated() - before
        ops.local.chosen = None
        seen, no_growth, graph = _captures(call)
        seen["chosen"] = str(ops.local.chosen)
        others = Others(8)
        reference = call.eager()
        equal = graph is not None and torch.equal(call.replayed(graph), reference)
        near = call.error() < call.tolerance
        untuned, untuned_fine, second = _captures(other)
        other_reference = other.eager()
        if second is not None:
            same = torch.equal(other.replayed(second), other_reference)
            untuned["replay right"] = same
            untuned_fine = untuned_fine and same
        overwritten = others.overwritten()
        figures.update({f"{how}: {name}": value for name, value in seen.items()})
        figures[f"{how}: scratch kept, bytes"] = kept
        figures[f"{how}: replay right"] = equal and near
        figures.update({f"{how}: untuned M, {name}": value for name, value in untuned.items()})
        figures[f"{how}: bytes of others overwritten"] = overwritten
        # The release's own workspace is in torch's allocator, a second of another length may be.
        fine = fine and no_growth and equal and near and untuned_fine and kept <= 96 * MIB
        fine = fine and overwritten == 0
        del others, graph, second
    return outcome(fine, figures=figures)


@case(
    "B20",
    "plans with override shape: built for one M, run for smaller and larger ones",
    "A26 A27",
    (*CUDNN, *BLACKWELL),
    needs=(override_shape,),
)
def overridden(lane: str) -> Outcome:
    figures: dict[str, Any] = {}
    n, k = 10304, 2688
    address = None
    fine = True
    first = Call(lane, (1, 2001, n, k))
    reference = first.eager()
    graph = first.captured()
    for m in (1024, 7, 1999, 2001, 2048, 2049, 4096, 1):
        call = Call(lane, (1, m, n, k), seed=m)
        call()
        torch.cuda.synchronize()
        error = call.error()
        finite = bool(call.out.isfinite().all())
        handed = ops.local.handed
        if address is None and handed is not None:
            address = handed.address
        same = handed is None or handed.address == address
        figures[f"M={m}"] = f"error {error:.4f}, same address {same}"
        fine = fine and finite and error < call.tolerance and same
    equal = torch.equal(first.replayed(graph), reference)
    figures["M=2001 captured first, replay right"] = equal
    return outcome(fine and equal, figures=figures)


def _choices(lane: str) -> list[list[Any]]:
    """(m, runner, tactic) that the tuner names now.

    Each from a workspace that nothing has outgrown: its length is in the key of some ops, and the
    release's changes when a plan outgrows it, so that its own answers depend on what ran before.
    """
    found = []
    for m in (16, 20, 64, 100):
        if runtime() is None:
            ops.forget_workspaces()
        call = Call(lane, (1, m, 1024, 4096), seed=m)
        ops.local.chosen = None
        call()
        torch.cuda.synchronize()
        runner, tactic = ops.local.chosen or ("", None)
        found.append([m, runner, json.loads(json.dumps(tactic, default=str))])
    return found


@case(
    "B30",
    "a cache file tuned by the release, read by its fork, before and after growth to 300 MiB",
    "A27",
    (*CUDNN, *CUBLAS, *BLACKWELL),
    after_release=True,
    seconds=240,
)
def tuned_file(lane: str) -> Outcome:
    folder = os.environ.get(SHARED)
    if not folder:
        raise Absent(f"${SHARED} names no folder to share tuned files in")
    version = str(ops.flashinfer.__version__)
    cache = Path(folder) / f"tuned-{version}-{lane}.json"
    notes = cache.with_suffix(".chosen.json")
    if runtime() is None:
        with _autotune(True, str(cache)):
            for m in BUCKETS:
                Call(lane, (1, m, 1024, 4096), seed=m)()
        ops.autotuner.AutoTuner.get().clear_cache()
        with _autotune(False, str(cache)):
            chosen = _choices(lane)
        notes.write_text(json.dumps(chosen))
        tuned = sum(1 for _, _, tactic in chosen if tactic != -1)
        return outcome(True, note="wrote the file", figures={"shapes that find a tactic": tuned})
    if not notes.is_file():
        raise Absent(f"no release {version} in this run has written a tuned file")
    wanted = json.loads(notes.read_text())
    with _autotune(False, str(cache)):
        first = _choices(lane)
        if lane.endswith("cudnn"):
            with asking(300 * MIB):
                Call(lane, (1, 16, 1024, 4096)).eager()
        else:
            ops.utils._get_cache_buf(ops.WORKSPACES[lane], 300 * MIB, torch.device("cuda:0"))
        second = _choices(lane)
    return outcome(
        first == wanted == second,
        figures={
            "release": json.dumps(wanted),
            "fork": json.dumps(first),
            "same before growth": first == wanted,
            "same after growth": second == wanted,
        },
    )
