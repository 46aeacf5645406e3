"""Audit a captured CUDA graph: does it refer only to memory that is still there, and still its own?

::

    from flashinfer.gemm_workspace import audit

    with audit.watch():                  # before the engine captures
        engine.capture_graphs()
    ...
    report = audit.audit(graph)          # a torch.cuda.CUDAGraph, or the handle of a raw graph
    print(report.text())
    sys.exit(report.exit_status)

Not imported by the package itself. ``docs/audit.md`` of the fork says what each verdict means and
what no audit can see.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import torch

from . import state as _state
from . import torch_internals
from .audit_findings import Finding, Findings
from .audit_graph import Node
from .audit_memory import DEFAULT_POOL, AtCapture, History, Pool, Snapshot, ledger_of
from .audit_owners import Known, Verdict
from .audit_report import Report
from .audit_watch import Watch, raw_graph, recorded, watch
from .captures import pool_id
from .driver_graph import reading
from .errors import DriverError, DriverUnavailable

__all__ = ["AuditError", "Finding", "Report", "Verdict", "Watch", "audit", "judge", "watch"]


class AuditError(RuntimeError):
    """A graph could not be read at all."""


def audit(graph: Any, pool: object = None) -> Report:
    """Every device address that ``graph`` refers to, whose it is, and what to think of it.

    ``graph``: a ``torch.cuda.CUDAGraph`` that keeps its raw graph (``keep_graph=True``, or made
    under :func:`watch`), or the handle of a raw graph, as an int or an object of cuda-python.
    ``pool``: the graph pool of a raw handle; a torch graph says its own.

    Reads the graph and the allocator, changes nothing, waits for nothing, and may run while other
    threads capture. Raises :class:`AuditError` when the graph cannot be read, TypeError for
    something else.
    """
    handle = _handle(graph)
    before = recorded(graph if _is_torch_graph(graph) else handle)
    own_pool = _own_pool(graph, pool)
    now, history, limits = _allocator()
    try:
        with reading(torch.cuda.current_device()) as reader:
            nodes = reader.nodes(handle)
            known = Known(
                now=now,
                ledger=ledger_of(_state.current),
                history=history,
                own_pool=own_pool,
                at_capture=before,
                own_allocations=[each.allocates for each in nodes if each.allocates is not None],
                lookup=reader.lookup,
                of_the_host=_readable(),
            )
            found = Findings(nodes, known)
    except (DriverUnavailable, DriverError) as error:
        raise AuditError(f"the graph {handle:#x} cannot be read: {error}") from error
    limits += _limits(before, history, own_pool)
    return Report.over(len(nodes), found, tuple(limits))


def judge(nodes: list[Node], known: Known) -> list[Finding]:
    """What ``known`` says of every address in ``nodes``. Plain data in, plain data out."""
    return list(Findings(nodes, known).of())


def _allocator() -> tuple[Snapshot, History, list[str]]:
    """Torch's blocks, what it recorded, and what limits both.

    A function of its own: the objects that torch makes, one or more a block, are gone when it
    returns, and no garbage collection of what follows goes through them.
    """
    limits = []
    try:
        segments, traces = torch_internals.allocator_state()
    except RuntimeError as error:  # an allocator that is not torch's own has no snapshot
        segments, traces = [], []
        limits.append(f"torch's allocator gives no snapshot: its memory is unknown ({error})")
    # What was recorded before recording ended says nothing of what came after.
    history = History(traces if torch_internals.history_recorded() else ())
    return Snapshot(segments), history, limits


def _is_torch_graph(graph: Any) -> bool:
    return isinstance(graph, torch.cuda.CUDAGraph) or hasattr(graph, "raw_cuda_graph")


def _handle(graph: Any) -> int:
    if _is_torch_graph(graph):
        raw = raw_graph(graph)
        if raw is None:
            raise AuditError(
                "this CUDAGraph has no raw graph: it was not captured yet, or torch dropped it. "
                "Capture into torch.cuda.CUDAGraph(keep_graph=True), or call "
                "flashinfer.gemm_workspace.audit.watch() before the graph object is made."
            )
        return raw
    try:
        handle = int(graph)
    except (TypeError, ValueError):
        raise TypeError(
            f"graph is a {type(graph).__name__}, wanted a torch.cuda.CUDAGraph or the handle of a "
            "raw graph"
        ) from None
    if handle <= 0:
        raise AuditError(f"graph is {handle}, wanted the handle of a raw graph")
    return handle


def _own_pool(graph: Any, pool: object) -> Pool | None:
    if pool is None and _is_torch_graph(graph):
        try:
            pool = graph.pool()
        except RuntimeError:  # it captured without one
            return None
    identity = pool_id(pool)
    if not isinstance(identity, tuple) or len(identity) != 2 or identity == DEFAULT_POOL:
        return None
    return int(identity[0]), int(identity[1])


def _limits(before: AtCapture | None, history: History, own_pool: Pool | None) -> list[str]:
    limits = []
    if before is None or before.snapshot is None:
        limits.append(
            "the capture was not watched: memory that has another owner by now counts as live "
            "(call watch() before the capture)"
        )
    elif not history.reaches_back_to(before.time):
        limits.append(
            "the allocator's history does not reach back to the capture: a block that was freed "
            "and handed out again in the same place and size counts as live (watch(history=...))"
        )
    if own_pool is None:
        limits.append("the graph's own pool is not known: its memory is judged like any other")
    return limits


def _readable() -> Callable[[int], bool]:
    """Whether an address is memory of the host that this process can read; asked lazily."""
    starts: list[int] = []
    ends: list[int] = []

    def readable(address: int) -> bool:
        if not starts:
            for start, end in _host_ranges():
                starts.append(start)
                ends.append(end)
        at = bisect_right(starts, address) - 1
        return at >= 0 and address < ends[at]

    return readable


def _host_ranges() -> list[tuple[int, int]]:
    ranges = []
    try:
        with open("/proc/self/maps", encoding="ascii", errors="replace") as file:
            for line in file:
                place, rights, _ = line.split(" ", 2)
                # The driver reserves device addresses in here as well, without any right.
                if rights.startswith("r"):
                    start, _, end = place.partition("-")
                    ranges.append((int(start, 16), int(end, 16)))
    except OSError:
        # Then nothing is told apart: every address is taken for the host's, none for stale.
        return [(0, 1 << 64)]
    return sorted(ranges)
