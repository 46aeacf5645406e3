"""Threads that meet on the slow path."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch

from flashinfer.gemm_workspace import (
    LANE_BYTES,
    _gemm_workspace_at_least,
    cache_buffer,
    lane_workspace,
)
from flashinfer.gemm_workspace.state import State

from .fake_device import FakeDevice

THREADS = 8
NAME = "bmm_fp8_workspace"


def together(work: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
    barrier = threading.Barrier(THREADS, timeout=60)  # a broken test must not hang the suite

    def start(i: int) -> torch.Tensor:
        barrier.wait()
        return work(i)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(start, range(THREADS)))


def slowly(device: FakeDevice) -> None:
    """Give a second thread every chance to allocate while the first does."""
    meeting = threading.Barrier(2)
    original = device.about_to_map

    def about_to_map(nbytes: int) -> None:
        # Right code never meets here, so this runs out; only wrong code returns at once.
        with suppress(threading.BrokenBarrierError):
            meeting.wait(0.05)
        original(nbytes)

    device.about_to_map = about_to_map  # type: ignore[method-assign]


def test_one_stream_one_block(device: FakeDevice) -> None:
    slowly(device)
    views = together(lambda _: lane_workspace(NAME, 64, "cuda"))
    assert all(view is views[0] for view in views)
    assert len(device.mapped) == 1


def test_growth_happens_once(device: FakeDevice) -> None:
    first = lane_workspace(NAME, 64, "cuda")
    slowly(device)
    views = together(lambda _: _gemm_workspace_at_least(first, LANE_BYTES + 1))
    assert all(view is views[0] for view in views)
    assert len(device.mapped) == 2


def test_a_stream_each_a_block_each(device: FakeDevice) -> None:
    def work(i: int) -> torch.Tensor:
        device.set_thread_stream(i)
        return lane_workspace(NAME, 64, "cuda")

    assert len({view.data_ptr() for view in together(work)}) == THREADS


def test_the_cache_is_filled_once(device: FakeDevice) -> None:
    cache: dict[tuple[str, torch.device], torch.Tensor] = {}
    where = torch.device("cuda:0")
    slowly(device)
    views = together(lambda _: cache_buffer(cache, "softmax", 64, where))
    assert len({view.data_ptr() for view in views}) == 1
    assert len(device.torch_made) == 1


def test_one_lock_a_device(device: FakeDevice, state: State) -> None:
    assert len(set(map(id, together(lambda i: state.device_lock(i % 2))))) == 2  # type: ignore[arg-type, return-value]
