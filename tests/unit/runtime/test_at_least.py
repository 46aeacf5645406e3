"""``_gemm_workspace_at_least``: grow the current lane, never the tensor that was passed."""

from __future__ import annotations

import torch

from flashinfer.gemm_workspace import _gemm_workspace_at_least, lane_workspace
from flashinfer.gemm_workspace.names import GENERIC_LANE
from flashinfer.gemm_workspace.state import State

from .fake_device import FakeDevice

MiB = 1024 * 1024
NAME = "bmm_fp8_workspace"
CUBLASLT = 32 * MiB + 256


def test_long_enough_is_returned_without_a_query(device: FakeDevice) -> None:
    mine = torch.empty(64, dtype=torch.uint8)
    assert _gemm_workspace_at_least(mine, 64) is mine
    assert device.queries == []
    assert device.eager == []


def test_our_view_grows_in_its_own_lane_at_the_same_address(device: FakeDevice) -> None:
    view = lane_workspace(NAME, 32 * MiB, "cuda")
    got = _gemm_workspace_at_least(view, CUBLASLT)
    assert (got.data_ptr(), got.numel()) == (view.data_ptr(), CUBLASLT)
    assert view.numel() == 32 * MiB
    assert len(device.eager) == 1
    assert _gemm_workspace_at_least(view, CUBLASLT) is got


def test_growth_beyond_the_block(device: FakeDevice) -> None:
    view = lane_workspace(NAME, 32 * MiB, "cuda")
    address = view.data_ptr()
    got = _gemm_workspace_at_least(view, 300 * MiB)
    assert got.numel() == 300 * MiB
    assert (view.data_ptr(), view.numel()) == (address, 32 * MiB)
    # A view of the outgrown block is still known as one of this lane's.
    assert _gemm_workspace_at_least(view, 300 * MiB) is got
    assert len(device.eager) == 2


def test_a_tensor_of_the_callers_is_left_alone(device: FakeDevice, state: State) -> None:
    mine = torch.full((1024,), 7, dtype=torch.uint8)
    address = mine.data_ptr()
    got = _gemm_workspace_at_least(mine, 4096)
    assert got.numel() == 4096
    assert got.data_ptr() != address
    assert (mine.data_ptr(), mine.numel()) == (address, 1024)
    assert bool((mine == 7).all())
    assert [lane.name for lane in state.lanes.values()] == [GENERIC_LANE]


def test_a_clone_of_a_view_is_a_callers_tensor(device: FakeDevice, state: State) -> None:
    clone = lane_workspace(NAME, 8, "cuda").clone()  # the autotuner does this
    _gemm_workspace_at_least(clone, 16)
    assert {lane.name for lane in state.lanes.values()} == {NAME, GENERIC_LANE}


def test_under_capture_an_eager_view_leads_to_the_captures_lane(
    device: FakeDevice, state: State
) -> None:
    view = lane_workspace(NAME, 32 * MiB, "cuda")
    with device.capturing(capture=9, stream=3):
        got = _gemm_workspace_at_least(view, CUBLASLT)
        assert got is lane_workspace(NAME, CUBLASLT, "cuda")
    assert got.data_ptr() != view.data_ptr()
    assert (NAME, (0, 9, 3)) in state.lanes


def test_another_stream_gets_its_own(device: FakeDevice) -> None:
    view = lane_workspace(NAME, 32 * MiB, "cuda")
    device.streams[0] = 5
    assert _gemm_workspace_at_least(view, CUBLASLT).data_ptr() != view.data_ptr()
