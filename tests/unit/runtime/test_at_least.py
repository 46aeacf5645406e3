"""``_gemm_workspace_at_least``: grow the current lane, never the tensor that was passed."""

from __future__ import annotations

import torch

from flashinfer.gemm_workspace import (
    _gemm_workspace_at_least,
    device_locked,
    lane_workspace,
    stats,
)
from flashinfer.gemm_workspace.device import Capture
from flashinfer.gemm_workspace.errors import DriverError
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
    assert device.mapped == []


def test_our_view_grows_in_its_own_lane_at_the_same_address(device: FakeDevice) -> None:
    view = lane_workspace(NAME, 32 * MiB, "cuda")
    got = _gemm_workspace_at_least(view, CUBLASLT)
    assert (got.data_ptr(), got.numel()) == (view.data_ptr(), CUBLASLT)
    assert view.numel() == 32 * MiB
    assert len(device.mapped) == 1
    assert _gemm_workspace_at_least(view, CUBLASLT) is got


def test_growth_of_an_arena_is_in_place(device: FakeDevice) -> None:
    view = lane_workspace(NAME, 32 * MiB, "cuda")
    address = view.data_ptr()
    got = _gemm_workspace_at_least(view, 300 * MiB)
    assert (got.data_ptr(), got.numel()) == (address, 300 * MiB)
    assert (view.data_ptr(), view.numel()) == (address, 32 * MiB)
    assert _gemm_workspace_at_least(view, 300 * MiB) is got
    assert len(device.mapped) == 2


def test_growth_beyond_a_block(device: FakeDevice) -> None:
    device.vmm = False
    view = lane_workspace(NAME, 32 * MiB, "cuda")
    address = view.data_ptr()
    got = _gemm_workspace_at_least(view, 300 * MiB)
    assert got.numel() == 300 * MiB
    assert (view.data_ptr(), view.numel()) == (address, 32 * MiB)
    # A view of the outgrown block is still known as one of this lane's.
    assert _gemm_workspace_at_least(view, 300 * MiB) is got
    assert len(device.blocks_made) == 2


def test_a_tensor_of_the_callers_is_left_alone(device: FakeDevice, state: State) -> None:
    mine = torch.full((1024,), 7, dtype=torch.uint8)
    address = mine.data_ptr()
    got = _gemm_workspace_at_least(mine, 4096)
    assert got.numel() == 4096
    assert got.data_ptr() != address
    assert (mine.data_ptr(), mine.numel()) == (address, 1024)
    assert bool((mine == 7).all())
    assert [lane.part for lane in state.lanes.values()] == [GENERIC_LANE]


def test_a_clone_of_a_view_is_a_callers_tensor(device: FakeDevice, state: State) -> None:
    device.sm = (10, 0)  # a lane a name
    clone = lane_workspace(NAME, 8, "cuda").clone()  # the autotuner does this
    _gemm_workspace_at_least(clone, 16)
    assert {lane.part for lane in state.lanes.values()} == {NAME, GENERIC_LANE}


def test_under_capture_an_eager_view_leads_to_the_captures_lane(
    device: FakeDevice, state: State
) -> None:
    view = lane_workspace(NAME, 32 * MiB, "cuda")
    with device.capturing(capture=9, stream=3):
        got = _gemm_workspace_at_least(view, CUBLASLT)
        assert got is lane_workspace(NAME, CUBLASLT, "cuda")
    assert got.data_ptr() != view.data_ptr()
    assert state.holds[9].lanes[0].storage.address == got.data_ptr()


def test_another_stream_gets_its_own(device: FakeDevice) -> None:
    view = lane_workspace(NAME, 32 * MiB, "cuda")
    device.streams[0] = 5
    assert _gemm_workspace_at_least(view, CUBLASLT).data_ptr() != view.data_ptr()


def test_long_enough_under_capture_is_the_captures_own(device: FakeDevice, state: State) -> None:
    """Invariant 2: what was fetched before the capture belongs to the stream's eager calls."""
    view = lane_workspace(NAME, 32 * MiB, "cuda")
    with device.capturing(capture=9):
        own = _gemm_workspace_at_least(view, 8)
        assert own.data_ptr() != view.data_ptr()
        assert own.numel() == 32 * MiB  # Invariant 4: the length that was passed
        assert _gemm_workspace_at_least(own, 8) is own
        assert _gemm_workspace_at_least(view[1024:], 8).numel() == 32 * MiB - 1024
        eager, captured = state.lanes.values()
        assert (eager.users, captured.users) == (set(), {9})
        assert state.holds[9].lanes == [captured]
        mine = torch.empty(64, dtype=torch.uint8)
        device.queries.clear()
        assert _gemm_workspace_at_least(mine, 64) is mine  # a caller's: nothing to hold or ask
        assert device.queries == []


def test_an_op_name_of_the_enclosing_execution_is_in_the_growth(device: FakeDevice) -> None:
    view = lane_workspace(NAME, 32 * MiB, "cuda")

    @device_locked
    def execute_cudnn_gemm_fp8_graph(graph: object, a: torch.Tensor) -> torch.Tensor:
        return _gemm_workspace_at_least(view, 64 * MiB)

    execute_cudnn_gemm_fp8_graph(object(), torch.empty(1))
    assert [growth["op"] for growth in stats()["growths"]] == [NAME, "gemm_fp8"]


def test_a_lane_used_by_a_capture_nobody_can_name_is_never_given_away(
    device: FakeDevice, state: State
) -> None:
    """The driver fails under capture: the lane fetched before is kept for whatever it was."""
    view = lane_workspace(NAME, 1, "cuda")
    (lane,) = state.lanes.values()
    with device.capturing(stream=0):
        device.capture = _fails  # type: ignore[method-assign]
        assert _gemm_workspace_at_least(view, 1) is view
    assert lane.users == {-1}


def _fails(index: int, stream: int) -> Capture:
    raise DriverError("cuStreamGetCaptureInfo failed")
