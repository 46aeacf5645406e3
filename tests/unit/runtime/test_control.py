"""``reserve``, ``seal`` and ``stats``."""

from __future__ import annotations

import inspect
import json
import logging
import os
import subprocess
import sys
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from flashinfer.gemm_workspace import (
    LANE_BYTES,
    CudnnWorkspaceTooSmallInCaptureError,
    GemmWorkspaceError,
    _gemm_workspace_at_least,
    lane_workspace,
    prepared,
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
        "streams_of_others": 0,
        "spare": [],
        "buffers": [],
        "lane_bytes": 0,
        "kept_bytes": 0,
        "storage": {},
        "sharing": {},
        "sealed": False,
        "growths_total": 0,
        "growths": [],
        "graphs_alive": 0,
        "graphs_untied": 0,
        "plans_held": 0,
        "plans_kept_for_process": 0,
        "builds_refused": 0,
        "prepared": prepared.report(),
    }
    assert stats()["prepared"]["hits"] == 0


def test_stats_tell_lanes_and_growths(device: FakeDevice) -> None:
    device.sm = (10, 0)
    first = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
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
    here = f"{__file__}:{{}} in test_stats_tell_lanes_and_growths"
    assert told["streams_of_others"] == 1
    assert told["growths"] == [
        Growth(
            op=A,
            part=A,
            device="cuda:0",
            key=key,
            old=old,
            new=new,
            stream=stream,
            capture=capture,
            caller=here.format(line),
            thread="MainThread",
        ).as_dict()
        for line, key, old, new, stream, capture in (
            (first, (0, 0), 0, LANE_BYTES, 0, None),
            (first + 1, (0, 0), LANE_BYTES, grown, 0, None),
            (first + 3, captured_key, 0, LANE_BYTES, 3, 7),
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
    assert stats()["growths_total"] == 300


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


def test_a_growth_is_told_with_its_thread(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FLASHINFER_GEMM_WORKSPACE_LOG", "1")
    device.sm = (10, 0)
    worker = threading.Thread(target=lane_workspace, args=(A, 1, "cuda"), name="worker 3")
    worker.start()
    worker.join()
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert (
        f"GEMM workspace grew: {A} of cuda:0 for {A}, from 0 to {LANE_BYTES} bytes (stream 0x0, "
        "no capture"
    ) in record.getMessage()
    event = record.gemm_workspace  # type: ignore[attr-defined]
    assert event == {"event": "growth", **stats()["growths"][0]}
    assert event["thread"] == "worker 3"
    assert "threading.py" in event["caller"]


def test_growths_are_quiet_unless_asked(
    device: FakeDevice, caplog: pytest.LogCaptureFixture
) -> None:
    lane_workspace(A, 1, "cuda")
    assert caplog.records == []
    with caplog.at_level(logging.DEBUG, "flashinfer.gemm_workspace"):
        lane_workspace(A, BIG, "cuda")
    assert [record.levelno for record in caplog.records] == [logging.DEBUG]


def test_zeros_on_demand(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHINFER_GEMM_WORKSPACE_ZERO", "1")
    device.streams[0] = 5
    for captured in (False, True):
        with device.capturing() if captured else nullcontext():
            view = lane_workspace(A, 64, "cuda")
            for ask in (
                lambda: lane_workspace(A, 64, "cuda"),
                lambda view=view: _gemm_workspace_at_least(view, 64),
                lambda view=view: _gemm_workspace_at_least(view, BIG),
                lambda view=view: _gemm_workspace_at_least(view, BIG),
            ):
                view.fill_(1)
                got = ask()
                assert got.data_ptr() == view.data_ptr()
                assert not got.any()
    own = torch.ones(64, dtype=torch.uint8)
    assert _gemm_workspace_at_least(own, 64).all()  # a caller's is left alone


def test_contents_are_left_alone_by_default(device: FakeDevice) -> None:
    view = lane_workspace(A, 64, "cuda").fill_(1)
    assert lane_workspace(A, 64, "cuda").all()
    assert _gemm_workspace_at_least(view, 64).all()


def test_the_growth_line_is_seen_without_logging_set_up() -> None:
    code = (
        "from tests.unit.runtime.fake_device import FakeDevice\n"
        "from flashinfer.gemm_workspace import lane_workspace, use_device\n"
        "with use_device(FakeDevice()):\n"
        f"    lane_workspace({A!r}, 1, 'cuda')\n"
    )
    for value, lines in (("0", 0), ("1", 1)):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "FLASHINFER_GEMM_WORKSPACE_LOG": value, "PYTHONPATH": os.getcwd()},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stderr.count("GEMM workspace grew") == lines, done.stderr
