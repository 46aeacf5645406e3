"""A failed growth changes nothing, and says what was needed, what there is and what to do."""

from __future__ import annotations

import pytest
import torch

from flashinfer.gemm_workspace import (
    CudnnCaptureUnsafeError,
    CudnnWorkspaceTooSmallInCaptureError,
    GemmWorkspaceError,
    _gemm_workspace_at_least,
    cache_buffer,
    lane_workspace,
    reserve,
    reserve_lane,
    stats,
)
from flashinfer.gemm_workspace.state import State

from .fake_device import FakeDevice

MiB = 1024 * 1024
NAME = "bmm_fp8_workspace"


def test_outside_a_capture(device: FakeDevice) -> None:  # A35
    view = lane_workspace(NAME, 32 * MiB, "cuda")
    before = stats()
    device.fails = torch.OutOfMemoryError("full")
    with pytest.raises(GemmWorkspaceError) as caught:
        _gemm_workspace_at_least(view, 50 * MiB)
    text = str(caught.value)
    for part in (
        f"{NAME} needs {50 * MiB} bytes on cuda:0",
        f"a block of {80 * MiB}",
        f"{40 * MiB} are mapped and stay in use",
        "1000 free",
        "500 idle",
        "flashinfer.gemm_workspace.reserve(",
    ):
        assert part in text
    assert isinstance(caught.value, torch.OutOfMemoryError)  # what the release raised here
    assert stats() == before
    assert lane_workspace(NAME, 32 * MiB, "cuda") is view
    device.fails = None
    assert _gemm_workspace_at_least(view, 50 * MiB).numel() == 50 * MiB


def test_a_lane_whose_first_block_fails_was_never_there(device: FakeDevice, state: State) -> None:
    device.fails = torch.OutOfMemoryError("full")
    with pytest.raises(GemmWorkspaceError):
        lane_workspace(NAME, 8, "cuda")
    assert state.lanes == {}
    assert state.views == {}
    assert state.ledger == {}


def test_under_capture(device: FakeDevice) -> None:
    device.fails = MemoryError()
    with device.capturing(), pytest.raises(CudnnWorkspaceTooSmallInCaptureError) as caught:
        lane_workspace(NAME, 8, "cuda")
    text = str(caught.value)
    for part in ("needs", "0 are mapped", "1000 free", "500 idle", "before the capture begins"):
        assert part in text
    assert isinstance(caught.value, CudnnCaptureUnsafeError)


def test_under_capture_without_a_driver(device: FakeDevice) -> None:
    device.has_driver = False
    with device.capturing(), pytest.raises(CudnnWorkspaceTooSmallInCaptureError) as caught:
        lane_workspace(NAME, 8, "cuda")
    assert "driver API cannot be reached" in str(caught.value)
    assert "pip install cuda-bindings" in str(caught.value)
    with device.capturing(), pytest.raises(CudnnWorkspaceTooSmallInCaptureError) as caught:
        cache_buffer({}, "softmax", 8, torch.device("cuda"))
    assert "driver API cannot be reached" in str(caught.value)
    assert "graph's pool" in str(caught.value)
    assert device.eager == []


def test_an_unknown_number_of_free_bytes(device: FakeDevice) -> None:
    device.fails, device.free = MemoryError(), None  # type: ignore[assignment]
    with pytest.raises(GemmWorkspaceError, match="an unknown number free"):
        lane_workspace(NAME, 8, "cuda")


def test_a_failed_cache_growth_keeps_the_entry(device: FakeDevice) -> None:
    cache: dict = {}  # type: ignore[type-arg]
    where = torch.device("cuda")
    first = cache_buffer(cache, "softmax", 8, where)
    device.fails = torch.OutOfMemoryError("full")
    with pytest.raises(GemmWorkspaceError):
        cache_buffer(cache, "softmax", 100, where)
    assert cache[("softmax", where)] is first


def test_a_failed_reserve_raises_no_floor(device: FakeDevice, state: State) -> None:
    lane_workspace(NAME, 8, "cuda")
    device.fails = torch.OutOfMemoryError("full")
    for reserving in (
        lambda: reserve_lane(NAME, 50 * MiB, "cuda"),
        lambda: reserve(50 * MiB, "cuda"),
    ):
        with pytest.raises(GemmWorkspaceError):
            reserving()
    assert state.floors == {}


def test_other_errors_pass_unchanged(device: FakeDevice) -> None:  # A24: a sticky fault is no OOM
    device.fails = RuntimeError("an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory access") as caught:
        lane_workspace(NAME, 8, "cuda")
    assert type(caught.value) is RuntimeError
