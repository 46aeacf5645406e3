"""What a call did on its way to the device, noted while its signature is learnt.

The edited modules put :func:`watched` before each launch that can be repeated and
:func:`noted_runner` around the tuner's runners. Outside a learning call neither does anything.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Launch(NamedTuple):
    """``getattr(owner, name)(*args, **kwargs)`` ran and returned."""

    owner: Any
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Run(NamedTuple):
    """``runner(inputs, **kwargs)`` ran and returned."""

    runner: Any
    inputs: list[Any]
    kwargs: dict[str, Any]


class Notes:
    """Everything that one call launched. ``spoilt`` says why it must not be repeated."""

    __slots__ = ("_handled", "_in_runner", "launches", "runs", "spoilt")

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.runs: list[Run] = []
        self.spoilt: str | None = None
        self._in_runner = False
        # The caller may itself be handling an error; one that appears later is a retry's.
        self._handled = sys.exc_info()[1]

    def launch(self, owner: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the launch and note it."""
        if sys.exc_info()[1] is not self._handled:
            self.spoil("a retry after an error")
        try:
            result = getattr(owner, name)(*args, **kwargs)
        except BaseException:
            self.spoil("a launch that failed")
            raise
        self.launches.append(Launch(owner, name, args, kwargs))
        return result

    def run(self, call: Callable[..., R], runner: Any, inputs: Any, kwargs: dict[str, Any]) -> R:
        """Run a runner and note it; one that another runner calls is the other's business."""
        if self._in_runner:
            return call(runner, inputs, **kwargs)
        self._in_runner = True
        # Now: a runner may change the list.
        run = Run(runner, list(inputs), kwargs)
        try:
            result = call(runner, inputs, **kwargs)
        except BaseException:
            self.spoil("a runner that failed")
            raise
        finally:
            self._in_runner = False
        self.runs.append(run)
        return result

    def spoil(self, why: str) -> None:
        """What is noted must not be repeated; the first reason stays."""
        self.spoilt = self.spoilt or why


class _Local(threading.local):
    notes: Notes | None = None


_local = _Local()


def noted(notes: Notes, call: Callable[[], R]) -> R:
    """``call()``, with everything that this thread launches meanwhile in ``notes``."""
    before, _local.notes = _local.notes, notes
    try:
        return call()
    finally:
        _local.notes = before
        if before is not None:
            before.spoil("another op's call inside")


class _Watched:
    """Stands for ``owner``; its methods are noted."""

    __slots__ = ("_notes", "_owner")

    def __init__(self, owner: Any, notes: Notes) -> None:
        self._owner, self._notes = owner, notes

    def __getattr__(self, name: str) -> Callable[..., Any]:
        notes, owner = self._notes, self._owner
        return lambda *args, **kwargs: notes.launch(owner, name, args, kwargs)


def watched(owner: T) -> T:
    """``owner``, or, in a learning call, a stand-in whose methods are noted when they return."""
    notes = _local.notes
    return owner if notes is None else _Watched(owner, notes)  # type: ignore[return-value]


def noted_runner(call: Callable[..., R]) -> Callable[..., R]:
    """Decorates a runner's ``__call__(self, inputs, **kwargs)``: noted in a learning call."""

    @functools.wraps(call)
    def run(self: Any, inputs: Any, **kwargs: Any) -> R:
        notes = _local.notes
        if notes is None:
            return call(self, inputs, **kwargs)
        return notes.run(call, self, inputs, kwargs)

    return run
