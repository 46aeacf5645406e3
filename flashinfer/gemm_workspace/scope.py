"""Which device this thread's grafted call works on, when that is not the current one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Local(threading.local):
    index: int | None = None
    plan_checked: bool = False


_local = _Local()


def device_index() -> int | None:
    """Index of the device of the enclosing call, ``None`` outside any."""
    return _local.index


def plan_checked() -> bool:
    """Whether an enclosing plan build has already asked about the capture."""
    return _local.plan_checked


@contextmanager
def working_on(index: int, plan_checked: bool = False) -> Iterator[None]:
    """The body works on device ``index``."""
    before = _local.index, _local.plan_checked
    _local.index, _local.plan_checked = index, plan_checked or _local.plan_checked
    try:
        yield
    finally:
        _local.index, _local.plan_checked = before
