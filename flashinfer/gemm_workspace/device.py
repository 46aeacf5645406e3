"""The device as the policy sees it: a protocol, and the real device behind it.

The policy reaches nothing of the machine but through :class:`Device`, so that the same code runs
over a simulated one.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NamedTuple, Protocol

import torch

from . import captures, driver, torch_internals
from .errors import DriverError, DriverUnavailable

# Index of the CPU: one lane a name, no streams, no captures.
CPU = -1


class Capture(NamedTuple):
    """A capture in progress. ``id`` is unique for the life of the process."""

    id: int
    graph: int  # handle of the graph that is captured into


class Tie(Protocol):
    """A token that a captured graph holds."""

    def released(self) -> bool:
        """Whether the graph, all that was instantiated from it and every running replay are
        gone. Stays true."""


class Range(Protocol):
    """Reserved device addresses, mapped from the first on. What is mapped stays mapped."""

    @property
    def address(self) -> int:
        """The first address; fixed for life."""

    @property
    def nbytes(self) -> int:
        """Reserved bytes, a multiple of ``granularity``."""

    @property
    def granularity(self) -> int:
        """Bytes that a mapping is a multiple of."""

    def map(self, offset: int, nbytes: int) -> None:
        """Put zeroed memory behind ``nbytes`` bytes from ``offset`` on, on any thread, capturing
        or not. All or nothing. Raises DriverOutOfMemory, DriverError or DriverUnavailable."""

    def tensor(self, nbytes: int) -> torch.Tensor:
        """The first ``nbytes`` bytes, all of them mapped, as uint8 usable in any mode."""


class Device(Protocol):
    """Everything that the policy asks of the machine. An index is a CUDA ordinal or ``CPU``."""

    # Where a call runs. -------------------------------------------------------------------------

    def index_of(self, device: torch.device) -> int | None:
        """Index behind ``device``; ``None`` for a kind that has no lanes (meta, xpu)."""

    def current_index(self) -> int:
        """Index of the current device; ``CPU`` while CUDA is not in use. Initialises nothing."""

    def is_capturing(self, index: int) -> bool:
        """Whether the stream that is current on device ``index`` captures."""

    def raw_stream(self, index: int) -> int:
        """Handle of the stream that is current on device ``index``."""

    def stream_key(self, index: int, stream: int) -> Hashable:
        """What tells ``stream``, current on ``index``, from one made later at its handle."""

    def lasts(self, index: int, stream: int) -> bool:
        """Whether ``stream``, whose key was asked before, lives as long as the process."""

    def alone(self, index: int) -> bool:
        """Whether this process sees no other CUDA device than ``index``, so that it is current
        whenever any is."""

    # Captures. ----------------------------------------------------------------------------------

    def capture(self, index: int, stream: int) -> Capture:
        """The capture of ``stream``. Raises DriverUnavailable, DriverError, and
        CudnnCaptureUnsafeError if the capture is no longer valid."""

    def pool_of(self, capture_id: int) -> Hashable | None:
        """Key of the pool that the capture was begun with; ``None`` if nobody saw it begin.

        A capture begun without a pool has a key of its own, which later captures into its pool
        have as well.
        """

    def captures_running(self) -> int:
        """How many captures are known to run in the process."""

    def make_blas_handle(self, index: int) -> None:
        """Have the handle of cuBLAS that this thread's ops on ``index`` use, so that its making,
        which allocates, happens in RELAXED mode and ends no capture. Never raises."""

    def tie(self, graph: int) -> Tie:
        """A token held by ``graph``. Raises DriverUnavailable or DriverError."""

    # Memory; all sizes in bytes. ----------------------------------------------------------------

    def new_range(self, index: int, nbytes: int) -> Range | None:
        """A range of at least ``nbytes`` addresses, nothing mapped; ``None`` where the device
        cannot. Raises DriverOutOfMemory or DriverError."""

    def allocate(self, index: int, nbytes: int, capturing: bool) -> torch.Tensor:
        """``nbytes`` zeroed bytes of no pool, nothing recorded, never freed.

        Where the driver cannot be reached: torch's memory outside a capture, DriverUnavailable
        under one. Raises DriverOutOfMemory, DriverError, MemoryError or torch.OutOfMemoryError.
        """

    def allocate_torch(self, index: int, nbytes: int) -> torch.Tensor:
        """``nbytes`` zeroed bytes of torch's allocator, ordered on the current stream; under
        capture of that graph's pool, and zeroed again by each replay. Raises MemoryError or
        torch.OutOfMemoryError."""

    def release_idle(self, index: int) -> int:
        """Give back what torch's allocator holds and nobody uses; how much that was."""

    def free_bytes(self, index: int) -> int | None:
        """What the driver could hand out, or ``None`` if it does not say."""

    def idle_bytes(self, index: int) -> int:
        """What torch's allocator holds and nobody uses."""

    def total_bytes(self, index: int) -> int:
        """Memory of the device."""

    # Modes. -------------------------------------------------------------------------------------

    def synchronize(self, index: int) -> None:
        """Wait for all work of device ``index``. Never called while a capture is known to run.
        Raises DriverUnavailable or DriverError."""

    def relaxed(self) -> AbstractContextManager[None]:
        """RELAXED capture mode for this thread, as far as the driver can be reached."""

    def device_guard(self, index: int) -> AbstractContextManager[Any]:
        """Make device ``index`` current."""

    def capability(self, index: int) -> tuple[int, int]:
        """Compute capability (major, minor)."""


