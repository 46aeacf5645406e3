"""cuDNN plan builds and handles: refused under capture, otherwise kept from harming another's.

Building loads modules and allocates. Under capture that ends the capture; on another thread it
ends a capture in global mode, unless this thread is in RELAXED mode.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import torch

from . import scope
from . import state as _state
from .errors import CudnnPlanBuildInCaptureError
from .growth import device_name
from .holds import collect, watch_plan
from .settings import ALLOW, plan_build_allowed
from .state import State, log

P = ParamSpec("P")
R = TypeVar("R")

_SIZES = ("batch", "m", "n", "k", "cache_m")


def guard_plan_build(builder: Callable[P, R]) -> Callable[P, R]:
    """Refuse ``builder`` under capture, else run it locked and in RELAXED mode.

    Stands below the builder's own cache, so that a cached plan costs nothing. The device is that
    of the argument ``device``, or of the argument ``handle``. Raises
    :class:`CudnnPlanBuildInCaptureError`.
    """
    signature = inspect.signature(builder)
    name = getattr(builder, "__name__", "plan")
    op = re.sub(r"^_?(build_)?(cudnn_)?|_graph", "", name) or name

    @functools.wraps(builder)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        state = _state.current
        arguments = _bind(signature, args, kwargs)
        index = _index(state, arguments)
        if state.device.is_capturing(index):
            shapes = (
                f"{key}={value if isinstance(value, int) else tuple(value)}"
                for key, value in arguments.items()
                if _is_shape(key, value)
            )
            _refuse(state, index, f"plan for {op}", ", ".join(shapes))
        collect(everything=False)
        with (
            state.device_lock(index),
            scope.working_on(index, plan_checked=True),
            state.device.relaxed(),
        ):
            built = builder(*args, **kwargs)
            state.plans_built += 1
        state.plan_built()
        for part in built if isinstance(built, tuple) else (built,):
            watch_plan(state, part)
        return built

    return guarded


def create_cudnn_handle(create: Callable[[], R], device: torch.device | int | None) -> R:
    """``create()`` on ``device``, and remember which device the handle is of.

    Raises :class:`CudnnPlanBuildInCaptureError` under capture: creating one allocates.
    """
    state = _state.current
    index = _index(state, {"device": device})
    if state.device.is_capturing(index):
        _refuse(state, index, "handle", "")
    with state.device_lock(index), state.device.device_guard(index), state.device.relaxed():
        handle = create()
    state.handles[handle] = index
    return handle


def _check_cudnn_plan_build_not_capturing(what: str) -> None:
    """Refuse to build a plan for ``what`` under capture, unless the guard has asked already.

    Raises :class:`CudnnPlanBuildInCaptureError`.
    """
    if scope.plan_checked():
        return
    state = _state.current
    index = scope.device_index()
    if index is None:
        index = state.device.current_index()
    if state.device.is_capturing(index):
        _refuse(state, index, f"plan for {what}", "")


def _bind(signature: inspect.Signature, args: Iterable[Any], kwargs: Any) -> dict[str, Any]:
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:  # the builder itself tells what is wrong with the call
        return {}
    bound.apply_defaults()
    return dict(bound.arguments)


def _index(state: State, arguments: dict[str, Any]) -> int:
    device, index = arguments.get("device"), None
    if isinstance(device, int):
        index = device
    elif device is not None:
        index = state.device.index_of(torch.device(device))
    elif arguments.get("handle") is not None:
        index = state.handles.get(arguments["handle"])
    return index if index is not None else state.device.current_index()


def _is_shape(key: str, value: object) -> bool:
    if key.endswith("shape"):
        return isinstance(value, (tuple, list))
    return key in _SIZES and isinstance(value, int)


def _refuse(state: State, index: int, what: str, shapes: str) -> None:
    message = (
        f"cuDNN {what}{f' ({shapes})' if shapes else ''} is to be made while the current stream "
        f"of {device_name(index)} captures a CUDA graph; wanted: made before. Making it loads "
        "modules and allocates, which can end the capture. Call this shape once outside the "
        "capture first; the captured call then finds it made. In a tensor-parallel group the "
        "other ranks wait in their collective meanwhile, so do that on every rank."
    )
    if plan_build_allowed():
        if state.first_time(f"allowed {what}"):
            log.warning("%s Going on, because %s=1.", message, ALLOW)
        return
    with state.lock:
        state.builds_refused += 1
    raise CudnnPlanBuildInCaptureError(f"{message} {ALLOW}=1 turns this error into a warning.")
