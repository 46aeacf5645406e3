"""Which device this thread's grafted call works on, and for which op."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Local(threading.local):
    """What this thread works on. Set and restored by the functions that know it."""

    # Device index and name of the op; one attribute, because each execution sets it twice.
    work: tuple[int | None, str | None] = (None, None)
    plan_checked: bool = False


local = Local()


def device_index() -> int | None:
    """Index of the device of the enclosing call, ``None`` outside any."""
    return local.work[0]


def op() -> str | None:
    """Name of the op that the enclosing call executes, ``None`` outside any."""
    return local.work[1]


def plan_checked() -> bool:
    """Whether an enclosing plan build has already asked about the capture."""
    return local.plan_checked


@contextmanager
def working_on(index: int, plan_checked: bool = False) -> Iterator[None]:
    """The body works on device ``index``."""
    before = local.work, local.plan_checked
    local.work, local.plan_checked = (index, op()), plan_checked or local.plan_checked
    try:
        yield
    finally:
        local.work, local.plan_checked = before
