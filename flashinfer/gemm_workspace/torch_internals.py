"""The only module that touches parts of torch that are not public."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch


def _absent(index: int) -> int:
    raise RuntimeError(f"this torch {torch.__version__} has no CUDA streams (device {index} asked)")


# All bound at import, none calls CUDA by being bound. A build without CUDA has none of them.

# Handle of the current stream of a device, without building a Stream object (0.1 us against 1).
raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _absent)

# (stream id, device index, device type) of the current stream of a device.
_current_stream: Callable[[int], tuple[int, int, int]] | None = getattr(
    torch._C, "_cuda_getCurrentStream", None
)

# Index of the current device without torch's lazy initialisation; -2, no index, without CUDA.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -2)

# Whether the current stream of the current device captures; torch.cuda's own function without
# its Python layer. A build without CUDA has a stand-in there that raises.
is_current_stream_capturing: Callable[[], bool] = (
    torch._C._cuda_isCurrentStreamCapturing
    if hasattr(torch._C, "_cuda_getDevice")
    else lambda: False
)


def current_stream_lasts(index: int) -> bool:
    """Whether the current stream of device ``index`` lives as long as the process.

    The default stream (id 0) and the streams of torch's pools do: torch never destroys them. The
    id of a stream from elsewhere is its handle, an aligned pointer, so its lowest bit is 0, while
    c10/cuda/CUDAStream.cpp sets that bit in the id of each of its own (torch 2.1 on). When in
    doubt: no, which costs a query a call and no safety.
    """
    if _current_stream is None:
        return False
    stream_id = _current_stream(index)[0]
    return stream_id == 0 or bool(stream_id & 1)


dynamo_tracing = torch.compiler.is_dynamo_compiling
modes_active: Callable[[], int] = torch._C._len_torch_dispatch_stack
function_modes_active: Callable[[], int] = torch._C._len_torch_function_stack
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
    if dynamo_tracing():
        return True
    return modes_active() > 0 and any(_mode(key) is not None for key in _TRACING_MODES)


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


# What an audit reads of the caching allocator. ---------------------------------------------------


def allocator_state() -> tuple[list[dict[str, Any]], list[list[dict[str, Any]]]]:
    """Segments with their blocks, and by device what the allocator recorded, oldest first.

    Takes time for each block and each entry. Raises RuntimeError where the allocator has none.
    """
    state: Any = torch.cuda.memory._snapshot()
    return state["segments"], state["device_traces"]


def allocator_segments() -> list[dict[str, Any]]:
    """Segments with their blocks alone, where torch can leave out the rest (2.13 on)."""
    snapshot: Any = torch.cuda.memory_snapshot
    lean = "include_traces" in inspect.signature(snapshot).parameters
    segments: list[dict[str, Any]] = snapshot(include_traces=False) if lean else snapshot()
    return segments


def history_recorded() -> bool:
    """Whether the allocator records what it does."""
    asked: Callable[[], bool] | None = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    return asked is not None and bool(asked())


def record_history(entries: int) -> None:
    """Let the allocator record its last ``entries`` actions, without stacks; 0 ends it."""
    if entries:
        torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=entries)
    else:
        torch.cuda.memory._record_memory_history(enabled=None)


def tensors_alike(tensors: tuple[torch.Tensor, ...]) -> Callable[..., bool] | None:
    """A function that says of as many tensors whether they are like these, one by one: class,
    dtype, device, shape, strides, and dispatch keys and modes that act on them.

    One call into C++ for all (0.3 us for five, where reading them one by one takes 2). It keeps
    none of the tensors. Distinct tensors only: for a tensor that comes twice it says no. ``None``
    where this torch has no such function, or another one.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        sizes: list[Any] = [list(tensor.shape) for tensor in tensors]
        strides: list[Any] = [list(tensor.stride()) for tensor in tensors]
        check: Callable[..., bool] = TensorGuards(
            *tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
        ).check
        return check if check(*tensors) is True else None
    except Exception:
        return None
