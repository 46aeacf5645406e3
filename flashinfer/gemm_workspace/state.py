"""What the process knows: one object, replaced as a whole in tests and after a fork."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from .device import CudaDevice, Device
from .storage import Storage

# Who uses a workspace. The policy compares keys and reads nothing from them.
LaneKey = tuple[Hashable, ...]

_EVENTS = 256


@dataclass
class Lane:
    """A workspace name on one stream, or on one stream of one capture."""

    name: str
    key: LaneKey
    index: int
    storage: Storage = field(default_factory=Storage)
    # Lengths that have a cached view, oldest first.
    lengths: deque[int] = field(default_factory=deque)


@dataclass(frozen=True)
class Growth:
    """A block was made. Sizes in bytes; ``old`` is 0 for the first."""

    name: str
    key: LaneKey
    old: int
    new: int
    capturing: bool


@dataclass
class State:
    """Everything that the runtime remembers. Writes need ``lock``; dict reads do not."""

    device: Device
    lock: threading.RLock = field(default_factory=threading.RLock)
    lanes: dict[tuple[str, LaneKey], Lane] = field(default_factory=dict)
    # Views by (name, length, lane key): the hot path is one read here.
    views: dict[tuple[str, int, LaneKey], torch.Tensor] = field(default_factory=dict)
    # Lane name by address of a block, outgrown ones too.
    ledger: dict[int, str] = field(default_factory=dict)
    # Bytes that new lanes start with, by (name or None for every name, device index).
    floors: dict[tuple[str | None, int], int] = field(default_factory=dict)
    # The release's cache, by (name, device index).
    buffers: dict[tuple[str, int], Storage] = field(default_factory=dict)
    device_locks: dict[int, threading.RLock] = field(default_factory=dict)
    handles: dict[Hashable, int] = field(default_factory=dict)
    held_plans: dict[int, object] = field(default_factory=dict)
    builds_refused: int = 0
    growths: deque[Growth] = field(default_factory=lambda: deque(maxlen=_EVENTS))
    told: set[str] = field(default_factory=set)
    capabilities: dict[int, tuple[int, int]] = field(default_factory=dict)

    def device_lock(self, index: int) -> threading.RLock:
        """The lock that cuDNN's handle of device ``index`` needs (one handle, many threads)."""
        lock = self.device_locks.get(index)
        # setdefault is atomic: two threads that both miss get the same lock.
        return lock if lock is not None else self.device_locks.setdefault(index, threading.RLock())

    def first_time(self, what: str) -> bool:
        """True once for each ``what``."""
        with self.lock:
            if what in self.told:
                return False
            self.told.add(what)
            return True


current = State(CudaDevice())

_abandoned: list[State] = []


@contextmanager
def use_device(device: Device) -> Iterator[State]:
    """For tests: a fresh state over ``device`` for every thread, until the context ends."""
    global current
    before, current = current, State(device)
    try:
        yield current
    finally:
        current = before


def _forget_after_fork() -> None:
    global current
    # Kept, not dropped: destructors would call into a driver that a forked child cannot use.
    _abandoned.append(current)
    current = State(CudaDevice())


os.register_at_fork(after_in_child=_forget_after_fork)
