"""Lanes: which workspace a call gets, its length and its address."""

from __future__ import annotations

import threading
from collections.abc import Hashable

import pytest
import torch

from flashinfer.gemm_workspace import (
    LANE_BYTES,
    _gemm_workspace_at_least,
    is_lane,
    lane_workspace,
    reserve_lane,
    stats,
)
from flashinfer.gemm_workspace.errors import DriverError
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
    assert device.mapped == [(0, LANE_BYTES)] == [(0, 40 * MiB)]
    assert not got.any()


def test_a_request_that_fits_is_the_same_tensor_and_allocates_nothing(device: FakeDevice) -> None:
    first = lane_workspace(NAME, 32 * MiB, "cuda")
    device.queries.clear()
    assert lane_workspace(NAME, 32 * MiB, torch.device("cuda:0")) is first
    assert device.queries == [0]  # one capture query
    other = lane_workspace(NAME, 40 * MiB, "cuda")
    assert other.data_ptr() == first.data_ptr()
    assert len(device.mapped) == 1


def test_growth_without_mapping_leaves_what_was_handed_out(device: FakeDevice) -> None:
    device.vmm = False
    first = lane_workspace(NAME, 32 * MiB, "cuda")
    address = first.data_ptr()
    grown = lane_workspace(NAME, 40 * MiB + 1, "cuda")
    assert device.blocks_made[1] == (0, 80 * MiB, False)
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
    device.sm = (10, 0)
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
    for vmm in (True, False):
        device.vmm = vmm
        with device.capturing(capture=vmm + 1):
            first = lane_workspace(NAME, 8, "cuda")
            assert lane_workspace(NAME, 8, "cuda") is first
            lane_workspace(NAME, 41 * MiB, "cuda")
    assert device.mapped == [(0, 40 * MiB), (0, 8 * MiB)]  # 42 and an eighth, less the 40
    assert device.blocks_made == [(0, 40 * MiB, True), (0, 80 * MiB, True)]
    assert device.torch_made == []


def test_graphs_of_one_pool_share_a_lane_and_others_do_not(device: FakeDevice) -> None:
    def under(capture: int, stream: int, pool: Hashable | None) -> int:
        with device.capturing(capture, stream, pool=pool):
            return lane_workspace(NAME, 8, "cuda").data_ptr()

    one = under(1, 3, (0, 5))
    assert under(2, 3, (0, 5)) == one
    assert under(3, 4, (0, 5)) != one  # another branch
    assert len({one, under(4, 3, (0, 6)), under(5, 3, None), under(6, 3, None)}) == 4


def test_several_threads_in_one_capture(device: FakeDevice) -> None:
    got: list[int] = []

    def work(stream: int) -> None:
        device.set_thread_stream(stream)
        got.append(lane_workspace(NAME, 8, "cuda").data_ptr())

    device.captures.update({(0, 3): 1, (0, 4): 1})
    for stream in (3, 4, 3):
        thread = threading.Thread(target=work, args=(stream,))
        thread.start()
        thread.join(30)
    assert got[0] == got[2] != got[1]


