"""A device for the unit tests: CPU tensors back its memory, everything else is set by the test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from flashinfer.gemm_workspace.errors import DriverError, DriverUnavailable


class FakeDevice:
    """Treats the CPU as CUDA device ``current``, so that CPU tensors can stand for CUDA ones.

    What a test reads: ``eager`` and ``in_capture`` (sizes allocated, in order), ``queries`` (of
    the capture state), ``relaxed_depth``. The rest is what it sets.
    """

    def __init__(self) -> None:
        self.current = 0
        self.streams: dict[int, int] = {}  # current stream by index
        self.captures: dict[tuple[int, int], int] = {}  # capture id by (index, stream)
        self.has_driver = True
        self.fails: BaseException | None = None  # raised by every allocation
        self.free = 1000
        self.idle = 500
        self.sm = (9, 0)
        self.eager: list[tuple[int, int]] = []
        self.in_capture: list[tuple[int, int]] = []
        self.blocks: list[torch.Tensor] = []
        self.queries: list[int] = []
        self.capability_queries = 0
        self._local = threading.local()

    @property
    def relaxed_depth(self) -> int:
        return getattr(self._local, "relaxed", 0)

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

    def capture_id(self, index: int, stream: int) -> int:
        if not self.has_driver:
            raise DriverUnavailable("no driver in this test")
        return self.captures[index, stream]

    def allocate_eager(self, index: int, nbytes: int) -> torch.Tensor:
        if self.fails is not None:
            raise self.fails
        self.eager.append((index, nbytes))
        return self._block(nbytes)

    def allocate_in_capture(self, index: int, nbytes: int) -> torch.Tensor:
        if not self.has_driver:
            raise DriverUnavailable("no driver in this test")
        if self.fails is not None:
            raise DriverError("cuMemAlloc failed: out of memory")
        self.in_capture.append((index, nbytes))
        return self._block(nbytes)

    def _block(self, nbytes: int) -> torch.Tensor:
        with torch.inference_mode(False):
            block = torch.zeros(nbytes, dtype=torch.uint8)
        self.blocks.append(block)
        return block

    def free_bytes(self, index: int) -> int | None:
        return self.free

    def idle_bytes(self, index: int) -> int:
        return self.idle

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
    def capturing(self, capture: int = 7, stream: int = 3, index: int = 0) -> Iterator[None]:
        """A capture on ``stream``, which is current on ``index`` meanwhile."""
        before = self.streams.get(index, 0)
        self.streams[index] = stream
        self.captures[index, stream] = capture
        try:
            yield
        finally:
            del self.captures[index, stream]
            self.streams[index] = before
