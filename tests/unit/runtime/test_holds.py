"""Holds: what a captured graph needs lives as long as the graph, and no longer."""

from __future__ import annotations

import gc
import logging
import weakref
from unittest.mock import patch

import pytest
import torch

from flashinfer.gemm_workspace import (
    _gemm_workspace_at_least,
    _retain_cudnn_graph_if_capturing,
    captures,
    collect,
    device_locked,
    guard_plan_build,
    holds,
    lane_workspace,
    stats,
)
from flashinfer.gemm_workspace.state import State

from .fake_device import FakeDevice

MiB = 1024 * 1024
NAME = "bmm_fp8_workspace"


class Plan:
    """A plan that says when it dies, and where."""


def captured(device: FakeDevice, capture: int, plan: object, stream: int = 3) -> int:
    """Capture a GEMM; the address that it used."""
    with device.capturing(capture, stream):
        view = lane_workspace(NAME, 8, "cuda")
        _retain_cudnn_graph_if_capturing(plan)
    return view.data_ptr()


def test_released_with_the_graph_and_not_before(device: FakeDevice, state: State) -> None:
    plan = Plan()
    alive = weakref.ref(plan)
    captured(device, 1, plan)
    del plan
    collect()
    assert alive() is not None
    device.destroy_graph(1)
    collect()
    assert alive() is None
    assert state.holds == state.lanes == {}
    assert [entry["bytes"] for entry in stats()["spare"]] == [40 * MiB]


def test_a_plan_lives_until_the_last_of_its_graphs_is_gone(device: FakeDevice) -> None:
    plan = Plan()
    alive = weakref.ref(plan)
    for capture in (1, 2):
        captured(device, capture, plan)
    del plan
    device.destroy_graph(1)
    assert stats()["plans_held"] == 1
    assert alive() is not None
    device.destroy_graph(2)
    assert stats()["plans_held"] == 0
    assert alive() is None


def test_one_tie_a_graph_however_often_things_are_used(device: FakeDevice, state: State) -> None:
    plan = Plan()
    with device.capturing(1):
        for _ in range(3):
            view = lane_workspace(NAME, 8, "cuda")
            _gemm_workspace_at_least(view, 8)
            _retain_cudnn_graph_if_capturing(plan)
    assert list(device.ties) == [1]
    assert len(state.holds[1].lanes) == len(state.holds[1].plans) == 1


def test_a_lane_of_a_pool_lives_until_the_last_graph_of_it_is_gone(device: FakeDevice) -> None:
    with device.capturing(1, pool="p"):
        first = lane_workspace(NAME, 8, "cuda").data_ptr()
    with device.capturing(2, pool="p"):
        assert lane_workspace(NAME, 8, "cuda").data_ptr() == first
    device.destroy_graph(1)
    with device.capturing(3, pool="q"):
        assert lane_workspace(NAME, 8, "cuda").data_ptr() != first
    device.destroy_graph(2)
    with device.capturing(4, pool="r"):
        assert lane_workspace(NAME, 8, "cuda").data_ptr() == first


def test_ten_thousand_recaptures_stay_where_the_first_was(device: FakeDevice, state: State) -> None:
    for capture in range(10_000):
        holds.before_capture()
        captured(device, capture, Plan())
        if capture == 0:
            first = stats()
        device.destroy_graph(capture)
        del device.ties[capture]
    collect()
    assert len(device.mapped) == len(device.ranges) == 1
    assert state.holds == {}
    assert state.garbage == []
    captured(device, 10_001, Plan())
    last = stats()
    for entry in ("lane_bytes", "plans_held", "graphs_alive"):
        assert last[entry] == first[entry]
    assert len(last["lanes"]) == 1