def test_the_switch_for_engines_that_never_replay_two_at_once(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHINFER_GEMM_WORKSPACE_SINGLE_CAPTURE_LANE", "1")
    seen = set()
    for capture, pool in ((1, (0, 1)), (2, (0, 2)), (3, None)):
        with device.capturing(capture, pool=pool):
            seen.add(lane_workspace(NAME, 8, "cuda").data_ptr())
    assert len(seen) == 1
    assert lane_workspace(NAME, 8, "cuda").data_ptr() not in seen  # an eager one never


@pytest.mark.parametrize(
    ("sm", "switch", "shared"),
    [((9, 0), "", True), ((9, 0), "0", False), ((12, 0), "", False), ((12, 0), "1", True)],
)
def test_ops_share_where_it_was_tried(
    device: FakeDevice,
    monkeypatch: pytest.MonkeyPatch,
    sm: tuple[int, int],
    switch: str,
    shared: bool,
) -> None:
    device.sm = sm
    monkeypatch.setenv("FLASHINFER_GEMM_WORKSPACE_SHARE", switch)
    one = lane_workspace(NAME, 8, "cuda")
    two = lane_workspace("mm_fp4_workspace", 8, "cuda")
    assert (one.data_ptr() == two.data_ptr()) == shared
    assert stats()["sharing"] == {"cuda:0": shared}
    partial = lane_workspace("mm_bf16_fp4_split_k_partial", 8, "cuda")
    assert partial.data_ptr() not in {one.data_ptr(), two.data_ptr()}


def test_at_least_on_a_part_stays_in_that_part(device: FakeDevice) -> None:
    ints = lane_workspace("group_gemm_fp8_nt_groupwise_int_workspace", 8, "cuda")
    more = _gemm_workspace_at_least(ints, 64)
    assert more.data_ptr() == ints.data_ptr()


def test_a_stream_made_again_at_a_handle_gets_a_clean_lane(
    device: FakeDevice, state: State
) -> None:
    device.streams[0], device.stream_ids[5] = 5, 100
    old = lane_workspace(NAME, 8, "cuda").data_ptr()
    device.stream_ids[5] = 101  # destroyed, and another one made
    device.running = 1
    new = lane_workspace(NAME, 8, "cuda").data_ptr()
    assert new != old  # no synchronisation while somebody captures
    assert device.syncs == []
    device.running, device.stream_ids[5] = 0, 102
    assert lane_workspace(NAME, 8, "cuda").data_ptr() in {old, new}
    assert device.syncs == [0]
    assert len(state.lanes) == 1
    assert len(device.ranges) == 2


def test_under_capture_only_clean_lanes_are_taken(device: FakeDevice) -> None:
    device.streams[0], device.stream_ids[5] = 5, 100
    old = lane_workspace(NAME, 8, "cuda").data_ptr()
    device.stream_ids[5], device.running = 101, 1
    lane_workspace(NAME, 8, "cuda")
    device.running = 0
    with device.capturing():
        assert lane_workspace(NAME, 8, "cuda").data_ptr() != old
    assert device.syncs == []


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
    assert [len(lane.views) for lane in state.lanes.values()] == [VIEWS]
    again = lane_workspace(NAME, 1000, "cuda")
    assert again is not first
    assert again.data_ptr() == first.data_ptr()
    assert len(device.mapped) == 1


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


def test_a_synchronisation_that_is_refused_leaves_lanes_dirty(
    device: FakeDevice, state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(index: int) -> None:  # a capture that nobody told us of
        raise DriverError("cuCtxSynchronize failed: 900")

    monkeypatch.setattr(device, "synchronize", refused)
    device.streams[0], device.stream_ids[5] = 5, 100
    old = lane_workspace(NAME, 8, "cuda").data_ptr()
    device.stream_ids[5] = 101
    assert lane_workspace(NAME, 8, "cuda").data_ptr() != old
    assert [storage.address for storage in state.dirty[0]] == [old]
    assert stats()["spare"][0]["dirty"]


def test_lanes_of_kernels_that_say_what_they_need_start_with_that(device: FakeDevice) -> None:
    """A 16-byte dummy does not map 40 MiB."""
    lane_workspace("mm_bf16_fp4_split_k_partial_dummy", 16, "cuda")
    (lane,) = stats()["lanes"]
    assert lane["bytes"] == device.granularity


def test_growing_ahead_is_not_paid_by_each_capture(device: FakeDevice) -> None:
    """reserve_lane() is for the streams; under capture a lane grows when it is asked to."""
    reserve_lane(NAME, 300 * MiB, "cuda")
    device.streams[0] = 5
    lane_workspace(NAME, 1, "cuda")
    with device.capturing():
        lane_workspace(NAME, 1, "cuda")
    assert [lane["bytes"] for lane in stats()["lanes"]] == [300 * MiB, 300 * MiB, LANE_BYTES]


def test_a_lane_under_capture_comes_with_a_blas_handle(device: FakeDevice) -> None:
    """A11: making it allocates, which only the runtime knows how to do under capture."""
    lane_workspace("bmm_fp8_workspace", 8, "cuda")
    assert device.blas_handles == []
    with device.capturing():
        for _ in range(3):
            lane_workspace("bmm_fp8_workspace", 8, "cuda")
    assert device.blas_handles == [0]
