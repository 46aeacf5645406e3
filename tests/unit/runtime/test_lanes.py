"""Lanes: which workspace a call gets, its length and its address."""

from __future__ import annotations

import pytest
import torch

from flashinfer.gemm_workspace import LANE_BYTES, is_lane, lane_workspace
from flashinfer.gemm_workspace.lanes import VIEWS
from flashinfer.gemm_workspace.state import State

from .fake_device import FakeDevice

MiB = 1024 * 1024
NAME = "bmm_fp8_workspace"


@pytest.mark.parametrize(("nbytes", "length"), [(0, 1), (1, 1), (32 * MiB, 32 * MiB)])
def test_length_is_the_request(device: FakeDevice, nbytes: int, length: int) -> None:
    lane_workspace(NAME, 100 * MiB, "cuda")  # history must not show
    got = lane_workspace(NAME, nbytes, "cuda")
    assert (got.numel(), got.dim(), got.dtype) == (length, 1, torch.uint8)


def test_maps_at_least_40_mib_of_zeros(device: FakeDevice) -> None:
    got = lane_workspace(NAME, 100, "cuda")
    assert device.eager == [(0, LANE_BYTES)] == [(0, 40 * MiB)]
    assert not got.any()


def test_a_request_that_fits_is_the_same_tensor_and_allocates_nothing(device: FakeDevice) -> None:
    first = lane_workspace(NAME, 32 * MiB, "cuda")
    device.queries.clear()
    assert lane_workspace(NAME, 32 * MiB, torch.device("cuda:0")) is first
    assert device.queries == [0]  # one capture query
    other = lane_workspace(NAME, 40 * MiB, "cuda")
    assert other.data_ptr() == first.data_ptr()
    assert len(device.eager) == 1


def test_growth_leaves_what_was_handed_out(device: FakeDevice) -> None:
    first = lane_workspace(NAME, 32 * MiB, "cuda")
    address = first.data_ptr()
    grown = lane_workspace(NAME, 40 * MiB + 1, "cuda")
    assert device.eager[1] == (0, 80 * MiB)
    assert grown.data_ptr() != address
    assert first.data_ptr() == address
    assert first.numel() == 32 * MiB
    assert lane_workspace(NAME, 32 * MiB, "cuda") is first
    # Kept by the runtime too, not only by whoever holds the tensor.
    lane = next(iter(_lanes()))
    assert lane.storage.kept_bytes == 40 * MiB


def _lanes() -> list:  # type: ignore[type-arg]
    from flashinfer.gemm_workspace import state

    return list(state.current.lanes.values())


def test_a_lane_per_name_stream_device_and_capture(device: FakeDevice) -> None:
    seen = {lane_workspace(NAME, 8, "cuda:0").data_ptr()}
    seen.add(lane_workspace("mm_fp4_workspace", 8, "cuda:0").data_ptr())
    seen.add(lane_workspace(NAME, 8, "cuda:1").data_ptr())
    device.streams[0] = 3
    seen.add(lane_workspace(NAME, 8, "cuda:0").data_ptr())
    for capture in (1, 2):
        for stream in (3, 4):
            with device.capturing(capture, stream):
                seen.add(lane_workspace(NAME, 8, "cuda:0").data_ptr())
    assert len(seen) == 8


def test_an_id_of_a_capture_is_not_taken_for_a_stream(device: FakeDevice) -> None:
    device.streams[0] = 5
    eager = lane_workspace(NAME, 8, "cuda")
    with device.capturing(capture=5, stream=5):
        assert lane_workspace(NAME, 8, "cuda").data_ptr() != eager.data_ptr()


def test_under_capture_memory_is_the_drivers(device: FakeDevice) -> None:
    with device.capturing():
        first = lane_workspace(NAME, 8, "cuda")
        assert lane_workspace(NAME, 8, "cuda") is first
        lane_workspace(NAME, 41 * MiB, "cuda")
    assert device.in_capture == [(0, 40 * MiB), (0, 80 * MiB)]
    assert device.eager == []


def test_device_becomes_an_index(device: FakeDevice) -> None:  # A32
    device.current = 1
    assert lane_workspace(NAME, 8, "cuda") is lane_workspace(NAME, 8, "cuda:1")
    device.current = 0
    assert lane_workspace(NAME, 8, "cuda") is not lane_workspace(NAME, 8, "cuda:1")


def test_views_are_bounded_and_a_miss_cuts_at_the_same_address(
    device: FakeDevice, state: State
) -> None:
    first = lane_workspace(NAME, 1000, "cuda")
    for nbytes in range(2, 2 + 2 * VIEWS):
        assert lane_workspace(NAME, nbytes, "cuda").data_ptr() == first.data_ptr()
    assert len(state.views) == VIEWS
    again = lane_workspace(NAME, 1000, "cuda")
    assert again is not first
    assert again.data_ptr() == first.data_ptr()
    assert len(device.eager) == 1


@pytest.mark.parametrize("kind", ["fp8", "mxfp4", "nvfp4"])
def test_int_and_float_parts_never_overlap(device: FakeDevice, kind: str) -> None:
    names = [f"group_gemm_{kind}_nt_groupwise_{part}_workspace" for part in ("int", "float")]
    assert all(map(is_lane, names))
    ints, floats = (lane_workspace(name, 32 * MiB, "cuda") for name in names)
    ints.fill_(1)
    assert not floats.any()


def test_the_real_cpu_has_a_plain_lane() -> None:
    first = lane_workspace("cpu_only_test", 16, "cpu")
    assert first is lane_workspace("cpu_only_test", 16, torch.device("cpu"))
    assert first.device.type == "cpu"
    assert first.numel() == 16


def test_a_kind_of_device_without_lanes_gets_an_ordinary_tensor(
    device: FakeDevice, state: State
) -> None:
    assert lane_workspace(NAME, 16, "meta").is_meta
    assert state.lanes == {}


def test_names_of_the_release_that_are_not_lanes() -> None:
    assert not is_lane("gdn_tensormaps")
    assert not is_lane("sampling_row_states")