def test_a_young_graph_is_noticed_among_many_old_ones(device: FakeDevice, state: State) -> None:
    device.zeroes = False
    for capture in range(500):
        with device.capturing(capture, pool="p"):
            lane_workspace(NAME, 8, "cuda")
    device.destroy_graph(499)
    holds.before_capture()
    assert 499 not in state.holds
    # An old one in its turn, after a bounded number of looks.
    device.destroy_graph(250)
    for _ in range(500 // 8 + 2):
        holds.before_capture()
    assert 250 not in state.holds
    assert len(state.holds) == 498


def test_a_collection_looks_at_a_bounded_number(device: FakeDevice) -> None:
    looks = 0

    class Counted:
        def released(self) -> bool:
            nonlocal looks
            looks += 1
            return False

    device.tie = lambda graph: Counted()  # type: ignore[assignment, method-assign]
    for capture in range(200):
        with device.capturing(capture, pool="p"):
            lane_workspace(NAME, 8, "cuda")
    looks = 0
    holds.before_capture()
    assert 0 < looks <= 16


def test_nothing_is_freed_while_anybody_captures(device: FakeDevice) -> None:  # A10, B7, B26
    plan = Plan()
    alive = weakref.ref(plan)
    captured(device, 1, plan)
    del plan
    device.destroy_graph(1)
    with device.capturing(2):
        collect()
        view = lane_workspace(NAME, 8, "cuda")  # a new lane may look, and take, but not free
        _gemm_workspace_at_least(view, 60 * MiB)
        gc.collect()
        assert alive() is not None
    device.running = 1
    collect()
    assert alive() is not None
    device.running = 0
    collect()
    assert alive() is None


def test_plans_are_dropped_relaxed_and_outside_the_lock(device: FakeDevice, state: State) -> None:
    seen: list[tuple[int, bool]] = []

    class Watching:
        def __del__(self) -> None:
            seen.append((device.relaxed_depth, state.lock._is_owned()))  # type: ignore[attr-defined]

    captured(device, 1, Watching())
    device.destroy_graph(1)
    collect()
    assert seen == [(1, False)]


def test_a_workspace_fetched_before_the_capture_is_replaced_by_a_held_one(
    device: FakeDevice, state: State
) -> None:
    device.streams[0], device.stream_ids[5] = 5, 100
    view = lane_workspace(NAME, 8, "cuda")
    with device.capturing(1, stream=6):
        captured = _gemm_workspace_at_least(view, 8)
    device.stream_ids[5] = 101  # the stream is gone: its lane would be free for others
    other = lane_workspace(NAME, 8, "cuda")
    # The capture does not use the stream's lane, so that can go on, after a synchronisation.
    assert other.data_ptr() == view.data_ptr() != captured.data_ptr()
    assert device.syncs == [0]


def test_without_ties_things_are_kept_and_it_is_said_once(
    device: FakeDevice, caplog: pytest.LogCaptureFixture
) -> None:
    device.can_tie = False
    with caplog.at_level(logging.WARNING, "flashinfer.gemm_workspace"):
        for capture in (1, 2):
            captured(device, capture, Plan())
    collect()
    told = stats()
    assert (told["graphs_untied"], told["plans_held"], len(told["lanes"])) == (2, 2, 2)
    (record,) = caplog.records
    assert "kept for the life of the process" in record.getMessage()
    assert "pip install cuda-bindings" in record.getMessage()


def test_without_a_driver_plans_are_kept_and_it_is_said_once(
    device: FakeDevice, caplog: pytest.LogCaptureFixture
) -> None:
    device.has_driver = False
    plan = Plan()
    with caplog.at_level(logging.WARNING, "flashinfer.gemm_workspace"), device.capturing(1):
        for each in (plan, plan, Plan()):
            _retain_cudnn_graph_if_capturing(each)
    told = stats()
    assert (told["plans_held"], told["plans_kept_for_process"]) == (2, 2)
    assert len(caplog.records) == 1


def test_a_retired_lane_is_no_lane_of_its_old_views(device: FakeDevice, state: State) -> None:
    with device.capturing(1):
        old = lane_workspace(NAME, 8, "cuda")
    device.destroy_graph(1)
    collect()
    with device.capturing(2):
        assert _gemm_workspace_at_least(old, 8) is old
    assert state.holds == {}
    with device.capturing(3):
        new = lane_workspace(NAME, 8, "cuda")
        assert new.data_ptr() == old.data_ptr()
    assert len(state.free[0]) == 0
    assert torch.equal(new, old)


def test_a_plan_of_nobodys_is_not_unloaded_during_a_capture(device: FakeDevice) -> None:  # A10, B7
    @guard_plan_build
    def build_cudnn_gemm_fp8_graph(device: torch.device) -> tuple[Plan, int]:
        return Plan(), 1

    cuda = torch.device("cuda:0")
    alive = weakref.ref(build_cudnn_gemm_fp8_graph(cuda)[0])
    assert alive() is None  # outside captures nothing of ours keeps it
    cached = build_cudnn_gemm_fp8_graph(cuda)
    before = weakref.ref(cached[0])
    holds.before_capture()
    device.running = 1  # another thread captures
    del cached  # a builder's cache evicts
    gc.collect()
    assert before() is not None
    during = weakref.ref(build_cudnn_gemm_fp8_graph(cuda)[0])
    assert during() is not None
    device.running = 0
    build_cudnn_gemm_fp8_graph(cuda)
    assert before() is None
    assert during() is None


def test_eager_calls_that_hit_let_go_of_a_dead_graph(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    @device_locked
    def execute(a: torch.Tensor, workspace: torch.Tensor) -> None:
        _gemm_workspace_at_least(workspace, 8)

    workspace = lane_workspace(NAME, 8, "cuda")
    plan = Plan()
    alive = weakref.ref(plan)
    captured(device, 1, plan)
    del plan
    device.destroy_graph(1)
    graph = Plan()  # any object
    registry = captures.Registry(lambda: 1)
    monkeypatch.setattr(captures, "registry", registry)
    monkeypatch.setattr(device, "captures_running", registry.running)
    registry.began(graph, None)
    registry.ended(graph, True)
    execute(torch.empty(1), workspace)
    assert alive() is not None  # nobody has said that a graph died
    del graph
    execute(torch.empty(1), workspace)
    assert alive() is None
    assert not registry.dead  # or each call would look again


def test_an_interrupted_sweep_is_done_again(device: FakeDevice, state: State) -> None:
    plan = Plan()
    alive = weakref.ref(plan)
    captured(device, 1, plan)
    del plan
    device.destroy_graph(1)
    with (
        patch.object(holds, "retire", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        collect()
    collect()
    assert alive() is None
    assert state.holds == {}
