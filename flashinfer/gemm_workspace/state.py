"""What the process knows: one object, replaced as a whole in tests and after a fork."""

from __future__ import annotations

import functools
import logging
import os
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from . import captures, semaphores
from .device import CudaDevice, Device, Tie
from .settings import SHARED_ON, Settings
from .storage import Blocks, Storage

# Who uses a workspace: device index, then for a capture its pool, then the stream. The policy
# compares keys and reads nothing from them.
LaneKey = tuple[Hashable, ...]

# Workspace name, length in bytes, device index, stream key.
ViewKey = tuple[str, int, int, Hashable]

_EVENTS = 256

log = logging.getLogger("flashinfer.gemm_workspace")


def _show(level: int) -> None:
    """Let lines of ``level`` be seen, also where nobody has set up logging."""
    log.setLevel(min(level, log.getEffectiveLevel()))
    if not log.hasHandlers():
        log.addHandler(logging.StreamHandler())


@dataclass(eq=False)
class Lane:
    """The storage of one part on one stream, or on one stream of the captures of one pool."""

    part: str
    key: LaneKey
    index: int
    stream: int  # handle
    captured: bool
    storage: Storage
    stream_gone: bool = False
    # Where its storage is and was: its entries in the ledger.
    addresses: list[int] = field(default_factory=list)
    # Captures whose graphs hold this lane.
    users: set[int] = field(default_factory=set)
    # Its views by length in bytes, oldest first.
    views: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass(eq=False)
class Hold:
    """What one captured graph needs. Without a tie it is held for the life of the process."""

    capture: int
    tie: Tie | None
    lanes: list[Lane] = field(default_factory=list)
    # Views of those lanes by (name, length, device index, stream key): an entry says that its
    # lane is held, too, so a captured call that finds one is done.
    views: dict[ViewKey, torch.Tensor] = field(default_factory=dict)
    # By id: cuDNN's graphs are not hashable by value, and a held one cannot lose its id.
    plans: dict[int, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Growth:
    """Memory was mapped, or a block made. Sizes in bytes; ``old`` is 0 for the first."""

    op: str
    part: str
    device: str
    key: LaneKey
    old: int
    new: int
    stream: int
    capture: int | None  # its id; None outside
    caller: str  # file, line and function outside FlashInfer that made the call
    thread: str

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "capturing": self.capture is not None}


@dataclass
class State:
    """Everything that the runtime remembers. Writes need ``lock``; dict reads do not."""

    device: Device
    lock: threading.RLock = field(default_factory=threading.RLock)
    lanes: dict[tuple[str, LaneKey], Lane] = field(default_factory=dict)
    # The hot path of eager calls: (workspace name, bytes, device as given) to the device's index,
    # the views by stream handle, and whether the device is the only one. Only streams that live
    # as long as the process are here, and a lane of such a stream is never taken from it.
    hot: dict[tuple[str, int, object], tuple[int, dict[int, torch.Tensor], bool]] = field(
        default_factory=dict
    )
    # Lane by address of its storage, outgrown blocks too.
    ledger: dict[int, Lane] = field(default_factory=dict)
    # Storage that nobody uses, by device index: ``free`` can be taken at any time, ``dirty`` only
    # after the device has been synchronised.
    free: dict[int, list[Storage]] = field(default_factory=dict)
    dirty: dict[int, list[Storage]] = field(default_factory=dict)
    # Bytes that new lanes start with, by (part, device index).
    floors: dict[tuple[str, int], int] = field(default_factory=dict)
    sealed: bool = False
    # By capture id, oldest first.
    holds: dict[int, Hold] = field(default_factory=dict)
    # Round robin of the bounded collection over ``holds``.
    rounds: Iterator[int] = field(default_factory=lambda: iter(()))
    # What released holds held, to be dropped outside any capture.
    garbage: list[object] = field(default_factory=list)
    # By id of a plan, how many of the above hold it; and who is told when one begins to.
    held: Counter[int] = field(default_factory=Counter)
    plan_held: Callable[[int], None] = lambda plan: None  # noqa: ARG005
    # Plans that were built, and who is told of each.
    plans_built: int = 0
    plan_built: Callable[[], None] = lambda: None
    # Plans executed under captures that nothing could be tied to, by id.
    kept_plans: dict[int, object] = field(default_factory=dict)
    # Plans that were built, weakly: those that no capture has begun since, and the rest; and the
    # strong references that keep them from being unloaded during a capture, by id.
    unpinned: list[weakref.ref[object]] = field(default_factory=list)
    # Length of that list at which its dead references are dropped.
    prune_at: int = 1024
    pinned: list[weakref.ref[object]] = field(default_factory=list)
    pins: dict[int, object] = field(default_factory=dict)
    # The release's cache, by (name, device index).
    buffers: dict[tuple[str, int], Blocks] = field(default_factory=dict)
    device_locks: dict[int, threading.RLock] = field(default_factory=dict)
    handles: dict[Hashable, int] = field(default_factory=dict)
    builds_refused: int = 0
    growths_total: int = 0
    growths: deque[Growth] = field(default_factory=lambda: deque(maxlen=_EVENTS))
    told: set[str] = field(default_factory=set)
    capabilities: dict[int, tuple[int, int]] = field(default_factory=dict)
    # Whether ops share, by device index.
    sharing: dict[int, bool] = field(default_factory=dict)

    @functools.cached_property
    def settings(self) -> Settings:
        """What the environment said at the first use; the defaults if that means nothing."""
        try:
            read = Settings.read()
            if read.log_growths:
                _show(logging.INFO)
            return read
        except ValueError as error:
            # Not raised: this is reached from within a GEMM, whose caller set nothing.
            log.warning("%s. Going on with the defaults of all of these.", error)
            return Settings()

    @functools.cached_property
    def eager_stream(self) -> Callable[[int], Hashable | None]:
        """Key of the current stream of a device, ``None`` while it captures.

        In the device's own fused form where it has one, which is a question of cost only.
        """
        device = self.device
        fused: Callable[[int], Hashable | None] | None = getattr(device, "eager_stream", None)

        def step_by_step(index: int) -> Hashable | None:
            if device.is_capturing(index):
                return None
            return device.stream_key(index, device.raw_stream(index))

        return fused or step_by_step

    def device_lock(self, index: int) -> threading.RLock:
        """The lock that cuDNN's handle of device ``index`` needs (one handle, many threads)."""
        lock = self.device_locks.get(index)
        # setdefault is atomic: two threads that both miss get the same lock.
        return lock if lock is not None else self.device_locks.setdefault(index, threading.RLock())

    def capability(self, index: int) -> tuple[int, int]:
        """Compute capability of device ``index``, asked once."""
        known = self.capabilities.get(index)
        if known is None:
            known = self.capabilities[index] = self.device.capability(index)
        return known

    def shares(self, index: int) -> bool:
        """Whether the ops of device ``index`` share lanes, decided once."""
        known = self.sharing.get(index)
        if known is None:
            asked = self.settings.share
            known = asked if asked is not None else self.capability(index) in SHARED_ON
            self.sharing[index] = known
        return known

    def first_time(self, what: str) -> bool:
        """True once for each ``what``."""
        with self.lock:
            if what in self.told:
                return False
            self.told.add(what)
            return True


current = State(CudaDevice())

_abandoned: list[object] = []


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
    _abandoned.extend((current, captures.registry))
    captures.forget()
    semaphores.forget()
    current = State(CudaDevice())


os.register_at_fork(after_in_child=_forget_after_fork)
