"""Executing a cuDNN plan: one thread a device at a time, and a hold under capture."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from . import captures, scope
from . import state as _state
from .errors import DriverError, DriverUnavailable
from .holds import collect, hold_plan, keep_plan

P = ParamSpec("P")
R = TypeVar("R")

_OPERAND = "a"


def device_locked(function: Callable[P, R]) -> Callable[P, R]:
    """Hold the lock of the device of argument ``a`` while ``function`` runs.

    All threads share one cuDNN handle a device: between ``set_stream`` and the end of
    ``execute`` another thread must not set its own stream. Raises TypeError on decorating a
    function without an argument ``a``.
    """
    parameters = list(inspect.signature(function).parameters)
    if _OPERAND not in parameters:
        raise TypeError(
            f"{function!r} has arguments {parameters}, wanted one called {_OPERAND!r}: name the "
            "first operand so, or lock elsewhere"
        )
    position = parameters.index(_OPERAND)
    name = getattr(function, "__name__", "plan")
    op = re.sub(r"^_?(execute_)?(cudnn_)?|_graph", "", name) or name
    local = scope.local

    @functools.wraps(function)
    def locked(*args: P.args, **kwargs: P.kwargs) -> R:
        operand = args[position] if len(args) > position else kwargs.get(_OPERAND)
        state = _state.current
        device = getattr(operand, "device", None)
        index = state.device.index_of(device) if type(device) is torch.device else None
        if index is None:
            return function(*args, **kwargs)
        before = local.work
        # An engine that only makes eager calls that hit has no slower step to do it in.
        if captures.registry.dead:
            collect(everything=False, unpin=False)
        # Written out: a generator's context manager costs a microsecond.
        with state.device_locks.get(index) or state.device_lock(index):
            capturing = state.device.is_capturing(index)
            local.work = (index, op, capturing)
            if not capturing:
                try:
                    return function(*args, **kwargs)
                finally:
                    local.work = before
            capture, local.capture = local.capture, None
            try:
                return function(*args, **kwargs)
            finally:
                local.work, local.capture = before, capture

    return locked


def _retain_cudnn_graph_if_capturing(graph: object) -> None:
    """Hold ``graph``'s plan, once, for the graph that the current stream captures into, if any:
    its replays run the plan's kernels.

    Raises :class:`CudnnCaptureUnsafeError` when the capture is already invalid.
    """
    state = _state.current
    device, index = state.device, scope.device_index()
    if index is None:
        index = device.current_index()
    if not scope.is_capturing(device, index):
        return
    try:
        capture = scope.capture(device, index)
    except (DriverUnavailable, DriverError) as error:
        keep_plan(state, graph, error)
    else:
        hold_plan(state, capture, graph)
