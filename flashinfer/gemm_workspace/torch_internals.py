"""The only module that touches parts of torch that are not public."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch


def _absent(index: int) -> int:
    raise RuntimeError(f"this torch {torch.__version__} has no CUDA streams (device {index} asked)")


# Handle of the current stream of a device, without building a Stream object (0.1 us against 1).
raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _absent)

# Index of the current device without torch's lazy initialisation; absent in CPU builds.
current_device: Callable[[], int] | None = getattr(torch._C, "_cuda_getDevice", None)

_modes_active: Callable[[], int] = torch._C._len_torch_dispatch_stack
_mode: Callable[[Any], object] = torch._C._get_dispatch_mode
_TRACING_MODES = (
    torch._C._TorchDispatchModeKey.FAKE,
    torch._C._TorchDispatchModeKey.PROXY,
    torch._C._TorchDispatchModeKey.FUNCTIONAL,
)


def tracing() -> bool:
    """Whether this thread runs code to trace it, so that its tensors are not real ones.

    Not ``torch.compiler.is_compiling()``: that flag belongs to the process, and a compile on
    another thread would turn this thread's real calls away from their lanes. Dynamo replaces
    ``is_dynamo_compiling``; everything after Dynamo runs under one of the modes below. Modes of
    other kinds (counters, loggers) see real tensors and do not count.
    """
    if torch.compiler.is_dynamo_compiling():
        return True
    return _modes_active() > 0 and any(_mode(key) is not None for key in _TRACING_MODES)


def is_traced_tensor(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a FakeTensor or a FunctionalTensor, also outside its mode."""
    if type(tensor) is torch.Tensor:
        return False
    for module, name in (
        ("torch._subclasses.fake_tensor", "FakeTensor"),
        ("torch._subclasses.functional_tensor", "FunctionalTensor"),
    ):
        # A module that nobody imported made no tensors.
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and isinstance(tensor, kind):
            return True
    return False
