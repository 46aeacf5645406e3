"""What this thread's grafted call works on: device, op, and whether its stream captures."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .device import Capture, Device


class Local(threading.local):
    """What this thread works on. Set and restored by the functions that know it."""

    # Device index, name of the op, whether the device's current stream captures (``None``: not
    # asked); one attribute, because each execution sets it twice.
    work: tuple[int | None, str | None, bool | None] = (None, None, None)
    # The capture that ``work`` runs under, once somebody asked.
    capture: Capture | None = None
    plan_checked: bool = False


local = Local()


def device_index() -> int | None:
    """Index of the device of the enclosing call, ``None`` outside any."""
    return local.work[0]


def op() -> str | None:
    """Name of the op that the enclosing call executes, ``None`` outside any."""
    return local.work[1]


def is_capturing(device: Device, index: int) -> bool:
    """Whether the stream that is current on device ``index`` captures.

    Asked once an execution: the body of a locked function changes no stream.
    """
    work = local.work
    if work[0] == index and work[2] is not None:
        return work[2]
    return device.is_capturing(index)


def capture(device: Device, index: int, stream: int | None = None) -> Capture:
    """The capture of ``stream``, which is current on device ``index``; raises as
    ``Device.capture`` does. Asked once an execution."""
    asked = local.work[0] == index and bool(local.work[2])
    if asked and local.capture is not None:
        return local.capture
    got = device.capture(index, device.raw_stream(index) if stream is None else stream)
    if asked:
        local.capture = got
    return got


def plan_checked() -> bool:
    """Whether an enclosing plan build has already asked about the capture."""
    return local.plan_checked


@contextmanager
def working_on(index: int, plan_checked: bool = False) -> Iterator[None]:
    """The body works on device ``index``."""
    before = local.work, local.plan_checked
    local.work, local.plan_checked = (index, op(), None), plan_checked or local.plan_checked
    try:
        yield
    finally:
        local.work, local.plan_checked = before
