"""Executing a cuDNN plan: one thread a device at a time, and a hold under capture."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from . import scope
from . import state as _state

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

    @functools.wraps(function)
    def locked(*args: P.args, **kwargs: P.kwargs) -> R:
        operand = args[position] if len(args) > position else kwargs.get(_OPERAND)
        state = _state.current
        device = getattr(operand, "device", None)
        index = state.device.index_of(device) if isinstance(device, torch.device) else None
        if index is None:
            return function(*args, **kwargs)
        with state.device_lock(index), scope.working_on(index):
            return function(*args, **kwargs)

    return locked


def _retain_cudnn_graph_if_capturing(graph: object) -> None:
    """Hold ``graph``'s plan, once, if the current stream captures: replays run its kernels.

    Kept for the life of the process; a later form ties it to the captured graph.
    """
    state = _state.current
    index = scope.device_index()
    if index is None:
        index = state.device.current_index()
    if state.device.is_capturing(index):
        # By id: cuDNN's graphs are not hashable by value, and a held one cannot lose its id.
        state.held_plans.setdefault(id(graph), graph)
