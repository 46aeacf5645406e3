"""Addresses, physical memory and the caching allocator of the simulated device.

Two layers, as on a real one. The *driver* owns physical memory: plain blocks, and ranges of
addresses to whose parts memory is mapped. The *caching allocator* takes blocks from the driver,
hands out the one freed last first, and sits on those that nobody uses.

Every handing out makes a new :class:`Allocation`. An address comes back, an allocation never
does, so "is this still what was captured?" is a question about identity and nothing else.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

# Unit of everything: a "page" of the simulated device. Sizes are scaled down by about 2 ** 20.
PAGE = 16

# Real memory behind the addresses, so that the tensors given out are ordinary CPU tensors with
# true addresses. Nobody writes to it, hence it costs nothing.
_SPACE = mmap.mmap(-1, 1 << 24)
_BASE: int = torch.frombuffer(_SPACE, dtype=torch.uint8).data_ptr()


class Violation(AssertionError):
    """An invariant of the design does not hold in the simulated world."""


class OutOfMemory(Exception):
    """The driver has no memory left."""


def pages(nbytes: int) -> int:
    """``nbytes`` rounded up to pages, in bytes."""
    return -(-max(nbytes, 1) // PAGE) * PAGE


@dataclass(eq=False)
class Allocation:
    """Memory handed out once. ``pool`` is the graph pool that it came from, if it did."""

    number: int
    start: int
    size: int
    kind: str
    pool: Hashable = None
    alive: bool = True
    zeroed: bool = False

    @property
    def end(self) -> int:
        return self.start + self.size

    def __repr__(self) -> str:
        state = "" if self.alive else " (freed)"
        return f"<{self.kind} #{self.number} {self.start - _BASE:#x}+{self.size}{state}>"


def tensor_at(start: int, nbytes: int, freed: Callable[[], None] | None = None) -> torch.Tensor:
    """The bytes at ``start`` as a tensor; ``freed`` is called when the last view of it dies."""
    if freed is None:
        return torch.frombuffer(_SPACE, dtype=torch.uint8, count=nbytes, offset=start - _BASE)
    memory = _owned(nbytes).from_address(start)
    memory.owner = _Owner(freed)
    return torch.frombuffer(memory, dtype=torch.uint8)


class _Owner:
    def __init__(self, freed: Callable[[], None]) -> None:
        self._freed = freed

    def __del__(self) -> None:
        self._freed()


@functools.cache
def _owned(nbytes: int) -> Any:
    # A subclass, as that can have attributes; torch keeps the object as long as the storage.
    return type("Owned", (ctypes.c_uint8 * nbytes,), {})


class Driver:
    """Physical memory and the address space. ``limit`` in bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.live: dict[int, Allocation] = {}  # by start
        self.ranges: dict[int, int] = {}  # reserved: start -> size
        self._next = _BASE + PAGE
        self._holes: list[tuple[int, int]] = []  # freed (start, size), the last one last
        self._number = 0

    def _address(self, size: int) -> int:
        # The last freed first, whole or its head: as unkind to a stale address as can be.
        for at in range(len(self._holes) - 1, -1, -1):
            start, hole = self._holes[at]
            if hole >= size:
                del self._holes[at]
                if hole > size:
                    self._holes.append((start + size, hole - size))
                return start
        start = self._next
        self._next += size
        if self._next > _BASE + len(_SPACE):
            raise OutOfMemory("no addresses left")
        return start

    def _back(self, nbytes: int) -> None:
        if self.used + nbytes > self.limit:
            raise OutOfMemory(f"{nbytes} wanted, {self.limit - self.used} free")
        self.used += nbytes

    def hand_out(self, start: int, size: int, kind: str, pool: Hashable = None) -> Allocation:
        """A new allocation over memory that is there already."""
        self._number += 1
        allocation = Allocation(self._number, start, size, kind, pool)
        self.live[start] = allocation
        return allocation

    def take_back(self, allocation: Allocation) -> None:
        """End ``allocation``; its memory stays with whoever it was cut from."""
        if not allocation.alive:
            raise Violation(f"{allocation} is freed twice")
        allocation.alive = False
        del self.live[allocation.start]

    def segment(self, nbytes: int) -> tuple[int, int]:
        """Physical memory at an address of its own: (start, size)."""
        size = pages(nbytes)
        self._back(size)
        try:
            return self._address(size), size
        except OutOfMemory:
            self.used -= size
            raise

    def release_segment(self, start: int, size: int) -> None:
        self.used -= size
        self._holes.append((start, size))

    def allocate(self, nbytes: int) -> Allocation:
        """A plain block (``cuMemAlloc``)."""
        start, size = self.segment(nbytes)
        return self.hand_out(start, size, "driver")

    def free(self, allocation: Allocation) -> None:
        self.take_back(allocation)
        self.release_segment(allocation.start, allocation.size)

    def reserve(self, size: int) -> int:
        """A range of addresses without memory."""
        start = self._address(size)
        self.ranges[start] = size
        return start

    def unreserve(self, start: int) -> None:
        size = self.ranges.pop(start)
        if any(start <= a.start < start + size for a in self.live.values()):
            raise Violation(f"the range at {start:#x} is given up with memory mapped into it")
        self._holes.append((start, size))

    def map(self, start: int, size: int) -> Allocation:
        """Memory at ``start``, inside a reserved range and over nothing that is mapped."""
        if not any(r <= start and start + size <= r + n for r, n in self.ranges.items()):
            raise Violation(f"{start:#x}+{size} is mapped outside every reserved range")
        if any(a.start < start + size and start < a.end for a in self.live.values()):
            raise Violation(f"{start:#x}+{size} is mapped twice")
        self._back(size)
        return self.hand_out(start, size, "mapped")

    def unmap(self, allocation: Allocation) -> None:
        self.take_back(allocation)
        self.used -= allocation.size

    def under(self, start: int, size: int) -> tuple[Allocation, ...]:
        """The live allocations that hold ``start`` to ``start + size``, in order."""
        found: list[Allocation] = []
        at, end = start, start + size
        while at < end:
            allocation = next((a for a in self.live.values() if a.start <= at < a.end), None)
            if allocation is None:
                raise Violation(f"nothing is allocated at {at - _BASE:#x} of +{size}")
            found.append(allocation)
            at = allocation.end
        return tuple(found)


