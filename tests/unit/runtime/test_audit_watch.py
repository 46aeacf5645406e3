"""Watching captures, over a stand-in for torch's graph class."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from flashinfer.gemm_workspace import audit_watch, captures, lane_workspace, torch_internals
from flashinfer.gemm_workspace.audit_watch import recorded, watch
from flashinfer.gemm_workspace.state import State

from .fake_device import FakeDevice

SEGMENT = {
    "address": 0x1000,
    "segment_pool_id": (0, 0),
    "blocks": [{"size": 512, "requested_size": 512, "state": "active_allocated"}],
}


class Base:
    """torch's C++ class: the constructor's argument decides whether the raw graph is kept."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.keep, self.instantiated, self.raw = keep_graph, 0, 0
        self.fails = False


@pytest.fixture
def graph_class() -> Any:
    class CUDAGraph(Base):
        def __new__(cls, keep_graph: bool = False) -> Any:
            return super().__new__(cls)

        def capture_end(self) -> str:
            if self.fails:
                raise RuntimeError("invalidated")
            self.raw = id(self)
            if not self.keep:
                self.instantiate()
            return "ended"

        def instantiate(self) -> None:
            self.instantiated += 1

        def reset(self) -> None:
            self.raw = 0

        def raw_cuda_graph(self) -> int:
            if not self.keep or not self.raw:
                raise RuntimeError("no raw graph")
            return self.raw

    return CUDAGraph


@pytest.fixture(autouse=True)
def nobody_watches(monkeypatch: pytest.MonkeyPatch, state: State) -> Iterator[None]:
    monkeypatch.setattr(audit_watch, "_watching", None)
    monkeypatch.setattr(captures, "current_capture", lambda: 7)
    monkeypatch.setattr(torch_internals, "allocator_segments", lambda: [SEGMENT])
    yield
    if audit_watch._watching is not None:
        audit_watch._watching.stop()


def test_a_watched_graph_is_kept_instantiated_and_recorded(
    graph_class: Any, device: FakeDevice
) -> None:
    with device.capturing(capture=7, stream=3, pool=(0, 9)):
        view = lane_workspace("bmm_fp8_workspace", 8, "cuda:0")
    with watch(graph_class=graph_class) as watching:
        graph = graph_class()
        assert graph.keep
        assert graph.capture_end() == "ended"
        assert watching.captures == 1
    assert graph.instantiated == 1  # as torch does for a graph that it does not keep
    assert graph.raw_cuda_graph()
    record = recorded(graph)
    assert record is not None
    assert record.capture == 7
    assert record.snapshot is not None
    assert record.snapshot.block(0x1100) is not None
    assert record.ledger.find(view.data_ptr()) is not None
    assert recorded(graph.raw_cuda_graph()) is record
    assert recorded(12345) is None


@pytest.mark.parametrize("how", ["positional", "keyword"])
def test_a_graph_whose_owner_keeps_it_is_left_to_the_owner(graph_class: Any, how: str) -> None:
    with watch(graph_class=graph_class):
        graph = graph_class(True) if how == "positional" else graph_class(keep_graph=True)
        graph.capture_end()
    assert graph.keep
    assert graph.instantiated == 0
    assert recorded(graph) is not None


def test_before_and_after_a_watch_everything_is_torchs(graph_class: Any) -> None:
    early = graph_class()
    with watch(graph_class=graph_class):
        pass
    late = graph_class()
    for graph in (early, late):
        graph.capture_end()
        assert not graph.keep
        assert graph.instantiated == 1
        assert recorded(graph) is None


def test_a_graph_made_under_a_watch_and_captured_after_it(graph_class: Any) -> None:
    with watch(graph_class=graph_class):
        graph = graph_class()
    graph.capture_end()
    assert graph.instantiated == 1
    assert recorded(graph) is None


def test_a_second_watch_is_the_first(graph_class: Any) -> None:
    first = watch(graph_class=graph_class)
    end = graph_class.capture_end
    assert watch(graph_class=graph_class) is first
    assert graph_class.capture_end is end  # wrapped once
    first.stop()
    assert watch(graph_class=graph_class) is not first
    first.stop()  # of no effect on the second
    assert audit_watch._watching is not None


def test_a_capture_that_failed_is_the_callers(graph_class: Any) -> None:
    with watch(graph_class=graph_class) as watching:
        graph = graph_class()
        graph.fails = True
        with pytest.raises(RuntimeError, match="invalidated"):
            graph.capture_end()
    assert recorded(graph) is None
    assert graph.instantiated == 0
    assert watching.captures == 0


def test_a_record_that_failed_leaves_the_capture(
    graph_class: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses() -> Any:
        raise RuntimeError("no snapshot")

    monkeypatch.setattr(torch_internals, "allocator_segments", refuses)
    with watch(graph_class=graph_class):
        graph = graph_class()
        assert graph.capture_end() == "ended"
    assert graph.instantiated == 1
    assert recorded(graph) is None
    assert "could not record" in caplog.text


def test_records_go_with_their_graphs(graph_class: Any) -> None:
    with watch(graph_class=graph_class):
        graph, other = graph_class(), graph_class()
        graph.capture_end()
        other.capture_end()
    graph.reset()
    assert recorded(graph) is None
    assert recorded(other) is not None
    before = len(audit_watch._recorded)
    del other
    gc.collect()
    assert len(audit_watch._recorded) == before - 1


def test_history_is_recorded_on_request_and_ended_by_whoever_began_it(
    graph_class: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    already = False
    monkeypatch.setattr(torch_internals, "record_history", asked.append)
    monkeypatch.setattr(torch_internals, "history_recorded", lambda: already)
    with watch(graph_class=graph_class):
        pass
    assert asked == []
    with watch(history=100, graph_class=graph_class):
        assert asked == [100]
    assert asked == [100, 0]
    already = True  # the engine's own recording
    with watch(history=100, graph_class=graph_class):
        pass
    assert asked == [100, 0]


@pytest.mark.parametrize("history", [-1, 1.5, "all"])
def test_a_history_that_is_none(history: Any, graph_class: Any) -> None:
    with pytest.raises(ValueError, match="wanted a number"):
        watch(history=history, graph_class=graph_class)
    assert audit_watch._watching is None


def test_torch_that_cannot_keep_raw_graphs() -> None:
    class Old:
        def capture_end(self) -> None: ...

        def reset(self) -> None: ...

    with pytest.raises(RuntimeError, match=r"wanted 2\.8 or later"):
        watch(graph_class=Old)


def test_what_cannot_be_referred_to_weakly_was_not_watched() -> None:
    assert recorded(object()) is None
