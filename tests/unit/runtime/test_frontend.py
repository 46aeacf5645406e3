"""Executing a plan by address: only where the frontend is the one that was read."""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from flashinfer.gemm_workspace import frontend


class Lowered:
    def __init__(self) -> None:
        self.executed: list[Any] = []

    def _execute_with_raw_ptrs(
        self, array: int, count: int, workspace: int, handle: int, index: int
    ) -> None:
        pointers = list((ctypes.c_uint64 * count).from_address(array))
        self.executed.append((pointers, workspace, handle, index))


class Graph:
    """As cudnn-frontend 1.32 has it: two plans, of which the second is selected."""

    def __init__(self) -> None:
        self._planning_done = True
        self._data_bindings: dict[int, Any] = {}
        self._plan_index = 1
        self._plans = [SimpleNamespace(cpp_index=5), SimpleNamespace(cpp_index=None)]
        self._lowered_graph: Any = Lowered()
        self.engine: Any = None
        self.uids: Any = [0, 1, 8]

    def _engine_for(self, plan: Any) -> Any:
        return self.engine

    def _variant_pack_uids(self) -> Any:
        return self.uids


HANDLE = SimpleNamespace(backend_handle=77)
HIGH = (1 << 63) + 3


def test_the_addresses_in_the_plans_own_order() -> None:
    """As passed they are those of uids 8, 1, 0 and of one that the plan has no use for."""
    graph = Graph()
    launch = frontend.raw(graph, None, (8, 1, 0, 3), HANDLE)
    assert launch is not None
    launch((11, HIGH, 13, 14), 99, HANDLE)
    launch((21, 22, 23, 24), 98, SimpleNamespace(backend_handle=78))
    assert graph._lowered_graph.executed == [
        ([13, HIGH, 11], 99, 77, -1),
        ([23, 22, 21], 98, 78, -1),
    ]


def test_a_plan_by_index() -> None:
    graph = Graph()
    launch = frontend.raw(graph, 0, (0, 1, 8), HANDLE)
    assert launch is not None
    launch((1, 2, 3), 4, HANDLE)
    assert graph._lowered_graph.executed == [([1, 2, 3], 4, 77, 5)]


@pytest.mark.parametrize(
    "change",
    [
        lambda graph: setattr(graph, "_planning_done", False),
        lambda graph: graph._data_bindings.update({1: object()}),
        lambda graph: setattr(graph, "engine", object()),  # one of the frontend's own
        lambda graph: setattr(graph, "uids", [0, 1, 8, 9]),  # an operand that nobody passes
        lambda graph: setattr(graph, "uids", None),
        lambda graph: setattr(graph, "_plan_index", 7),
        lambda graph: setattr(graph, "_plans", []),
        lambda graph: delattr(graph, "_plans"),
        lambda graph: setattr(graph, "_lowered_graph", None),
        lambda graph: setattr(graph, "_lowered_graph", object()),
    ],
)
def test_otherwise_the_public_call_is_made(change: Any) -> None:
    graph = Graph()
    change(graph)
    assert frontend.raw(graph, None, (0, 1, 8), HANDLE) is None


@pytest.mark.parametrize("handle", [1000, None, SimpleNamespace(backend_handle=None), object()])
def test_a_handle_of_another_kind(handle: Any) -> None:
    assert frontend.raw(Graph(), None, (0, 1, 8), handle) is None


def test_an_older_frontend() -> None:
    assert frontend.raw(object(), None, (0, 1, 8), HANDLE) is None


def test_no_plan_is_kept() -> None:
    graph = Graph()
    launch = frontend.raw(graph, None, (0, 1, 8), HANDLE)
    assert launch is not None
    graph_gone, lowered_gone = weakref.ref(graph), weakref.ref(graph._lowered_graph)
    del graph
    gc.collect()
    assert (graph_gone(), lowered_gone()) == (None, None)
    with pytest.raises(ReferenceError):
        launch((1, 2, 3), 4, HANDLE)


def test_streams_need_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "cudnn", raising=False)
    assert frontend.set_stream() is None
    monkeypatch.setitem(sys.modules, "cudnn", SimpleNamespace(set_stream=print))  # type: ignore[arg-type]
    assert frontend.set_stream() is print


def test_what_cannot_be_referred_to_weakly() -> None:
    assert frontend.weak(5) is None
