"""Watch captures, so that an audit can compare a graph's memory with what it was at capture.

``torch.cuda.CUDAGraph`` is wrapped at the first :func:`watch`, for the life of the process; while
nobody watches the wrappers only pass on.
"""

from __future__ import annotations

import functools
import inspect
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from . import captures, torch_internals
from . import state as _state
from .audit_memory import AtCapture, Snapshot, ledger_of

_MARK = "_flashinfer_gemm_workspace_watched"
# On a graph object that keeps its raw graph because of us, not because its owner asked.
_KEPT_BY_US = "_flashinfer_gemm_workspace_kept"

# What was there when each graph was captured; entries go with their graphs.
_recorded: weakref.WeakKeyDictionary[Any, AtCapture] = weakref.WeakKeyDictionary()

_watching: Watch | None = None


class Watch:
    """Records until :meth:`stop`, or until its ``with`` block ends. What was recorded stays as
    long as its graph."""

    def __init__(self) -> None:
        self.captures = 0
        self._history_is_ours = False

    def stop(self) -> None:
        """Record no more captures; graphs made from now on are as torch makes them."""
        global _watching
        if _watching is self:
            _watching = None
        if self._history_is_ours:
            self._history_is_ours = False
            torch_internals.record_history(0)

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def watch(history: int = 0, graph_class: type = torch.cuda.CUDAGraph) -> Watch:
    """From now on keep the raw graph of every ``torch.cuda.CUDAGraph`` that is made, and record
    the allocator's blocks and the fork's ledger at the end of each capture.

    ``history``: also let torch record its last ``history`` allocations and frees, unless it
    records already. Only that shows a block that was freed and handed out again in the same place
    and size. A second call returns the first's watch. Raises ValueError for a ``history`` that is
    no number of at least 0, RuntimeError where torch cannot keep raw graphs (before 2.8).
    """
    global _watching
    if not isinstance(history, int) or history < 0:
        raise ValueError(f"history is {history!r}, wanted a number of entries of at least 0")
    if "keep_graph" not in inspect.signature(graph_class.__new__).parameters:
        raise RuntimeError(
            f"torch {torch.__version__} cannot keep raw graphs, so there is nothing to watch: "
            "wanted 2.8 or later"
        )
    captures.wrap_methods(
        graph_class, _MARK, {"__init__": _init, "capture_end": _end, "reset": _reset}
    )
    if _watching is None:
        _watching = Watch()
    if history and not torch_internals.history_recorded():
        torch_internals.record_history(history)
        _watching._history_is_ours = True
    return _watching


def recorded(graph: Any) -> AtCapture | None:
    """What was recorded when ``graph`` was captured: an object, or the handle of its raw graph."""
    if not isinstance(graph, int):
        try:
            return _recorded.get(graph)
        except TypeError:  # no weak reference to it: none of those that are watched
            return None
    for each, record in list(_recorded.items()):
        if raw_graph(each) == graph:
            return record
    return None


def raw_graph(graph: Any) -> int | None:
    """Handle of the raw graph of a torch graph; ``None`` if torch has none, or keeps none."""
    try:
        return int(graph.raw_cuda_graph())
    except (RuntimeError, AttributeError):
        return None


def now() -> int:
    """Microseconds since the epoch, the clock of the allocator's history."""
    return time.time_ns() // 1000


def _record(graph: Any, capture: int | None) -> None:
    snapshot = Snapshot(torch_internals.allocator_segments())
    # The time after the snapshot: what comes later is not in it.
    _recorded[graph] = AtCapture(now(), snapshot, ledger_of(_state.current), capture)


def _init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if _watching is None:
            original(self, *args, **kwargs)
            return
        asked = bool(args[0] if args else kwargs.get("keep_graph", False))
        # torch decides here, and for good, whether the raw graph outlives its instantiation.
        original(self, *(True, *args[1:]), **{k: v for k, v in kwargs.items() if k != "keep_graph"})
        if not asked:
            setattr(self, _KEPT_BY_US, True)

    return __init__


def _end(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        watching = _watching
        capture = None if watching is None else captures.current_capture()
        result = original(self, *args, **kwargs)
        if getattr(self, _KEPT_BY_US, False):
            # As torch does for a graph that is not kept, errors included.
            self.instantiate()
        if watching is not None:
            try:
                _record(self, capture)
                watching.captures += 1
            except Exception:  # our own bookkeeping must never end a caller's capture
                _state.log.exception("could not record a capture: its audit compares with nothing")
        return result

    return capture_end


def _reset(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def reset(self: Any, *args: Any, **kwargs: Any) -> Any:
        _recorded.pop(self, None)
        return original(self, *args, **kwargs)

    return reset
