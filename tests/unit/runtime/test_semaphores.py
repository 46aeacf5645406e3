"""Semaphores that a destructor can post to, whenever and wherever it runs."""

from __future__ import annotations

import ctypes

from flashinfer.gemm_workspace import semaphores
from flashinfer.gemm_workspace.semaphores import Semaphore, post_address

post = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(post_address())


def test_a_post_is_seen_once() -> None:
    semaphore = Semaphore.take()
    assert not semaphore.take_post()
    post(semaphore.address)
    assert semaphore.take_post()
    assert not semaphore.take_post()
    semaphore.give_back()


def test_memory_is_used_again_and_never_twice_at_once() -> None:
    taken = [Semaphore.take() for _ in range(200)]
    addresses = {semaphore.address for semaphore in taken}
    assert len(addresses) == 200
    for semaphore in taken:
        semaphore.give_back()
    again = [Semaphore.take() for _ in range(200)]
    assert {semaphore.address for semaphore in again} == addresses
    for semaphore in again:
        semaphore.give_back()


def test_after_a_fork_none_of_the_parents_is_used() -> None:
    old = Semaphore.take()
    old.give_back()
    semaphores.forget()
    assert Semaphore.take().address != old.address
