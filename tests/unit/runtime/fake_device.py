"""A device for the unit tests: CPU tensors back its memory, everything else is set by the test."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import torch

from flashinfer.gemm_workspace.device import Capture
from flashinfer.gemm_workspace.errors import DriverError, DriverOutOfMemory, DriverUnavailable

MiB = 1024 * 1024


class FakeTie:
    def __init__(self) -> None:
        self.gone = False

    def released(self) -> bool:
        return self.gone


class FakeRange:
    """Reserved addresses that are a CPU tensor, whose pages are zero until they are written."""

    def __init__(self, device: FakeDevice, index: int, nbytes: int) -> None:
        self.device, self.index = device, index
        self.granularity = device.granularity
        self.nbytes = -(-nbytes // self.granularity) * self.granularity
        with torch.inference_mode(False):
            self.backing = torch.empty(self.nbytes, dtype=torch.uint8)
        self.address = self.backing.data_ptr()
        self.mapped = 0

    def map(self, offset: int, nbytes: int) -> None:
        assert offset == self.mapped, "a range grows at its tail"
        assert nbytes > 0
        assert offset % self.granularity == nbytes % self.granularity == 0
        assert offset + nbytes <= self.nbytes
        self.device.about_to_map(nbytes)
        if self.device.zeroes:
            self.backing[offset : offset + nbytes] = 0
        self.mapped += nbytes
        self.device.mapped.append((self.index, nbytes))

    def tensor(self, nbytes: int) -> torch.Tensor:
        assert nbytes <= self.mapped
        with torch.inference_mode(False):
            return self.backing[:nbytes]


class FakeDevice:
    """Treats the CPU as CUDA device ``current``, so that CPU tensors can stand for CUDA ones.

    What a test reads: ``mapped`` (sizes mapped, in order), ``blocks_made`` (blocks of the
    driver's: index, size, capturing), ``torch_made`` (blocks of torch's), ``queries`` (of the
    capture state), ``syncs``, ``relaxed_depth``. The rest is what it sets.
    """

    def __init__(self, vmm: bool = True) -> None:
        self.current = 0
        self.streams: dict[int, int] = {}  # current stream by index
        self.stream_ids: dict[int, int] = {}  # by handle, where it is not the handle
        self.captures: dict[tuple[int, int], int] = {}  # capture id by (index, stream)
        self.pools: dict[int, Hashable] = {}  # pool key by capture id
        self.running = 0  # captures known to run, beside those of ``captures``
        self.ties: dict[int, FakeTie] = {}  # by capture id
        self.vmm = vmm
        self.has_driver = True
        self.can_tie = True
        self.zeroes = True  # False saves the time of writing memory that is zero already
        self.fails: BaseException | None = None  # raised by every allocation
        self.fails_above: int | None = None  # every longer allocation finds no memory
        self.free = 1000
        self.idle = 500
        self.idle_helps = False  # whether giving idle blocks back ends ``fails``
        self.total = 1024 * MiB
        self.granularity = 2 * MiB
        self.sm = (9, 0)
        self.mapped: list[tuple[int, int]] = []
        self.blocks_made: list[tuple[int, int, bool]] = []
        self.torch_made: list[tuple[int, int]] = []
        self.ranges: list[FakeRange] = []
        self.blocks: list[torch.Tensor] = []
        self.queries: list[int] = []
        self.captures_asked = 0
        self.syncs: list[int] = []
        self.blas_handles: list[int] = []
        self.idle_released = 0
        self.capability_queries = 0
        self._local = threading.local()

    # Where a call runs.

    def index_of(self, device: torch.device) -> int | None:
        if device.type == "meta":
            return None
        return self.current if device.index is None or device.type == "cpu" else device.index

    def current_index(self) -> int:
        return self.current

    def is_capturing(self, index: int) -> bool:
        self.queries.append(index)
        return (index, self.raw_stream(index)) in self.captures

    def raw_stream(self, index: int) -> int:
        of_thread = getattr(self._local, "stream", None)
        return of_thread if of_thread is not None else self.streams.get(index, 0)

    def set_thread_stream(self, stream: int) -> None:
        self._local.stream = stream

    def stream_key(self, index: int, stream: int) -> Hashable:
        return self.stream_ids.get(stream, stream)

    def lasts(self, index: int, stream: int) -> bool:
        return False

    def alone(self, index: int) -> bool:
        return False

    # Captures.

    def capture(self, index: int, stream: int) -> Capture:
        if not self.has_driver:
            raise DriverUnavailable("no driver in this test")
        self.captures_asked += 1
        identity = self.captures[index, stream]
        return Capture(identity, identity + 1000)

    def pool_of(self, capture_id: int) -> Hashable | None:
        return self.pools.get(capture_id)

    def captures_running(self) -> int:
        return len(set(self.captures.values())) + self.running

    def make_blas_handle(self, index: int) -> None:
        self.blas_handles.append(index)

    def tie(self, graph: int) -> FakeTie:
        if not self.can_tie:
            raise DriverError("cuUserObjectCreate failed: 801")
        assert graph - 1000 not in self.ties, "a graph needs one tie"
        self.ties[graph - 1000] = FakeTie()
        return self.ties[graph - 1000]

    def destroy_graph(self, capture: int) -> None:
        self.ties[capture].gone = True

    # Memory.

    def about_to_map(self, nbytes: int) -> None:
        if self.fails is not None:
            raise self.fails
        if self.fails_above is not None and nbytes > self.fails_above:
            raise DriverOutOfMemory("cuMemCreate failed: out of memory")

    def new_range(self, index: int, nbytes: int) -> FakeRange | None:
        if not self.vmm or not self.has_driver:
            return None
        made = FakeRange(self, index, nbytes)
        self.ranges.append(made)
        return made

    def allocate(self, index: int, nbytes: int, capturing: bool) -> torch.Tensor:
        if not self.has_driver:
            if capturing:
                raise DriverUnavailable("no driver in this test")
            return self.allocate_torch(index, nbytes)
        self.about_to_map(nbytes)
        self.blocks_made.append((index, nbytes, capturing))
        return self._block(nbytes)

    def allocate_torch(self, index: int, nbytes: int) -> torch.Tensor:
        self.about_to_map(nbytes)
        self.torch_made.append((index, nbytes))
        return self._block(nbytes)

    def _block(self, nbytes: int) -> torch.Tensor:
        with torch.inference_mode(False):
            block = torch.zeros(nbytes, dtype=torch.uint8)
        self.blocks.append(block)
        return block

    def release_idle(self, index: int) -> int:
        self.idle_released += 1
        released, self.idle = self.idle, 0
        if self.idle_helps:
            self.fails = self.fails_above = None
        return released

    def free_bytes(self, index: int) -> int | None:
        return self.free

    def idle_bytes(self, index: int) -> int:
        return self.idle

    def total_bytes(self, index: int) -> int:
        return self.total

    # Modes.

    def synchronize(self, index: int) -> None:
        assert not self.captures_running()
        self.syncs.append(index)

    @property
    def relaxed_depth(self) -> int:
        return getattr(self._local, "relaxed", 0)

    @contextmanager
    def relaxed(self) -> Iterator[None]:
        self._local.relaxed = self.relaxed_depth + 1
        try:
            yield
        finally:
            self._local.relaxed = self.relaxed_depth - 1

    @contextmanager
    def device_guard(self, index: int) -> Iterator[None]:
        before, self.current = self.current, index
        try:
            yield
        finally:
            self.current = before

    def capability(self, index: int) -> tuple[int, int]:
        self.capability_queries += 1
        return self.sm

    @contextmanager
    def capturing(
        self, capture: int = 7, stream: int = 3, index: int = 0, pool: Hashable | None = None
    ) -> Iterator[None]:
        """A capture on ``stream``, which is current on ``index`` meanwhile."""
        before = self.streams.get(index, 0)
        self.streams[index] = stream
        self.captures[index, stream] = capture
        if pool is not None:
            self.pools[capture] = pool
        try:
            yield
        finally:
            del self.captures[index, stream]
            self.pools.pop(capture, None)
            self.streams[index] = before
