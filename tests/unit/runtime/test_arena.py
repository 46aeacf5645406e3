"""The arena: one address, few mappings, and not more memory than the headroom allows."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashinfer.gemm_workspace.arena import HEADROOM, RESERVED, Arena
from flashinfer.gemm_workspace.errors import DriverOutOfMemory

from .fake_device import FakeDevice, MiB

STEP = 2 * MiB


def arena(device: FakeDevice) -> Arena:
    made = Arena.on(device, 0)
    assert made is not None
    return made


def test_reserves_as_much_as_the_device_has_and_8_gib_at_most() -> None:
    device = FakeDevice()
    arena(device)
    assert device.ranges[0].nbytes == 1024 * MiB
    asked: list[int] = []
    device.total = 100 << 30
    device.new_range = lambda index, nbytes: asked.append(nbytes)  # type: ignore[assignment, method-assign, func-returns-value]
    assert Arena.on(device, 0) is None
    assert asked == [RESERVED] == [8 << 30]


def test_the_first_mapping_has_no_headroom() -> None:
    device = FakeDevice()
    made = arena(device)
    made.grow(40 * MiB, False)
    assert made.nbytes == 40 * MiB
    made.grow(40 * MiB + 1, False)
    assert made.nbytes == 48 * MiB  # 42, an eighth, and up to the granularity
    assert device.mapped == [(0, 40 * MiB), (0, 8 * MiB)]


def test_a_slow_rise_costs_few_mappings() -> None:
    device = FakeDevice()
    device.zeroes = False
    made = arena(device)
    for nbytes in range(40 * MiB, 800 * MiB, STEP):
        if made.nbytes < nbytes:
            made.grow(nbytes, False)
    assert len(device.mapped) <= 2 + math.log(20) / math.log(1 + 1 / HEADROOM)


def test_headroom_is_given_up_before_the_request() -> None:
    device = FakeDevice()
    made = arena(device)
    made.grow(40 * MiB, False)
    device.fails_above = 20 * MiB
    made.grow(60 * MiB, False)
    assert made.nbytes == 60 * MiB
    with pytest.raises(DriverOutOfMemory):
        made.grow(100 * MiB, False)
    assert made.nbytes == 60 * MiB


def test_the_tail_ends_with_the_range() -> None:
    device = FakeDevice()
    device.total = 50 * MiB
    made = arena(device)
    made.grow(40 * MiB, False)
    made.grow(49 * MiB, False)
    assert made.nbytes == 50 * MiB
    with pytest.raises(DriverOutOfMemory, match="more than the 52428800 reserved"):
        made.grow(51 * MiB, False)


def test_a_view_that_cannot_be_made_loses_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    made = arena(device)
    made.grow(40 * MiB, False)

    def fails(nbytes: int) -> torch.Tensor:
        raise RuntimeError("cannot be wrapped")

    with monkeypatch.context() as patch:
        patch.setattr(device.ranges[0], "tensor", fails)
        with pytest.raises(RuntimeError):
            made.cut(8)
    assert made.cut(8).data_ptr() == made.address
    made.grow(60 * MiB, False)  # the fake checks that it begins where the first mapping ended


def test_growth_shows_zeros_and_leaves_what_was_written() -> None:
    device = FakeDevice()
    made = arena(device)
    made.grow(STEP, False)
    made.cut(STEP).fill_(7)
    made.grow(2 * STEP, False)
    whole = made.cut(2 * STEP)
    assert bool((whole[:STEP] == 7).all())
    assert not whole[STEP:].any()


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.lists(st.integers(1, 4000), max_size=30), st.integers(1, 64))
def test_address_lengths_and_bytes(requests: list[int], granularity: int) -> None:
    device = FakeDevice()
    device.total, device.granularity = 1 << 13, granularity
    made = arena(device)
    largest = 0
    handed: list[tuple[torch.Tensor, int]] = []
    for nbytes in requests:
        if made.nbytes < nbytes:
            made.grow(nbytes, False)
            largest = nbytes
        view = made.cut(nbytes)
        handed.append((view, nbytes))
        assert made.nbytes <= largest + largest // HEADROOM + 2 * granularity
        assert sum(size for _, size in device.mapped) == made.nbytes
    assert all((view.data_ptr(), view.numel()) == (made.address, n) for view, n in handed)
