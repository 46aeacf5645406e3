"""Which captures run, and which graph pool each was begun with.

``torch.cuda.CUDAGraph`` says neither under capture: ``pool()`` answers only after the end, and a
pool that torch made itself has no name before that. So ``capture_begin``, ``capture_end`` and
``reset`` of the class are wrapped, once, at import; and of ``torch.accelerator.Graph``, where this
torch has one.

Why that is safe on torch 2.8 to 2.15: in all of them these are plain Python methods of
``torch.cuda.graphs.CUDAGraph`` over the C++ class, and ``torch.cuda.graph``,
``make_graphed_callables`` and cudagraph trees call them on the object. The pool is the first
parameter and is called ``pool``; later releases only add parameters after it, and all arguments
are passed on as they came. The original's result and errors are the caller's. What is recorded
runs after it and cannot raise; only the collection runs before, while no capture can be harmed.
``torch.accelerator.Graph`` is such a class too, and is given its pool when it is made: it keeps it
as ``graph_pool``. One that does not would have lanes of its own.

Whoever goes round the classes (their C++ bases, the driver itself, a capture begun before this
import) makes a capture whose pool is unknown: it gets lanes of its own, which is safe and only
costs memory.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

import torch

from . import driver, torch_internals
from .errors import CudnnCaptureUnsafeError, DriverError, DriverUnavailable

_log = logging.getLogger("flashinfer.gemm_workspace")

_MARK = "_flashinfer_gemm_workspace"


class _Record:
    """What is known of one graph object since its last ``capture_begin``."""

    def __init__(self, capture: int | None, pool: Hashable | None) -> None:
        self.capture = capture
        self.key: Hashable | None = pool
        # Whether anybody asked for the key: what nobody used need not be remembered.
        self.asked = False
        # The pool that torch made for this capture or an earlier one, while this graph has it.
        self.made_by_torch: Hashable | None = None
        self.finalizer: weakref.finalize[Any, Any] | None = None


def current_capture() -> int | None:
    """Id of the capture of the current stream; ``None`` if that cannot be told."""
    try:
        stream = torch_internals.raw_stream(torch_internals.current_device())
        return driver.capture_info(stream)[0]
    except (DriverUnavailable, DriverError, CudnnCaptureUnsafeError, RuntimeError):
        return None


class Registry:
    """Captures that run, by graph object and by capture id. Any thread may call."""

    def __init__(self, capture_of_stream: Callable[[], int | None] = current_capture) -> None:
        self._capture_of_stream = capture_of_stream
        self._lock = threading.RLock()
        self._graphs: dict[int, _Record] = {}
        self._captures: dict[int, _Record] = {}
        self._running: set[_Record] = set()
        # Pools that torch made itself: the key that lanes have, and how many graphs have it.
        self._made: dict[Hashable, tuple[Hashable, int]] = {}
        # Graph objects that died, until somebody looks after them; others read whether there are
        # any. Filled by finalizers, which may run at any point of any thread, this module's own
        # code included: they take no lock and only append.
        self.dead: deque[tuple[int, _Record]] = deque()

    def running(self) -> int:
        """How many captures run."""
        if self.dead:
            with self._lock:
                self._bury()
        return len(self._running)

    def pool_of(self, capture: int) -> Hashable | None:
        """Key of the pool of ``capture``, ``None`` if nobody saw it begin."""
        record = self._captures.get(capture)
        if record is None:
            return None
        record.asked = True
        return record.key

    def began(self, graph: Any, pool: object) -> None:
        """``graph`` has just begun to capture the current stream, with ``pool`` as given."""
        capture, given = self._capture_of_stream(), pool_id(pool)
        with self._lock:
            self._bury()
            self._leave(self._graphs.pop(id(graph), None))
            key: Hashable | None = given
            record = _Record(capture, key)
            if given is None:
                record.key = None if capture is None else ("made for", capture)
            elif given in self._made:
                record.key, count = self._made[given]
                self._made[given] = record.key, count + 1
                record.made_by_torch = given
            self._graphs[id(graph)] = record
            if capture is not None:
                self._captures[capture] = record
            self._running.add(record)
        # Not under the lock: it allocates, so it may run the finalizers of other graphs.
        record.finalizer = weakref.finalize(graph, self.dead.append, (id(graph), record))
        record.finalizer.atexit = False

    def ended(self, graph: Any, succeeded: bool) -> None:
        """``capture_end`` of ``graph`` has returned, or raised."""
        with self._lock:
            self._bury()
            record = self._graphs.get(id(graph))
            if record is None:
                return
            self._stop(record)
            wanted = record.asked and record.made_by_torch is None and record.key is not None
        made = _pool_made(graph) if succeeded and wanted else None
        if made is None:
            return
        with self._lock:
            # A pool given by the caller is its own key already.
            if made != record.key and made not in self._made:
                assert record.key is not None
                self._made[made] = record.key, 1
                record.made_by_torch = made

    def dropped(self, graph: Any) -> None:
        """``graph`` was reset: it has neither a capture nor a pool any more.

        Takes no lock: an object's ``__del__`` may reset its graph while this thread holds it.
        """
        record = self._graphs.get(id(graph))
        if record is not None:
            self.dead.append((id(graph), record))

    def sizes(self) -> tuple[int, int, int]:
        """How many graphs, captures and pools of torch's own are remembered."""
        with self._lock:
            self._bury()
            return len(self._graphs), len(self._captures), len(self._made)

    # Below: the caller has the lock. ------------------------------------------------------------

    def _bury(self) -> None:
        while self.dead:
            key, record = self.dead.popleft()
            # The id of a dead object may belong to another by now.
            if self._graphs.get(key) is record:
                del self._graphs[key]
            self._leave(record)

    def _leave(self, record: _Record | None) -> None:
        if record is None:
            return
        if record.finalizer is not None:
            record.finalizer.detach()
            record.finalizer = None
        self._stop(record)
        made, record.made_by_torch = record.made_by_torch, None
        if made is not None:
            key, count = self._made[made]
            if count > 1:
                self._made[made] = key, count - 1
            else:
                del self._made[made]

    def _stop(self, record: _Record) -> None:
        self._running.discard(record)
        if record.capture is not None and self._captures.get(record.capture) is record:
            del self._captures[record.capture]


