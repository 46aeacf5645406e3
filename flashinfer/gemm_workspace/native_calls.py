"""Prepared launches that the native library makes by itself, key and look-up included.

A signature that comes often is handed to the native library: from then on one call into it reads
the tensors' signature, finds launch and workspace, makes the output if the op makes one, and
launches. What is not a tensor is told apart here, by one look for all of it. The library launches
nothing under capture, on another device, for an unknown signature or on a stream whose workspace
it was not given; then the call goes the Python way.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

from . import native, torch_internals
from .native import Launcher, NativeRefused
from .signature import TENSORS, Form
from .state import State

# Launches of a signature before it is handed over: a cuDNN plan is built a second time for it.
AFTER = 64

# CU_STREAM_PER_THREAD: one handle for another stream in each thread.
_PER_THREAD = 2

_numbers = itertools.count(1)


class Shared(NamedTuple):
    """cuDNN's handle of a device, which all share: its lock, and how to give it a stream."""

    handle: Any
    lock: Any
    set_stream: Callable[[Any, int], None]


class Source(NamedTuple):
    """What a native launch is made of. Keeps no tensor of the caller's."""

    state: State
    device_index: int
    # The launcher and, for each address that it takes, the place of its argument; -1: the output
    # that is made. Raises NativeRefused.
    make: Callable[[], tuple[Launcher, tuple[int, ...]]]
    given: int | None  # place of the argument that is the output
    size: tuple[int, ...]  # of the output
    dtype: torch.dtype
    request: tuple[str, int, torch.device]  # of the workspace
    shared: Shared | None
    graph: Callable[[], Any] | None  # the plan's, weakly
    after: int = AFTER


class Call:
    """A signature that was handed over."""

    __slots__ = ("_gone", "_library", "launcher", "source", "streams")

    def __init__(self, found: native.Library, source: Source, launcher: Launcher) -> None:
        self._library, self.source, self.launcher = found, source, launcher
        self.streams: set[int] = set()
        self._gone: Any = None
        graph = None if source.graph is None else source.graph()
        if graph is not None:
            # An evicted plan's launches end with it; its copy goes with this object.
            number, unlearn = launcher.number, found.unlearn
            self._gone = weakref.ref(graph, lambda _: unlearn(number))

    def use(self, stream: int) -> None:
        """Let launches on ``stream`` be native, if its workspace is there for good."""
        if stream in self.streams or stream == _PER_THREAD:
            return
        known = self.source.state.hot.get(self.source.request)
        view = None if known is None else known[1].get(stream)
        if view is not None:
            number = self.launcher.number
            self._library.use_workspace(number, stream, view.data_ptr(), view.numel())
            self.streams.add(stream)

    def close(self) -> None:
        """No call launches it natively any more."""
        self._library.unlearn(self.launcher.number)


class Fast:
    """One way to write a call of an op, natively.

    ``run(*values)`` gives the output, or ``None`` if nothing was launched. It raises TypeError for
    arguments that cannot be told apart, and RuntimeError when a launch fails.
    """

    def __init__(self, found: native.Library, form: Form) -> None:
        self._library, self._form = found, form
        # By all that is not a tensor: the library's number for it, and cuDNN's handle where some
        # signature of it is cuDNN's.
        self._variants: dict[Hashable, tuple[int, Any, Any, Any, int]] = {}
        plain = [i for i in range(len(form.names)) if i not in form.tensors]
        self._plain = _compiled(
            f"lambda {_arguments(form)}: ({''.join(f'type(v{i}), v{i}, ' for i in plain)})", {}
        )
        self.run = _run(form, plain, self._variants, found.call)

    def add(self, call: Call, places: tuple[int, ...], values: tuple[Any, ...]) -> None:
        """From now on calls with the signature of ``values`` are launched by ``call``."""
        source, form = call.source, self._form
        if source.given is not None and form.names[source.given] != "out":
            raise NativeRefused("an output that is another argument than out")
        key = self._plain(*values)
        before = self._variants.get(key)
        number = next(_numbers) if before is None else before[0]
        of = [form.tensors.index(place) if place >= 0 else -1 for place in places]
        made = source.given is None
        self._library.remember(
            *(call.launcher.number, number, of),
            *((source.size, source.dtype) if made else (None, None)),
            *(values[place] for place in form.tensors),
        )
        shared = source.shared
        if shared is not None:
            entry = (number, shared.lock, shared.handle, shared.set_stream, source.device_index)
            self._variants[key] = entry
        elif before is None:
            self._variants[key] = (number, None, None, None, source.device_index)


def hand_over(fast: Fast, source: Source, values: tuple[Any, ...]) -> Call:
    """Let the native library launch calls like this one. Raises NativeRefused, and RuntimeError
    when the library refuses."""
    found = native.library()
    if found is None:
        raise NativeRefused("no native launches")
    launcher, places = source.make()
    call = Call(found, source, launcher)
    fast.add(call, places, values)
    return call


def _arguments(form: Form) -> str:
    return ", ".join(f"v{i}" for i in range(len(form.names)))


def _compiled(source: str, scope: dict[str, Any]) -> Callable[..., Any]:
    made: Callable[..., Any] = eval(compile(source, "<native call>", "eval"), scope)
    return made


def _run(
    form: Form, plain: list[int], variants: dict[Hashable, Any], call: Callable[..., Any]
) -> Callable[..., Any]:
    """Generated, as the signature's functions are: a loop over the arguments would cost as much
    as the call."""
    out = f"v{form.names.index('out')}" if "out" in form.names else "None"
    tensors = "".join(f", v{i}" for i in form.tensors)
    # Of exact classes: the library cannot see a subclass, which may run code of its own.
    strange = " or ".join(f"(v{i} is not None and type(v{i}) not in classes)" for i in form.tensors)
    source = f"""
def run({_arguments(form)}):
    variant = variants.get(({"".join(f"type(v{i}), v{i}, " for i in plain)}))
    if variant is None or {strange or "False"}:
        return None
    number, lock, handle, set_stream, index = variant
    if lock is None:
        made = call(number{tensors})
    else:
        with lock:
            set_stream(handle, raw_stream(index))
            made = call(number{tensors})
    if made is None:
        return {out}
    return None if type(made) is int else made
"""
    scope: dict[str, Any] = {
        "variants": variants,
        "classes": TENSORS,
        "call": call,
        "raw_stream": torch_internals.raw_stream,
    }
    exec(compile(source, "<native call>", "exec"), scope)
    made: Callable[..., Any] = scope["run"]
    return made