# On the way of every call, so bound once.
_here = torch_internals.current_device
_capturing = torch_internals.is_current_stream_capturing
_raw_stream = torch_internals.raw_stream


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


def _wrap(index: int, address: int, nbytes: int) -> torch.Tensor:
    # Outside inference mode, or it could never be written by a later call outside it.
    with torch.inference_mode(False):
        return torch.as_tensor(_Memory(address, nbytes), device=f"cuda:{index}")


class _CudaRange:
    """A range of the driver's virtual memory management."""

    def __init__(self, index: int, nbytes: int) -> None:
        self._index = index
        self.granularity = driver.granularity(index)
        self.nbytes = -(-nbytes // self.granularity) * self.granularity
        self.address = driver.reserve_addresses(index, self.nbytes)

    def map(self, offset: int, nbytes: int) -> None:
        driver.map_memory(self._index, self.address + offset, nbytes)

    def tensor(self, nbytes: int) -> torch.Tensor:
        return _wrap(self._index, self.address, nbytes)


class _OfThread(threading.local):
    """What one thread has."""

    def __init__(self) -> None:
        # Devices whose cuBLAS handle it has: torch keeps them by thread.
        self.blas_handles: set[int] = set()


class CudaDevice:
    """The devices of this process."""

    def __init__(self) -> None:
        # Whether a device can map memory, by index: probed once, for real.
        self._maps: dict[int, bool] = {}
        # Streams that live as long as the process, by (index, handle): the handle says it all.
        self._lasting: set[tuple[int, int]] = set()
        # The index of the device, if there is only one: then it is the current one.
        self._only: set[int] = set()
        self._of_thread = _OfThread()
        # Devices that name their index: reading a torch.device costs more than hashing it.
        self._indices: dict[torch.device, int] = {}

    def index_of(self, device: torch.device) -> int | None:
        known = self._indices.get(device)
        if known is not None:
            return known
        if device.type == "cuda":
            if device.index is None:
                return torch.cuda.current_device()
            self._indices[device] = device.index
            return device.index
        return CPU if device.type == "cpu" else None

    def current_index(self) -> int:
        return torch.cuda.current_device() if _cuda_in_use() else CPU

    def is_capturing(self, index: int) -> bool:
        if index in self._only or _here() == index:
            return _capturing()
        if index == CPU:
            return False
        # torch asks about the current device only.
        with torch.cuda.device(index):
            return _capturing()

    def raw_stream(self, index: int) -> int:
        return 0 if index == CPU else _raw_stream(index)

    def eager_stream(self, index: int) -> Hashable | None:
        """``is_capturing``, ``raw_stream`` and ``stream_key`` in one call: the key of the current
        stream, ``None`` if it captures."""
        if index == CPU:
            return 0
        if index in self._only or _here() == index:
            if _capturing():
                return None
            stream = _raw_stream(index)
        elif self.is_capturing(index):
            return None
        else:
            stream = self.raw_stream(index)
        return stream if (index, stream) in self._lasting else self._learn_stream(index, stream)

    def lasts(self, index: int, stream: int) -> bool:
        return (index, stream) in self._lasting

    def alone(self, index: int) -> bool:
        return index in self._only

    def stream_key(self, index: int, stream: int) -> Hashable:
        if (index, stream) in self._lasting:
            return stream
        return self._learn_stream(index, stream)

    def _learn_stream(self, index: int, stream: int) -> Hashable:
        if index == CPU or torch_internals.current_stream_lasts(index):
            self._lasting.add((index, stream))
            # Now CUDA is in use, and torch fixes the count when it starts.
            if index == 0 and torch.cuda.device_count() == 1:
                self._only.add(index)
            return stream
        # Somebody else's stream can be destroyed, and a new one made at its handle while the
        # old one's last kernels still run. Asked at each call: the handle alone cannot tell.
        try:
            return ("id", driver.stream_id(stream))
        except (DriverUnavailable, DriverError):  # before CUDA 12, or without cuda-python
            return stream

    def capture(self, index: int, stream: int) -> Capture:  # noqa: ARG002
        return Capture(*driver.capture_info(stream))

    def pool_of(self, capture_id: int) -> Hashable | None:
        return captures.registry.pool_of(capture_id)

    def captures_running(self) -> int:
        return captures.registry.running()

    def make_blas_handle(self, index: int) -> None:
        made = self._of_thread.blas_handles
        if index == CPU or index in made:
            return
        # The op that needs it asks again, and then says itself what is wrong.
        with suppress(RuntimeError), self.relaxed(), torch.cuda.device(index):
            torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]
            made.add(index)

    def tie(self, graph: int) -> Tie:
        return driver.tie(graph)

    def new_range(self, index: int, nbytes: int) -> Range | None:
        if index == CPU:
            return None
        maps = self._maps.get(index)
        if maps is None:
            maps = self._maps[index] = driver.can_map(index)
        return _CudaRange(index, nbytes) if maps else None

    def allocate(self, index: int, nbytes: int, capturing: bool) -> torch.Tensor:
        if index == CPU:
            return self.allocate_torch(index, nbytes)
        try:
            address = driver.allocate(index, nbytes)
        except DriverUnavailable:
            if capturing:
                raise
            block = self.allocate_torch(index, nbytes)
            # Whoever had these bytes before, and the zeros, are ordered on this stream alone; the
            # block may be spare and go to another.
            with self.relaxed():
                torch.cuda.current_stream(index).synchronize()
            return block
        try:
            return _wrap(index, address, nbytes)
        except BaseException:
            driver.free(index, address)
            raise

    def allocate_torch(self, index: int, nbytes: int) -> torch.Tensor:
        with torch.inference_mode(False), self.device_guard(index), self.relaxed():
            if index != CPU:
                return torch.zeros(nbytes, dtype=torch.uint8, device=f"cuda:{index}")
            try:
                return torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
            except RuntimeError as error:  # torch has no type of its own for the CPU's
                raise MemoryError(str(error)) from error

    def release_idle(self, index: int) -> int:
        if index == CPU:
            return 0
        before = torch.cuda.memory_reserved(index)
        with self.device_guard(index), self.relaxed():
            torch.cuda.empty_cache()
        return before - torch.cuda.memory_reserved(index)

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

    def total_bytes(self, index: int) -> int:
        return 0 if index == CPU else int(torch.cuda.get_device_properties(index).total_memory)

    def synchronize(self, index: int) -> None:
        if index != CPU:
            driver.synchronize(index)

    def relaxed(self) -> AbstractContextManager[None]:
        return driver.relaxed() if _cuda_in_use() else nullcontext()

    def device_guard(self, index: int) -> AbstractContextManager[Any]:
        return nullcontext() if index == CPU else torch.cuda.device(index)

    def capability(self, index: int) -> tuple[int, int]:
        return (0, 0) if index == CPU else torch.cuda.get_device_capability(index)
