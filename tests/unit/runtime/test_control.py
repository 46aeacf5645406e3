"""``reserve`` and ``stats``."""

from __future__ import annotations

import pytest
import torch

from flashinfer.gemm_workspace import LANE_BYTES, lane_workspace, reserve, reserve_lane, stats
from flashinfer.gemm_workspace.state import Growth

from .fake_device import FakeDevice

A, B = "mm_fp4_workspace", "bmm_fp8_workspace"
BIG = LANE_BYTES + 10


def test_reserve_grows_the_current_streams_lanes_and_later_ones(device: FakeDevice) -> None:
    lane_workspace(A, 1, "cuda")
    device.streams[0] = 5
    lane_workspace(A, 1, "cuda")
    reserve(BIG)
    assert [size for _, size in device.eager] == [LANE_BYTES, LANE_BYTES, 2 * LANE_BYTES]
    lane_workspace(B, 1, "cuda")
    assert device.eager[-1] == (0, BIG)
    lane_workspace(B, 1, "cuda:1")
    assert device.eager[-1] == (1, LANE_BYTES)
    assert lane_workspace(B, 32, "cuda").numel() == 32  # lengths never follow


def test_reserve_names_the_device(device: FakeDevice) -> None:
    reserve(BIG, "cuda:1")
    lane_workspace(A, 1, "cuda:1")
    assert device.eager == [(1, BIG)]
    with pytest.raises(ValueError, match="device meta has no lanes"):
        reserve(BIG, "meta")


def test_a_smaller_reserve_lowers_nothing(device: FakeDevice) -> None:
    reserve(BIG)
    reserve(1)
    reserve_lane(A, 2, "cuda")
    assert device.eager == [(0, BIG)]


def test_stats_on_a_fresh_process_state(device: FakeDevice) -> None:
    assert stats() == {
        "lanes": [],
        "buffers": [],
        "kept_bytes": 0,
        "growths": [],
        "plans_held": 0,
        "builds_refused": 0,
    }


def test_stats_tell_lanes_and_growths(device: FakeDevice) -> None:
    lane_workspace(A, 1, torch.device("cuda"))
    lane_workspace(A, BIG, "cuda")
    with device.capturing(capture=7, stream=3):
        lane_workspace(A, 1, "cuda")
    told = stats()
    assert told["lanes"] == [
        {
            "name": A,
            "device": "cuda:0",
            "key": (0, 0),
            "bytes": 2 * LANE_BYTES,
            "kept_bytes": LANE_BYTES,
        },
        {"name": A, "device": "cuda:0", "key": (0, 7, 3), "bytes": LANE_BYTES, "kept_bytes": 0},
    ]
    assert told["kept_bytes"] == LANE_BYTES
    assert told["growths"] == [
        Growth(A, (0, 0), 0, LANE_BYTES, False),
        Growth(A, (0, 0), LANE_BYTES, 2 * LANE_BYTES, False),
        Growth(A, (0, 7, 3), 0, LANE_BYTES, True),
    ]


def test_growths_are_bounded(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashinfer.gemm_workspace.lanes.LANE_BYTES", 1)
    for stream in range(300):
        device.streams[0] = stream
        lane_workspace(A, 1, "cuda")
    assert len(stats()["growths"]) == 256
