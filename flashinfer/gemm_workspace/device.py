"""The device as the policy sees it: a protocol, and the real device behind it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from . import driver, torch_internals

# Index of the CPU: one lane a name, no streams, no captures.
CPU = -1


class Device(Protocol):
    """Everything that the policy asks of the machine. An index is a CUDA ordinal or ``CPU``."""

    def index_of(self, device: torch.device) -> int | None:
        """Index behind ``device``; ``None`` for a kind that has no lanes (meta, xpu)."""

    def current_index(self) -> int:
        """Index of the current device; ``CPU`` while CUDA is not in use. Initialises nothing."""

    def is_capturing(self, index: int) -> bool:
        """Whether the stream that is current on device ``index`` captures."""

    def raw_stream(self, index: int) -> int:
        """Handle of the stream that is current on device ``index``."""

    def capture_id(self, index: int, stream: int) -> int:
        """Id of the capture of ``stream``. Raises DriverUnavailable."""

    def allocate_eager(self, index: int, nbytes: int) -> torch.Tensor:
        """``nbytes`` zeroed bytes, ordered on the current stream. Raises MemoryError or
        torch.OutOfMemoryError."""

    def allocate_in_capture(self, index: int, nbytes: int) -> torch.Tensor:
        """``nbytes`` zeroed bytes of no pool, nothing recorded. Raises DriverUnavailable or
        DriverError."""

    def free_bytes(self, index: int) -> int | None:
        """Bytes that the driver could hand out, or ``None`` if it does not say."""

    def idle_bytes(self, index: int) -> int:
        """Bytes that torch's allocator holds and nobody uses."""

    def relaxed(self) -> AbstractContextManager[None]:
        """RELAXED capture mode for this thread, as far as the driver can be reached."""

    def device_guard(self, index: int) -> AbstractContextManager[Any]:
        """Make device ``index`` current."""

    def capability(self, index: int) -> tuple[int, int]:
        """Compute capability (major, minor)."""


def _cuda_in_use() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


class _Memory:
    """Driver memory in the form that torch wraps without copying. Never freed."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "stream": None,
        }


class CudaDevice:
    """The devices of this process."""

    def index_of(self, device: torch.device) -> int | None:
        kind = device.type
        if kind == "cuda":
            index = device.index
            return index if index is not None else torch.cuda.current_device()
        return CPU if kind == "cpu" else None

    def current_index(self) -> int:
        return torch.cuda.current_device() if _cuda_in_use() else CPU

    def is_capturing(self, index: int) -> bool:
        if index == CPU:
            return False
        here = torch_internals.current_device
        if here is None or here() == index:
            return torch.cuda.is_current_stream_capturing()
        # torch asks about the current device only.
        with torch.cuda.device(index):
            return torch.cuda.is_current_stream_capturing()

    def raw_stream(self, index: int) -> int:
        return 0 if index == CPU else torch_internals.raw_stream(index)

    def capture_id(self, index: int, stream: int) -> int:  # noqa: ARG002
        return driver.capture_id(stream)

    def allocate_eager(self, index: int, nbytes: int) -> torch.Tensor:
        # Outside inference mode, or the block could never be written by a later call outside it.
        with torch.inference_mode(False), self.device_guard(index), self.relaxed():
            if index != CPU:
                return torch.zeros(nbytes, dtype=torch.uint8, device=f"cuda:{index}")
            try:
                return torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
            except RuntimeError as error:  # torch has no type of its own for the CPU's
                raise MemoryError(str(error)) from error

    def allocate_in_capture(self, index: int, nbytes: int) -> torch.Tensor:
        address = driver.allocate(index, nbytes)
        try:
            with torch.inference_mode(False):
                return torch.as_tensor(_Memory(address, nbytes), device=f"cuda:{index}")
        except BaseException:
            driver.free(index, address)
            raise

    def free_bytes(self, index: int) -> int | None:
        if index == CPU:
            return None
        try:
            with self.relaxed():
                return int(torch.cuda.mem_get_info(index)[0])
        except RuntimeError:  # asked while an error is being told: must not hide that error
            return None

    def idle_bytes(self, index: int) -> int:
        if index == CPU:
            return 0
        return torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)

    def relaxed(self) -> AbstractContextManager[None]:
        return driver.relaxed() if _cuda_in_use() else nullcontext()

    def device_guard(self, index: int) -> AbstractContextManager[Any]:
        return nullcontext() if index == CPU else torch.cuda.device(index)

    def capability(self, index: int) -> tuple[int, int]:
        return (0, 0) if index == CPU else torch.cuda.get_device_capability(index)
