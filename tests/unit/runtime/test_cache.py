"""``cache_buffer``: the release's dict and lengths, with storage that stays."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashinfer.gemm_workspace import LANE_BYTES, cache_buffer, lane_workspace, stats
from flashinfer.gemm_workspace.state import State, use_device

from .fake_device import FakeDevice

CUDA = torch.device("cuda")
CUDA0 = torch.device("cuda:0")


def test_the_entry_is_the_return_value_under_the_releases_key(device: FakeDevice) -> None:
    cache: dict[Any, Any] = {}
    got = cache_buffer(cache, "softmax", 100, CUDA0)
    assert cache == {("softmax", CUDA0): got}
    assert got.numel() == 100
    assert cache_buffer(cache, "softmax", 50, CUDA0) is got


def test_growth_within_capacity_keeps_the_address(device: FakeDevice) -> None:
    cache: dict[Any, Any] = {}
    cache_buffer(cache, "softmax", 100, CUDA0)
    second = cache_buffer(cache, "softmax", 101, CUDA0)
    third = cache_buffer(cache, "softmax", 200, CUDA0)
    assert (second.numel(), third.numel()) == (101, 200)
    assert second.data_ptr() == third.data_ptr()
    assert device.torch_made == [(0, 100), (0, 200)]


def test_a_cleared_cache_leaves_the_storage_alive_and_reuses_it(device: FakeDevice) -> None:
    cache: dict[Any, Any] = {}
    address = cache_buffer(cache, "softmax", 100, CUDA0).data_ptr()
    cache.clear()
    again = cache_buffer(cache, "softmax", 60, CUDA0)
    assert (again.data_ptr(), again.numel()) == (address, 60)
    assert len(device.torch_made) == 1


def test_zero_init_is_zeroed_whenever_made_anew(device: FakeDevice) -> None:
    cache: dict[Any, Any] = {}
    cache_buffer(cache, "row_states", 100, CUDA0, True).fill_(9)
    assert not cache_buffer(cache, "row_states", 150, CUDA0, True).any()
    cache_buffer(cache, "row_states", 150, CUDA0, True).fill_(9)
    assert not cache_buffer(cache, "row_states", 160, CUDA0, True).any()  # within capacity
    cache[("row_states", CUDA0)].fill_(9)
    assert cache_buffer(cache, "row_states", 160, CUDA0, True).all()  # the state of a live one
    cache.clear()
    assert not cache_buffer(cache, "row_states", 160, CUDA0, True).any()


def test_under_capture_plain_is_the_drivers_and_zero_init_is_recorded(device: FakeDevice) -> None:
    cache: dict[Any, Any] = {}
    with device.capturing():
        cache_buffer(cache, "softmax", 100, CUDA0)
        assert (device.blocks_made, device.torch_made) == ([(0, 100, True)], [])
        cache_buffer(cache, "row_states", 64, CUDA0, zero_init=True)
        assert (device.blocks_made, device.torch_made) == ([(0, 100, True)], [(0, 64)])


def test_the_key_without_an_index_follows_the_current_device(device: FakeDevice) -> None:  # A32
    cache: dict[Any, Any] = {}
    real_index = device.index_of
    first = cache_buffer(cache, "softmax", 100, CUDA)
    device.current = 1
    # The fake's tensors are on the CPU: say that the entry was made on device 0.
    device.index_of = lambda d: 0 if d.type == "cpu" else real_index(d)  # type: ignore[method-assign]
    second = cache_buffer(cache, "softmax", 100, CUDA)
    assert second.data_ptr() != first.data_ptr()
    assert device.torch_made[-1] == (1, 100)


def test_an_entry_of_the_engines_own(device: FakeDevice) -> None:
    own = torch.empty(64, dtype=torch.uint8)
    cache: dict[Any, Any] = {("softmax", CUDA0): own}
    assert cache_buffer(cache, "softmax", 64, CUDA0) is own
    assert cache_buffer(cache, "softmax", 65, CUDA0) is cache[("softmax", CUDA0)]
    assert stats()["kept_bytes"] == 64


def test_a_lanes_name_reserves(device: FakeDevice, state: State) -> None:
    cache: dict[Any, Any] = {}
    name = "mm_fp4_workspace"
    size = LANE_BYTES + device.granularity
    got = cache_buffer(cache, name, size, CUDA0)
    assert cache == {}
    assert got is lane_workspace(name, size, CUDA0)
    device.streams[0] = 8
    lane_workspace(name, 1, CUDA0)
    lane_workspace("mm_bf16_workspace", 1, CUDA0)  # shares the lane on this device
    assert device.mapped == [(0, size), (0, size)]


sizes = st.lists(st.one_of(st.integers(0, 40), st.just("clear")), max_size=40)


@settings(derandomize=True, deadline=None)
@given(sizes)
def test_lengths_are_the_releases_and_kept_bytes_are_bounded(steps: list[int | str]) -> None:
    model: int | None = None
    largest = 0
    handed: list[tuple[torch.Tensor, int, int]] = []
    cache: dict[Any, Any] = {}
    with use_device(FakeDevice()):
        for step in steps:
            if isinstance(step, str):
                cache.clear()
                model = None
                continue
            model = step if model is None else max(model, step)
            largest = max(largest, step, 1)
            got = cache_buffer(cache, "softmax", step, CUDA0)
            assert got.numel() == model
            assert cache[("softmax", CUDA0)] is got
            handed.append((got, got.data_ptr(), got.numel()))
            assert stats()["kept_bytes"] < 2 * largest
            assert all((t.data_ptr(), t.numel()) == (p, n) for t, p, n in handed)