@dataclass
class CachingAllocator:
    """torch's allocator: pools of blocks by (graph pool, stream), the last freed first.

    A block is handed out whole: splitting would only add ways to get the same aliasing.
    """

    driver: Driver
    idle: dict[tuple[Hashable, int], list[tuple[int, int]]] = field(default_factory=dict)
    _owner: dict[Allocation, tuple[Hashable, int]] = field(default_factory=dict)

    def allocate(
        self,
        nbytes: int,
        stream: int,
        pool: Hashable = None,
        retry: Callable[[], None] | None = None,
    ) -> Allocation:
        """A block for ``stream``; when the device is full, ``retry`` once after that call."""
        size = pages(nbytes)
        blocks = self.idle.get((pool, stream), [])
        for at in range(len(blocks) - 1, -1, -1):
            if blocks[at][1] >= size:
                start, size = blocks.pop(at)
                break
        else:
            try:
                start, size = self.driver.segment(size)
            except OutOfMemory:
                if retry is None:
                    raise
                retry()
                start, size = self.driver.segment(size)
        allocation = self.driver.hand_out(start, size, "torch", pool)
        self._owner[allocation] = (pool, stream)
        return allocation

    def free(self, allocation: Allocation) -> None:
        self.driver.take_back(allocation)
        key = self._owner.pop(allocation)
        self.idle.setdefault(key, []).append((allocation.start, allocation.size))

    def idle_bytes(self, keep: Collection[Hashable] = ()) -> int:
        """Bytes that nobody uses, but for those of the graph pools in ``keep``."""
        return sum(
            size
            for (pool, _), blocks in self.idle.items()
            if pool not in keep
            for _, size in blocks
        )

    def release(self, keep: Collection[Hashable]) -> None:
        """Give idle blocks back to the driver, but for those of the graph pools in ``keep``."""
        for (pool, _), blocks in self.idle.items():
            if pool not in keep:
                for start, size in blocks:
                    self.driver.release_segment(start, size)
                blocks.clear()
