"""``reserve``, ``seal`` and ``stats``."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import torch

from flashinfer.gemm_workspace import (
    LANE_BYTES,
    CudnnWorkspaceTooSmallInCaptureError,
    GemmWorkspaceError,
    _gemm_workspace_at_least,
    lane_workspace,
    reserve,
    reserve_lane,
    seal,
    stats,
)
from flashinfer.gemm_workspace.state import Growth, State

from .fake_device import FakeDevice, MiB

A, B = "mm_fp4_workspace", "bmm_fp8_workspace"
BIG = 100 * MiB


def test_reserve_maps_spare_ones_that_new_lanes_take(device: FakeDevice) -> None:
    reserve(BIG, lanes=2)
    assert device.mapped == [(0, BIG), (0, BIG)]
    assert [entry["bytes"] for entry in stats()["spare"]] == [BIG, BIG]
    lane_workspace(A, 1, "cuda")
    with device.capturing():
        first = lane_workspace(A, BIG, "cuda")
    assert len(device.mapped) == 2
    assert first.numel() == BIG
    assert stats()["spare"] == []
    device.streams[0] = 9
    lane_workspace(A, 32, "cuda")  # none is left: as without reserve
    assert device.mapped[2:] == [(0, LANE_BYTES)]


def test_reserve_again_does_nothing(device: FakeDevice) -> None:
    reserve(BIG)
    reserve(BIG)
    reserve(1)
    assert device.mapped == [(0, BIG)]
    reserve(BIG, lanes=2)
    assert device.mapped == [(0, BIG), (0, BIG)]
    reserve(BIG + 20 * MiB)  # a spare one grows rather than a third being made
    assert len(device.ranges) == 2


def test_reserve_grows_the_lanes_of_the_current_stream(device: FakeDevice) -> None:
    view = lane_workspace(A, 1, "cuda")
    device.streams[0] = 5
    lane_workspace(A, 1, "cuda")
    device.streams[0] = 0
    reserve(BIG, lanes=0)
    assert [entry["bytes"] >= BIG for entry in stats()["lanes"]] == [True, False]
    assert _gemm_workspace_at_least(view, BIG).data_ptr() == view.data_ptr()
    assert lane_workspace(B, 32, "cuda").numel() == 32  # lengths never follow


def test_the_spare_one_that_fits_best_is_taken(device: FakeDevice) -> None:
    reserve(BIG)
    reserve(50 * MiB, lanes=2)
    lane_workspace(A, 1, "cuda")
    assert [entry["bytes"] for entry in stats()["spare"]] == [BIG]


def test_reserve_names_the_device(device: FakeDevice) -> None:
    reserve(BIG, "cuda:1")
    lane_workspace(A, 1, "cuda:1")
    assert device.mapped == [(1, BIG)]
    with pytest.raises(ValueError, match="device meta has no lanes"):
        reserve(BIG, "meta")


def test_reserve_lane_is_for_later_lanes_of_that_name(device: FakeDevice) -> None:
    device.sm = (10, 0)
    reserve_lane(A, BIG, "cuda")
    reserve_lane(A, 2, "cuda")
    device.streams[0] = 4
    lane_workspace(A, 1, "cuda")
    lane_workspace(B, 1, "cuda")
    assert device.mapped == [(0, BIG), (0, BIG), (0, LANE_BYTES)]


def test_sealed_what_fits_goes_on_and_mapping_is_an_error(device: FakeDevice) -> None:
    view = lane_workspace(A, 1, "cuda")
    reserve(BIG, lanes=1)
    seal()
    before = stats()
    lane_workspace(A, 30 * MiB, "cuda")
    with pytest.raises(GemmWorkspaceError) as caught:
        _gemm_workspace_at_least(view, 2 * BIG)
    for part in (
        f"needs {2 * BIG} bytes on cuda:0",
        f"has {view.untyped_storage().nbytes() and stats()['lanes'][0]['bytes']}",
        "sealed",
        f"{BIG} bytes are reserved",
        "before seal()",
        "SEAL_POLICY=warn",
    ):
        assert part in str(caught.value)
    assert stats() == before
    with device.capturing():
        lane_workspace(A, BIG, "cuda")  # takes the spare one
    with device.capturing(capture=8), pytest.raises(CudnnWorkspaceTooSmallInCaptureError):
        lane_workspace(A, 1, "cuda")
    with pytest.raises(GemmWorkspaceError):
        reserve(BIG, lanes=3)
    seal(False)
    with device.capturing(capture=8):
        lane_workspace(A, 1, "cuda")


def test_the_seal_may_only_warn(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FLASHINFER_GEMM_WORKSPACE_SEAL_POLICY", "warn")
    seal()
    with caplog.at_level(logging.WARNING, "flashinfer.gemm_workspace"):
        lane_workspace(A, 1, "cuda")
    assert "sealed" in caplog.text
    assert "Going on" in caplog.text
    assert device.mapped == [(0, LANE_BYTES)]


def test_stats_on_a_fresh_process_state(device: FakeDevice) -> None:
    assert stats() == {
        "lanes": [],
        "spare": [],
        "buffers": [],
        "lane_bytes": 0,
        "kept_bytes": 0,
        "storage": {},
        "sharing": {},
        "sealed": False,
        "growths": [],
        "graphs_alive": 0,
        "graphs_untied": 0,
        "plans_held": 0,
        "plans_kept_for_process": 0,
        "builds_refused": 0,
    }


def test_stats_tell_lanes_and_growths(device: FakeDevice) -> None:
    device.sm = (10, 0)
    lane_workspace(A, 1, torch.device("cuda"))
    lane_workspace(A, BIG, "cuda")
    with device.capturing(capture=7, stream=3, pool=(0, 5)):
        lane_workspace(A, 1, "cuda")
    grown = 114 * MiB  # an eighth more, rounded up to the granularity of 2 MiB
    captured_key = (0, ("pool", (0, 5)), 3)
    told = stats()
    assert told["lanes"] == [
        {
            "name": A,
            "device": "cuda:0",
            "kind": "stream",
            "key": (0, 0),
            "storage": "arena",
            "bytes": grown,
            "kept_bytes": 0,
            "graphs": 0,
        },
        {
            "name": A,
            "device": "cuda:0",
            "kind": "capture",
            "key": captured_key,
            "storage": "arena",
            "bytes": LANE_BYTES,
            "kept_bytes": 0,
            "graphs": 1,
        },
    ]
    assert told["lane_bytes"] == grown + LANE_BYTES
    assert told["storage"] == {"cuda:0": "arena"}
    assert told["sharing"] == {"cuda:0": False}
    assert told["graphs_alive"] == 1
    assert told["growths"] == [
        growth.as_dict()
        for growth in (
            Growth(A, A, (0, 0), 0, LANE_BYTES, 0, None),
            Growth(A, A, (0, 0), LANE_BYTES, grown, 0, None),
            Growth(A, A, captured_key, 0, LANE_BYTES, 3, 7),
        )
    ]
    assert [growth["capturing"] for growth in told["growths"]] == [False, False, True]
    assert json.loads(json.dumps(told))["lane_bytes"] == told["lane_bytes"]  # plain data


@pytest.mark.parametrize("arguments", [(-5,), ("1",), (1, None, -1)])
def test_reserve_wants_numbers(device: FakeDevice, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="wanted a number of at least 0"):
        reserve(*arguments)
    assert stats()["spare"] == []


def test_growths_are_bounded(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashinfer.gemm_workspace.lanes.LANE_BYTES", 1)
    device.total = device.granularity
    for stream in range(300):
        device.streams[0] = stream
        lane_workspace(A, 1, "cuda")
    assert len(stats()["growths"]) == 256


def test_many_lanes_are_said_once(
    device: FakeDevice, state: State, caplog: pytest.LogCaptureFixture
) -> None:
    device.zeroes = False
    with caplog.at_level(logging.WARNING, "flashinfer.gemm_workspace"):
        for stream in range(12):
            device.streams[0] = stream
            lane_workspace(A, 1, "cuda")
        for capture in range(8):
            with device.capturing(capture):
                lane_workspace(A, 1, "cuda")
    (record,) = caplog.records
    assert "17 workspaces are in use: 12 of streams, 5 of streams under capture" in (
        record.getMessage()
    )
    assert "SINGLE_CAPTURE_LANE=1" in record.getMessage()
