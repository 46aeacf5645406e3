"""Counting semaphores of libc, in memory that is never returned.

``sem_post`` is the destructor of the user objects that tie things to captured graphs. The driver
may run it at any time, on any thread, and while the process exits: so neither the memory nor the
function may ever go away, whatever Python has torn down by then.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections import deque
from typing import Any

from .errors import DriverUnavailable

_SLOT = 64  # bytes; sem_t takes 32 in glibc and 16 in musl
_SLAB = 64  # slots taken from malloc at once

_free: deque[Semaphore] = deque()
_lock = threading.Lock()


@functools.cache
def _libc() -> Any:
    try:
        libc = ctypes.CDLL(None)
        libc.malloc.restype = ctypes.c_void_p
        libc.malloc.argtypes = [ctypes.c_size_t]
        libc.sem_init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
        libc.sem_trywait.argtypes = [ctypes.c_void_p]
        libc.sem_post.argtypes = [ctypes.c_void_p]
    except (AttributeError, OSError, TypeError) as error:  # no POSIX semaphores here
        raise DriverUnavailable(f"libc has no semaphores: {error}") from error
    return libc


def post_address() -> int:
    """Address of ``sem_post``."""
    return int(ctypes.cast(_libc().sem_post, ctypes.c_void_p).value or 0)


class Semaphore:
    """One semaphore, at zero when taken."""

    def __init__(self, address: int) -> None:
        self.address = address
        self._trywait = _libc().sem_trywait

    @staticmethod
    def take() -> Semaphore:
        """One that nobody uses. Raises DriverUnavailable, MemoryError."""
        with _lock:
            if not _free:
                libc = _libc()
                slab = libc.malloc(_SLOT * _SLAB)
                if not slab:
                    raise MemoryError("no memory for semaphores")
                for slot in range(_SLAB):
                    libc.sem_init(slab + slot * _SLOT, 0, 0)
                    _free.append(Semaphore(slab + slot * _SLOT))
            return _free.pop()

    def take_post(self) -> bool:
        """Whether it had been posted; back to zero then."""
        return int(self._trywait(self.address)) == 0

    def give_back(self) -> None:
        """Let another use it: only when no post can come any more."""
        _free.append(self)


def forget() -> None:
    """After a fork: the parent's driver may post to what is handed out or free here. Start anew."""
    global _lock
    _lock = threading.Lock()
    _free.clear()
