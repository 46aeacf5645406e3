"""A failed growth changes nothing, and says what was needed, what there is and what to do."""

from __future__ import annotations

import logging

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
from flashinfer.gemm_workspace.errors import DriverError, DriverOutOfMemory
from flashinfer.gemm_workspace.state import State

from .fake_device import FakeDevice

MiB = 1024 * 1024
NAME = "bmm_fp8_workspace"
FULL = DriverOutOfMemory("cuMemCreate failed: out of memory")


@pytest.mark.parametrize(("vmm", "asked"), [(True, 50), (False, 80)])
def test_outside_a_capture(device: FakeDevice, vmm: bool, asked: int) -> None:  # A35
    device.vmm, device.idle = vmm, 0
    view = lane_workspace(NAME, 32 * MiB, "cuda")
    before = stats()
    device.fails = FULL
    with pytest.raises(GemmWorkspaceError) as caught:
        _gemm_workspace_at_least(view, 50 * MiB)
    text = str(caught.value)
    for part in (
        f"needs {50 * MiB} bytes on cuda:0",
        f"{asked * MiB} in {'arena' if vmm else 'blocks'} could not be had",
        f"{40 * MiB} are mapped and stay in use",
        "1000 free",
        "0 idle",
        "0 reserved and unused",
        "flashinfer.gemm_workspace.reserve(",
    ):
        assert part in text
    assert isinstance(caught.value, torch.OutOfMemoryError)  # what the release raised here
    assert stats() == before
    assert lane_workspace(NAME, 32 * MiB, "cuda") is view
    device.fails = None
    assert _gemm_workspace_at_least(view, 50 * MiB).numel() == 50 * MiB


def test_blocks_that_cannot_double_have_what_was_asked(device: FakeDevice) -> None:
    """300 MiB in use, 310 asked, 400 free: doubling would fail where the memory would do."""
    device.vmm, device.idle = False, 0
    view = lane_workspace(NAME, 300 * MiB, "cuda")
    allocate = device.allocate

    def short_of_memory(index: int, nbytes: int, capturing: bool) -> torch.Tensor:
        if nbytes > 400 * MiB:
            raise FULL
        return allocate(index, nbytes, capturing)

    device.allocate = short_of_memory  # type: ignore[method-assign]
    assert _gemm_workspace_at_least(view, 310 * MiB).numel() == 310 * MiB
    assert stats()["lanes"][0]["bytes"] == 310 * MiB


def test_a_lane_whose_first_growth_fails_was_never_there(device: FakeDevice, state: State) -> None:
    device.fails = FULL
    before = stats()
    for _ in range(3):
        with pytest.raises(GemmWorkspaceError):
            lane_workspace(NAME, 8, "cuda")
    assert state.lanes == {}
    assert state.ledger == {}
    assert len(device.ranges) == 1  # addresses are not lost, try after try
    assert {**stats(), "sharing": {}, "storage": {}} == before


def test_idle_blocks_of_torch_are_given_back_once(
    device: FakeDevice, caplog: pytest.LogCaptureFixture
) -> None:  # B28
    device.fails, device.idle_helps = FULL, True
    with caplog.at_level(logging.WARNING, "flashinfer.gemm_workspace"):
        lane_workspace(NAME, 8, "cuda")
    assert device.idle_released == 1
    (record,) = caplog.records
    assert "gave 500 idle bytes back" in record.getMessage()
    device.fails, device.idle, device.idle_helps = FULL, 300, False
    with pytest.raises(GemmWorkspaceError):
        lane_workspace(NAME, 80 * MiB, "cuda")
    assert device.idle_released == 2


@pytest.mark.parametrize("whose", ["own", "another thread's"])
def test_idle_blocks_stay_while_anybody_captures(device: FakeDevice, whose: str) -> None:
    device.fails, device.idle_helps = FULL, True
    if whose == "own":
        with device.capturing(), pytest.raises(CudnnWorkspaceTooSmallInCaptureError):
            lane_workspace(NAME, 8, "cuda")
    else:
        device.running = 1
        with pytest.raises(GemmWorkspaceError):
            lane_workspace(NAME, 8, "cuda")
    assert device.idle_released == 0


def test_under_capture(device: FakeDevice) -> None:
    device.fails = FULL
    with device.capturing(), pytest.raises(CudnnWorkspaceTooSmallInCaptureError) as caught:
        lane_workspace(NAME, 8, "cuda")
    text = str(caught.value)
    for part in (
        "needs",
        "0 are mapped",
        "1000 free",
        "500 idle",
        f"flashinfer.gemm_workspace.reserve({40 * MiB}) before the capture begins",
    ):
        assert part in text
    assert isinstance(caught.value, CudnnCaptureUnsafeError)


def test_under_capture_an_existing_lane_stays_as_it_was(device: FakeDevice) -> None:
    with device.capturing():
        view = lane_workspace(NAME, 8, "cuda")
        before = stats()
        device.fails = FULL
        with pytest.raises(CudnnWorkspaceTooSmallInCaptureError, match="41943040 are mapped"):
            _gemm_workspace_at_least(view, 100 * MiB)
        assert stats() == before
        assert lane_workspace(NAME, 8, "cuda") is view


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
    assert device.torch_made == []
    lane_workspace(NAME, 8, "cuda")  # outside: torch's memory
    assert device.torch_made == [(0, 40 * MiB)]
    assert stats()["storage"] == {"cuda:0": "blocks"}


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
    before = stats()
    device.fails, device.idle = FULL, 0
    for reserving in (
        lambda: reserve_lane(NAME, 50 * MiB, "cuda"),
        lambda: reserve(50 * MiB, "cuda"),
    ):
        with pytest.raises(GemmWorkspaceError):
            reserving()
    assert state.floors == {}
    assert stats() == before


@pytest.mark.parametrize("error", [RuntimeError("an illegal memory access"), DriverError("719")])
def test_other_errors_pass_unchanged(device: FakeDevice, error: RuntimeError) -> None:
    device.fails = error  # A24: a sticky fault is no want of memory
    with pytest.raises(type(error)) as caught:
        lane_workspace(NAME, 8, "cuda")
    assert caught.value is error
    assert device.idle_released == 0


def test_more_than_an_arena_can_have(device: FakeDevice) -> None:
    view = lane_workspace(NAME, 8, "cuda")
    with pytest.raises(GemmWorkspaceError, match=f"more than the {1024 * MiB} reserved"):
        _gemm_workspace_at_least(view, 1 << 42)
    assert len(device.mapped) == 1
