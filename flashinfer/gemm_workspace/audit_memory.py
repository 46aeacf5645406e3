"""What is known of device memory, as plain data: the allocator's blocks, its history, our ledger.

Addresses and sizes in bytes, times in microseconds since the epoch.
"""

from __future__ import annotations

import functools
from array import array
from bisect import bisect_right
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from .audit_ranges import Ranges
from .growth import device_name
from .state import State
from .storage import Storage

Pool = tuple[int, int]

DEFAULT_POOL: Pool = (0, 0)

IN_USE = "in use"
PENDING = "freed, and waiting for streams that used it"
FREE = "free"

_STATES = (FREE, IN_USE, PENDING)


class Block(NamedTuple):
    """A block of torch's caching allocator."""

    address: int
    nbytes: int
    requested: int
    state: str  # IN_USE, PENDING or FREE
    pool: Pool  # the graph pool, DEFAULT_POOL for none

    @property
    def end(self) -> int:
        return self.address + self.nbytes


class Snapshot:
    """The allocator's blocks at one moment: 33 bytes a block, so that one can be kept for
    each capture."""

    def __init__(self, segments: Iterable[Mapping[str, Any]]) -> None:
        """From ``torch.cuda.memory_snapshot()``."""
        self._addresses = array("Q")
        self._sizes = array("Q")
        self._requested = array("Q")
        self._states = array("B")
        self._pools = array("L")
        pools: dict[Pool, int] = {}
        for segment in sorted(segments, key=lambda segment: int(segment["address"])):
            first, second = segment.get("segment_pool_id") or DEFAULT_POOL
            pool = pools.setdefault((int(first), int(second)), len(pools))
            blocks = segment["blocks"]
            # Column by column: there can be tens of thousands of blocks.
            sizes = [block["size"] for block in blocks]
            ends = list(accumulate(sizes, initial=int(segment["address"])))
            self._addresses.fromlist(ends[:-1])
            self._sizes.fromlist(sizes)
            self._requested.fromlist([block.get("requested_size", 0) for block in blocks])
            self._states.fromlist([_state_number(block["state"]) for block in blocks])
            self._pools.extend(array("L", [pool]) * len(blocks))
        self._pool_ids = list(pools)

    def find(self, address: int) -> int:
        """Number of the block that ``address`` is in; -1 if it is in none."""
        at = bisect_right(self._addresses, address) - 1
        return at if at >= 0 and address < self._addresses[at] + self._sizes[at] else -1

    def block(self, address: int) -> Block | None:
        """The block that ``address`` is in."""
        at = self.find(address)
        return None if at < 0 else self.numbered(at)

    def numbered(self, at: int) -> Block:
        """The block with that number."""
        return Block(
            self._addresses[at],
            self._sizes[at],
            self._requested[at],
            _STATES[self._states[at]],
            self._pool_ids[self._pools[at]],
        )

    def span(self) -> tuple[int, int] | None:
        """The first address, and the first behind the last block; ``None`` without blocks."""
        if not self._addresses:
            return None
        return self._addresses[0], self._addresses[-1] + self._sizes[-1]


@functools.cache
def _state_number(state: str) -> int:
    if state == "active_allocated":
        return _STATES.index(IN_USE)
    # Two names over the releases of torch: active_pending_free, active_awaiting_free.
    return _STATES.index(PENDING if state.startswith("active") else FREE)


class Freed(NamedTuple):
    """The allocator was given memory back, or gave it back to the driver."""

    address: int
    nbytes: int
    time: int | None
    to_driver: bool


_FREES = {
    "free_requested": False,
    "free_completed": False,
    "segment_free": True,
    "segment_unmap": True,
}


