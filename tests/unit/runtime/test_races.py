"""What happens between two looks: other threads, waits for the device, interrupted steps."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest

from flashinfer.gemm_workspace import (
    GemmWorkspaceError,
    _gemm_workspace_at_least,
    lane_workspace,
    reserve,
    reserve_lane,
    seal,
    stats,
)
from flashinfer.gemm_workspace.captures import Registry
from flashinfer.gemm_workspace.device import Capture
from flashinfer.gemm_workspace.holds import retire
from flashinfer.gemm_workspace.names import LANE_BYTES
from flashinfer.gemm_workspace.state import State

from .fake_device import FakeDevice, MiB

A, B = "bmm_fp8_workspace", "mm_fp4_workspace"


def peer_gets_the_lock(state: State) -> Callable[[], bool]:
    """Whether another thread can have the runtime's lock at this moment."""

    def ask() -> bool:
        got: list[bool] = []

        def peer() -> None:
            got.append(state.lock.acquire(blocking=False))
            if got[0]:
                state.lock.release()

        thread = threading.Thread(target=peer)
        thread.start()
        thread.join()
        return got[0]

    return ask


def test_the_device_is_waited_for_without_the_lock(device: FakeDevice, state: State) -> None:
    """What runs there may wait for a launch of a thread that needs the lock first."""
    free = peer_gets_the_lock(state)
    seen: list[bool] = []
    device.synchronize = lambda index: seen.append(free())  # type: ignore[method-assign]
    device.streams[0], device.stream_ids[5] = 5, 100
    lane_workspace(A, 8, "cuda")
    device.stream_ids[5] = 101  # another stream at that handle: the former lane is to be cleaned
    lane_workspace(A, 8, "cuda")
    assert seen == [True]


def test_idle_blocks_are_given_back_without_the_lock(device: FakeDevice, state: State) -> None:
    free = peer_gets_the_lock(state)
    seen: list[bool] = []
    release = device.release_idle

    def watched(index: int) -> int:
        seen.append(free())
        return release(index)

    device.release_idle = watched  # type: ignore[method-assign]
    device.fails_above, device.idle_helps = 8 * MiB, True
    lane_workspace(A, 32 * MiB, "cuda")
    device.fails_above = 8 * MiB
    device.idle = 500
    reserve(100 * MiB, "cuda")
    assert seen == [True, True]


def test_what_is_retired_twice_is_free_once(device: FakeDevice, state: State) -> None:
    lane_workspace(A, 8, "cuda")
    (lane,) = state.lanes.values()
    retire(state, lane)
    retire(state, lane)
    assert state.free[0] == [lane.storage]


def test_a_lane_that_was_taken_meanwhile_is_not_held(device: FakeDevice) -> None:
    """Found without the lock, retired by another thread, then held: two owners of one storage."""
    with device.capturing(1, stream=6, pool="P"):
        view = lane_workspace(A, 8, "cuda")
    device.destroy_graph(1)  # nobody has noticed yet
    capture = device.capture

    def another_thread_is_first(index: int, stream: int) -> Capture:
        device.capture = capture  # type: ignore[method-assign]
        with device.capturing(3, stream=7, pool="Q"):
            assert lane_workspace(B, 8, "cuda").data_ptr() == view.data_ptr()
        return capture(index, stream)

    with device.capturing(2, stream=6, pool="P"):
        device.capture = another_thread_is_first  # type: ignore[method-assign]
        assert _gemm_workspace_at_least(view, 8).data_ptr() != view.data_ptr()


def test_what_was_asked_is_served_where_the_start_would_not_fit(device: FakeDevice) -> None:
    """The error comes only when memory is really gone."""
    reserve_lane(A, 300 * MiB, "cuda")
    device.streams[0], device.fails_above, device.idle = 5, 100 * MiB, 0
    lane_workspace(A, 32 * MiB, "cuda")
    device.streams[0], device.fails_above = 6, 36 * MiB
    lane_workspace(A, 32 * MiB, "cuda")
    device.streams[0], device.fails_above = 7, 8 * MiB
    with pytest.raises(GemmWorkspaceError, match=f"needs {300 * MiB} bytes"):
        lane_workspace(A, 32 * MiB, "cuda")


def test_a_spare_that_fits_is_served_after_seal(device: FakeDevice) -> None:
    reserve_lane(A, 64 * MiB, "cuda")
    reserve(LANE_BYTES, "cuda", lanes=2)
    seal()
    device.streams[0] = 5
    assert lane_workspace(A, 32 * MiB, "cuda").numel() == 32 * MiB


def test_the_registry_can_be_asked_from_a_signal_handler() -> None:
    registry = Registry(lambda: 1)
    with registry._lock:  # a handler runs between any two steps of the thread that has it
        assert registry._lock.acquire(blocking=False)
        registry._lock.release()
        assert registry.sizes() == (0, 0, 0)


def test_a_setting_without_meaning_is_said_and_changes_nothing(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FLASHINFER_GEMM_WORKSPACE_SHARE", "yes, please")
    with caplog.at_level(logging.WARNING, "flashinfer.gemm_workspace"):
        for nbytes in (8, 16, 32):
            lane_workspace(A, nbytes, "cuda")
    (record,) = caplog.records
    assert "FLASHINFER_GEMM_WORKSPACE_SHARE is 'yes, please', wanted one of" in record.getMessage()
    assert stats()["sharing"] == {"cuda:0": True}


def test_the_per_thread_default_stream_is_many_streams(device: FakeDevice, state: State) -> None:
    """Handle 2 means another living stream in each thread: none of their lanes is given away."""
    device.streams[0] = 2
    views = []
    for identity in (100, 101, 100):
        device.stream_ids[2] = identity
        views.append(lane_workspace(A, 8, "cuda"))
    assert views[0] is views[2]
    assert views[0].data_ptr() != views[1].data_ptr()
    assert device.syncs == []
