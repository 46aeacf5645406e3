"""Make a block: where its memory comes from, and what is said when there is none."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .device import CPU
from .errors import (
    CudnnWorkspaceTooSmallInCaptureError,
    DriverError,
    DriverUnavailable,
    GemmWorkspaceError,
)
from .state import Growth, LaneKey, State
from .storage import Storage


def device_name(index: int) -> str:
    """``cuda:1`` or ``cpu``."""
    return "cpu" if index == CPU else f"cuda:{index}"


def grow(
    state: State,
    storage: Storage,
    nbytes: int,
    *,
    name: str,
    key: LaneKey,
    index: int,
    recorded: bool = False,
) -> None:
    """Make ``storage`` hold at least ``nbytes``; the caller has ``state.lock``.

    Under capture the memory is the driver's, because a block of torch's allocator would belong to
    that graph's pool; ``recorded`` asks for exactly such a block, zeroed again by each replay.

    Raises :class:`CudnnWorkspaceTooSmallInCaptureError` under capture and
    :class:`GemmWorkspaceError` outside; ``storage`` is then as it was.
    """
    device, old = state.device, storage.nbytes
    capturing = device.is_capturing(index)
    allocate: Callable[[int, int], torch.Tensor] = device.allocate_eager
    if capturing and not recorded:
        allocate = device.allocate_in_capture
    try:
        storage.grow(nbytes, lambda size: allocate(index, size))
    except DriverUnavailable as error:
        raise CudnnWorkspaceTooSmallInCaptureError(
            f"{_need(state, storage, nbytes, name, index)}, while the current stream captures, "
            f"and the CUDA driver API cannot be reached ({error}); a block of torch's allocator "
            "would belong to that graph's pool. Install cuda-python 12 or later "
            "(pip install cuda-bindings), or make this call once outside a capture."
        ) from error
    except (DriverError, MemoryError, torch.OutOfMemoryError) as error:
        if capturing:
            raise CudnnWorkspaceTooSmallInCaptureError(
                f"{_need(state, storage, nbytes, name, index)}, while the current stream "
                f"captures ({error}). Release memory before the capture begins "
                "(torch.cuda.empty_cache()), or leave the engine a smaller share of the device."
            ) from error
        raise GemmWorkspaceError(
            f"{_need(state, storage, nbytes, name, index)} ({error}). Release memory on that "
            "device, or flashinfer.gemm_workspace.reserve(nbytes) before the engine fills it."
        ) from error
    state.growths.append(Growth(name, key, old, storage.nbytes, capturing))


def _need(state: State, storage: Storage, nbytes: int, name: str, index: int) -> str:
    free = state.device.free_bytes(index)
    wanted = storage.successor_bytes(nbytes)
    return (
        f"{name} needs {nbytes} bytes on {device_name(index)}: a block of {wanted} could not be "
        f"had; {storage.nbytes} are mapped and stay in use, "
        f"{'an unknown number' if free is None else free} free, "
        f"{state.device.idle_bytes(index)} idle in torch's allocator"
    )
