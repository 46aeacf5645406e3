"""Get memory for a lane or a cache entry: what is tried, and what is said when there is none."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import TypeVar

import torch

from .device import CPU
from .errors import (
    NO_MEMORY,
    CudnnWorkspaceTooSmallInCaptureError,
    DriverError,
    DriverUnavailable,
    GemmWorkspaceError,
    RangeTooShort,
)
from .state import Growth, LaneKey, State, log
from .storage import Storage

R = TypeVar("R")

_RESERVE = "flashinfer.gemm_workspace.reserve"


def device_name(index: int) -> str:
    """``cuda:1`` or ``cpu``."""
    return "cpu" if index == CPU else f"cuda:{index}"


@dataclass(frozen=True)
class Asker:
    """Who asks for memory, and where it runs."""

    op: str
    part: str
    key: LaneKey
    index: int
    stream: int
    capture: int | None  # id; None outside a capture

    @property
    def capturing(self) -> bool:
        return self.capture is not None


def grow(state: State, storage: Storage, nbytes: int, asker: Asker) -> None:
    """Make ``storage`` hold at least ``nbytes``; the caller has ``state.lock``.

    Raises :class:`CudnnWorkspaceTooSmallInCaptureError` under capture,
    :class:`GemmWorkspaceError` outside when there is no memory, and :class:`DriverError` there
    when the driver fails for another reason; ``storage`` is then as it was.
    """
    old = storage.nbytes
    try:
        storage.grow(nbytes, asker.capturing)
    except DriverUnavailable as error:
        raise CudnnWorkspaceTooSmallInCaptureError(
            f"{_need(state, storage, nbytes, asker)}, while the current stream captures, "
            f"and the CUDA driver API cannot be reached ({error}); a block of torch's allocator "
            "would belong to that graph's pool. Install cuda-python 12 or later "
            "(pip install cuda-bindings), or make this call once outside a capture."
        ) from error
    except (DriverError, MemoryError, torch.OutOfMemoryError) as error:
        if asker.capturing:
            raise CudnnWorkspaceTooSmallInCaptureError(
                f"{_need(state, storage, nbytes, asker)}, while the current stream captures "
                f"({error}). Call {_RESERVE}({nbytes}) before the capture begins, release memory "
                "before it (torch.cuda.empty_cache()), or leave the engine a smaller share of "
                "the device."
            ) from error
        if not isinstance(error, NO_MEMORY):
            raise
        raise GemmWorkspaceError(
            f"{_need(state, storage, nbytes, asker)} ({error}). Release memory on that device, "
            f"or {_RESERVE}({nbytes}) before the engine fills it."
        ) from error
    _tell(
        state,
        Growth(
            op=asker.op,
            part=asker.part,
            device=device_name(asker.index),
            key=asker.key,
            old=old,
            new=storage.nbytes,
            stream=asker.stream,
            capture=asker.capture,
            caller=caller(),
            thread=threading.current_thread().name,
        ),
    )


def caller() -> str:
    """Where this thread left the caller's code: ``file:line in function``.

    The first frame that is no module of FlashInfer's, nor of torch's that only passes it on.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__") or ""
        if module.partition(".")[0] not in ("flashinfer", "torch"):
            code = frame.f_code
            return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return "unknown"


def _tell(state: State, growth: Growth) -> None:
    state.growths_total += 1
    state.growths.append(growth)
    level = logging.INFO if state.settings.log_growths else logging.DEBUG
    if log.isEnabledFor(level):
        log.log(
            level,
            "GEMM workspace grew: %s of %s for %s, from %d to %d bytes (stream %#x, %s, thread %s, "
            "called at %s)",
            growth.part,
            growth.device,
            growth.op,
            growth.old,
            growth.new,
            growth.stream,
            "no capture" if growth.capture is None else f"capture {growth.capture}",
            growth.thread,
            growth.caller,
            extra={"gemm_workspace": {"event": "growth", **growth.as_dict()}},
        )


def served(state: State, index: int, call: Callable[[], R]) -> R:
    """``call()``; when there is no memory, once more without the idle blocks of torch's allocator.

    The driver cannot see what is idle there. Giving it back waits for the device and frees, which
    is no thing to do while anybody captures: then the first error stands. The caller does not have
    ``state.lock``: what the device waits for may need a launch of a thread that needs the lock.
    """
    try:
        return call()
    except GemmWorkspaceError as error:
        # Addresses that are used up do not come back with memory.
        if isinstance(error.__cause__, RangeTooShort) or state.device.captures_running() > 0:
            raise
        released = state.device.release_idle(index)
        if released <= 0:
            raise
        if state.first_time(f"idle blocks of {device_name(index)}"):
            log.warning(
                "%s. Now gave %d idle bytes back, and trying again. %s early, or a "
                "smaller share of the device for the engine, avoids this. Said once a device.",
                error,
                released,
                _RESERVE,
            )
    return call()


def check_seal(state: State, storage: Storage | None, nbytes: int, asker: Asker) -> None:
    """Refuse, or only log, a growth after ``seal()``. Raises as :func:`grow` does."""
    if not state.sealed:
        return
    have = 0 if storage is None else storage.nbytes
    spare = sum(each.nbytes for each in state.free.get(asker.index, ()))
    message = (
        f"{asker.op} needs {nbytes} bytes on {device_name(asker.index)}"
        f"{' while the current stream captures' if asker.capturing else ''}, has {have}, and the "
        f"workspaces are sealed ({spare} bytes are reserved and unused, in pieces that are too "
        f"small or none): {_RESERVE}({nbytes}) before seal(), run this call once before seal(), "
        "or set FLASHINFER_GEMM_WORKSPACE_SEAL_POLICY=warn."
    )
    if not state.settings.seal_is_error:
        log.warning("%s Going on.", message)
    elif asker.capturing:
        raise CudnnWorkspaceTooSmallInCaptureError(message)
    else:
        raise GemmWorkspaceError(message)


def _need(state: State, storage: Storage, nbytes: int, asker: Asker) -> str:
    index = asker.index
    free = state.device.free_bytes(index)
    spare = sum(each.nbytes for each in state.free.get(index, ()))
    return (
        f"{asker.op} needs {nbytes} bytes on {device_name(index)}: {storage.target(nbytes)} in "
        f"{storage.kind} could not be had; {storage.nbytes} are mapped and stay in use, "
        f"{'an unknown number' if free is None else free} free, "
        f"{state.device.idle_bytes(index)} idle in torch's allocator, {spare} reserved and unused"
    )