def pool_id(pool: object) -> Hashable | None:
    """The pool that ``capture_begin`` was given, as the tuple of ints that torch makes of it.

    ``None`` for none, and for what is not understood: that capture then has lanes of its own.
    """
    if pool is None:
        return None
    identity: Any = getattr(pool, "id", pool)  # a MemPool has one
    try:
        numbers = tuple(int(number) for number in identity)
    except (TypeError, ValueError):
        return None
    return numbers if any(numbers) else None  # (0, 0) is torch's way to say none


def _pool_made(graph: Any) -> Hashable | None:
    try:
        return pool_id(graph.pool())
    except Exception:  # torch could not say: later captures into that pool get lanes of their own
        return None


registry = Registry()

# Called before a capture begins, while none may run yet: the last moment to collect.
before_begin: Callable[[], None] = lambda: None  # noqa: E731 - a slot, filled by the package


def forget() -> None:
    """After a fork: the parent's captures are not the child's."""
    global registry
    registry = Registry()


def graph_classes() -> list[type]:
    """The classes of this torch by which a capture can begin."""
    newer = getattr(getattr(torch, "accelerator", None), "Graph", None)
    return [torch.cuda.CUDAGraph] if newer is None else [torch.cuda.CUDAGraph, newer]


def install(graph_class: type) -> None:
    """Wrap the methods of ``graph_class`` by which a capture begins and ends; once."""
    wrap_methods(
        graph_class, _MARK, {"capture_begin": _begin, "capture_end": _end, "reset": _reset}
    )


def wrap_methods(
    graph_class: type, mark: str, wrappers: dict[str, Callable[[Callable[..., Any]], Any]]
) -> None:
    """Put a wrapper around each method named; one that has ``mark`` already is left alone."""
    for name, wrap in wrappers.items():
        original = getattr(graph_class, name)
        if not hasattr(original, mark):
            wrapped = wrap(original)
            setattr(wrapped, mark, True)
            setattr(graph_class, name, wrapped)


def _safely(step: Callable[..., None], *arguments: object) -> None:
    """Run ``step``: our own bookkeeping must never end a caller's capture."""
    try:
        step(*arguments)
    except Exception:
        _log.exception("could not follow a capture; it gets lanes of its own")


def _begin(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        _safely(before_begin)
        result = original(self, *args, **kwargs)
        pool = args[0] if args else kwargs.get("pool")
        _safely(registry.began, self, getattr(self, "graph_pool", None) if pool is None else pool)
        return result

    return capture_begin


def _end(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        succeeded = False
        try:
            result = original(self, *args, **kwargs)
            succeeded = True
        finally:
            _safely(registry.ended, self, succeeded)
        return result

    return capture_end


def _reset(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def reset(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        finally:
            _safely(registry.dropped, self)

    return reset