class History:
    """What the allocator has recorded of frees, if anybody had it record (oldest first)."""

    def __init__(self, traces: Iterable[Sequence[Mapping[str, Any]]] = ()) -> None:
        """From ``device_traces`` of torch's full snapshot."""
        self._oldest: int | None = None
        # The last free of each extent, in the order of these: address and bytes -> time, and
        # whether to the driver. Earlier frees of the same extent say nothing more.
        self._last: dict[tuple[int, int], tuple[int | None, bool]] = {}
        for trace in traces:
            for entry in trace:
                time = entry.get("time_us")
                if time is not None and (self._oldest is None or time < self._oldest):
                    self._oldest = int(time)
                to_driver = _FREES.get(entry.get("action", ""))
                address = entry.get("addr")
                if to_driver is None or address is None:
                    continue
                extent = address, entry["size"]
                self._last.pop(extent, None)
                self._last[extent] = time, to_driver
        # Most lookups are of a block's own address, one for each block in use.
        self._bytes_at = dict(self._last.keys())
        self._ranges = Ranges(self._last)

    def reaches_back_to(self, time: int) -> bool:
        """Whether everything since ``time`` is in it: it is bounded, and starts when asked."""
        return self._oldest is not None and self._oldest <= time

    def freed_since(self, block: Block, time: int) -> Freed | None:
        """The last free, after ``time``, of memory that began where ``block`` does."""
        nbytes = self._bytes_at.get(block.address)
        freed = None if nbytes is None else self._freed(block.address, nbytes)
        return freed if freed is not None and (freed.time or 0) > time else None

    def last_free(self, address: int) -> Freed | None:
        """The last free of memory that ``address`` is in."""
        extent = self._ranges.find(address)
        return None if extent is None else self._freed(*extent)

    def _freed(self, address: int, nbytes: int) -> Freed:
        return Freed(address, nbytes, *self._last[address, nbytes])


class Owned(NamedTuple):
    """Storage of the fork's. What is mapped stays mapped for the life of the process."""

    address: int
    mapped: int
    reserved: int  # at least ``mapped``: addresses that no memory is behind count, too
    owner: str
    # Whether a lane or a cache entry has it; else it is spare, and the next new lane's.
    used: bool
    # Whether it is a lane of captures, and the ids of the captures that hold it.
    captured: bool = False
    users: frozenset[int] = frozenset()


class Ledger:
    """All storage of the fork's at one moment."""

    def __init__(self, owned: Iterable[Owned] = ()) -> None:
        self._owned = sorted(owned)
        self._addresses = [each.address for each in self._owned]

    def find(self, address: int) -> Owned | None:
        """The storage that ``address`` is in, mapped there or only reserved."""
        at = bisect_right(self._addresses, address) - 1
        if at < 0 or address >= self._addresses[at] + self._owned[at].reserved:
            return None
        return self._owned[at]

    def span(self) -> tuple[int, int] | None:
        """The first address, and the first behind the last range; ``None`` without any."""
        if not self._owned:
            return None
        return self._addresses[0], max(each.address + each.reserved for each in self._owned)


def ledger_of(state: State) -> Ledger:
    """What ``state`` knows, read under its lock."""
    owned: list[Owned] = []
    with state.lock:
        for lane in state.lanes.values():
            name = f"lane {lane.part} of {_key(lane.key)}"
            owned += _owned(lane.storage, name, True, lane.captured, frozenset(lane.users))
        for places in (state.free, state.dirty):
            for index, storages in places.items():
                for storage in storages:
                    owned += _owned(storage, f"spare workspace of {device_name(index)}", False)
        for (buffer, index), blocks in state.buffers.items():
            owned += _owned(blocks, f"buffer {buffer} of {device_name(index)}", True)
    return Ledger(owned)


def _owned(
    storage: Storage,
    owner: str,
    used: bool,
    captured: bool = False,
    users: frozenset[int] = frozenset(),
) -> list[Owned]:
    return [
        Owned(address, mapped, reserved, owner, used, captured, users)
        for address, mapped, reserved in storage.ranges()
        if reserved
    ]


def _key(key: tuple[Hashable, ...]) -> str:
    index, *rest = key
    name = device_name(index) if isinstance(index, int) else str(index)
    return f"{name}, {', '.join(_part(part) for part in rest)}"


def _part(part: object) -> str:
    if isinstance(part, tuple):
        return " ".join(_part(each) for each in part)
    return f"stream {part:#x}" if isinstance(part, int) else str(part)


class Place(NamedTuple):
    """Memory that the driver knows, whoever allocated it."""

    address: int
    nbytes: int
    on_device: bool  # False for the host's


@dataclass(frozen=True)
class AtCapture:
    """What was there when a capture had just ended."""

    time: int
    snapshot: Snapshot | None
    ledger: Ledger = field(default_factory=Ledger)
    capture: int | None = None  # its id
