"""The runtime's ``Device`` protocol over the simulated world.

It stands where ``CudaDevice`` and the driver module stand, so what those two promise (a call in
RELAXED mode and in the right context, all or nothing, memory zeroed) is taken as kept here and
is tested on a GPU. A driver call fails before it has done anything.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from flashinfer.gemm_workspace.device import Capture
from flashinfer.gemm_workspace.errors import (
    CudnnCaptureUnsafeError,
    DriverError,
    DriverOutOfMemory,
    DriverUnavailable,
)

from . import memory
from .memory import PAGE, Allocation, OutOfMemory, Violation, tensor_at
from .world import CallFailed, Tie, World

INDEX = 0


class SimRange:
    """A reserved range; ``chunks`` are what was mapped into it."""

    granularity = PAGE

    def __init__(self, device: SimDevice, nbytes: int) -> None:
        self._device = device
        self.nbytes = memory.pages(nbytes)
        with device.driver_call("reserve"):
            self.address = device.world.driver.reserve(self.nbytes)
        self.chunks: list[Allocation] = []

    def map(self, offset: int, nbytes: int) -> None:
        assert offset % PAGE == 0
        assert nbytes % PAGE == 0
        with self._device.driver_call("map"):
            chunk = self._device.world.driver.map(self.address + offset, nbytes)
        chunk.zeroed = True
        self.chunks.append(chunk)

    def tensor(self, nbytes: int) -> torch.Tensor:
        self._device.world.driver.under(self.address, nbytes)
        return tensor_at(self.address, nbytes)


class SimDevice:
    """Device 0. CPU tensors stand for its tensors, at addresses of the world.

    ``has_ranges``: whether addresses can be reserved; ``has_driver``: whether the driver can be
    reached from Python at all; ``major``: of the compute capability.
    """

    def __init__(
        self, world: World, has_ranges: bool = True, has_driver: bool = True, major: int = 9
    ) -> None:
        self.world = world
        self.major = major
        self.has_ranges = has_ranges
        self.has_driver = has_driver

    @contextmanager
    def driver_call(self, name: str) -> Iterator[None]:
        if not self.has_driver:
            raise DriverUnavailable("no driver here")
        with self.world.relaxed():
            try:
                self.world.call(name)
                yield
            except CallFailed as error:
                raise DriverError(f"{name} failed") from error
            except OutOfMemory as error:
                raise DriverOutOfMemory(str(error)) from error

    # -- where a call runs ----------------------------------------------------------------------

    def index_of(self, device: torch.device) -> int | None:
        return None if device.type == "meta" else INDEX

    def current_index(self) -> int:
        return INDEX

    def is_capturing(self, index: int) -> bool:
        return self.world.stream.capture is not None

    def raw_stream(self, index: int) -> int:
        return self.world.stream.handle

    def stream_key(self, index: int, stream: int) -> Hashable:
        # Only the driver tells a stream from a later one at its handle.
        return self.world.stream_at(stream).identity if self.has_driver else stream

    def lasts(self, index: int, stream: int) -> bool:
        return stream == 0

    def alone(self, index: int) -> bool:
        return False  # so the current device is asked, which costs nothing here

    # -- captures -------------------------------------------------------------------------------

    def capture(self, index: int, stream: int) -> Capture:
        capture = self.world.stream_at(stream).capture
        assert capture is not None, "asked about a stream that does not capture"
        if not self.has_driver:
            capture.graph.untied = True
            raise DriverUnavailable("no driver here")
        if not capture.valid:
            raise CudnnCaptureUnsafeError("an earlier call ended this capture")
        return Capture(capture.identity, capture.graph.number)

    def pool_of(self, capture_id: int) -> Hashable | None:
        for capture in self.world.captures:
            if capture.identity == capture_id and capture.known:
                return capture.graph.pool
        return None

    def captures_running(self) -> int:
        return sum(capture.known for capture in self.world.captures)

    def make_blas_handle(self, index: int) -> None:
        pass

    def tie(self, graph: int) -> Tie:
        tied = self.world.graph_at(graph)
        tied.untied = True
        with self.driver_call("tie"):
            tied.untied = False
        tie = Tie()
        tied.ties.append(tie)
        return tie

    # -- memory ---------------------------------------------------------------------------------

    def new_range(self, index: int, nbytes: int) -> SimRange | None:
        return SimRange(self, nbytes) if self.has_ranges and self.has_driver else None

    def allocate(self, index: int, nbytes: int, capturing: bool) -> torch.Tensor:
        if not self.has_driver and not capturing:
            block = self.allocate_torch(index, nbytes)
            # Recycled and zeroed in the order of this stream, and used on any: waited for.
            self.world.finish(self.world.stream)
            return block
        with self.driver_call("allocate"):
            block = self.world.driver.allocate(nbytes)
        block.zeroed = True
        return tensor_at(block.start, nbytes)

    def allocate_torch(self, index: int, nbytes: int) -> torch.Tensor:
        try:
            block = self.world.allocate(nbytes)
        except OutOfMemory as error:
            raise torch.OutOfMemoryError(str(error)) from error
        return tensor_at(block.start, nbytes, lambda: self.world.allocator.free(block))

    def release_idle(self, index: int) -> int:
        world = self.world
        idle = world.allocator.idle_bytes()
        with world.relaxed():
            world.call("release of idle blocks", frees=True, may_fail=False)
            world.empty_cache()
        return idle - world.allocator.idle_bytes()

    def free_bytes(self, index: int) -> int | None:
        return self.world.driver.limit - self.world.driver.used

    def idle_bytes(self, index: int) -> int:
        return self.world.allocator.idle_bytes()

    def total_bytes(self, index: int) -> int:
        return self.world.driver.limit

    # -- modes ----------------------------------------------------------------------------------

    def synchronize(self, index: int) -> None:
        if self.captures_running():
            raise Violation("the device is waited for during a capture that is known to run")
        if self.world.captures:
            # CUDA refuses while any stream of the device captures, seen or not, in any mode.
            raise DriverError("operation not permitted when stream is capturing")
        self.world.synchronize()

    def relaxed(self) -> AbstractContextManager[None]:
        return self.world.relaxed()

    def device_guard(self, index: int) -> AbstractContextManager[None]:
        return nullcontext()

    def capability(self, index: int) -> tuple[int, int]:
        return (self.major, 0)
