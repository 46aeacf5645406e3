"""Which captures run and which pool each has, over a stand-in for torch's graph class."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashinfer.gemm_workspace import captures
from flashinfer.gemm_workspace.captures import Registry


class Machine:
    """What the stand-ins of torch share: the capture of the current stream, and pools."""

    def __init__(self) -> None:
        self.capture: int | None = None
        self.last = 0
        self.pools = 100

    def current(self) -> int | None:
        return self.capture


class MemPool:
    def __init__(self, identity: tuple[int, int]) -> None:
        self.id = identity


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def registry(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Registry:
    made = Registry(machine.current)
    monkeypatch.setattr(captures, "registry", made)
    return made


@pytest.fixture
def graph_class(machine: Machine, registry: Registry) -> type:
    class CUDAGraph:
        """As torch's: the pool of a capture without one is made inside and told at the end."""

        made: tuple[int, int] | None = None

        def capture_begin(
            self, pool: Any = None, capture_error_mode: str = "global", newer: bool = False
        ) -> None:
            """Torch's own docstring."""
            if capture_error_mode == "broken":
                raise RuntimeError("cannot begin")
            machine.last += 1
            machine.capture = machine.last
            self.made = getattr(pool, "id", pool)
            if self.made is None:
                machine.pools += 1
                self.made = (0, machine.pools)

        def capture_end(self) -> str:
            machine.capture = None
            if self.made == (6, 6):
                raise RuntimeError("invalidated")
            return "ended"

        def reset(self) -> None:
            self.made = None

        def pool(self) -> tuple[int, int]:
            assert self.made is not None
            return self.made

    captures.install(CUDAGraph)
    return CUDAGraph


Key = Callable[..., Any]


@pytest.fixture
def key(machine: Machine, registry: Registry, graph_class: type) -> Key:
    """Capture into a new graph; its pool's key. The graph is kept in ``key.graphs``."""

    def capture(*args: Any, **kwargs: Any) -> Any:
        graph = graph_class()
        graph.capture_begin(*args, **kwargs)
        assert registry.running() == 1
        got = registry.pool_of(machine.last)
        assert got is not None
        assert graph.capture_end() == "ended"
        assert registry.running() == 0
        capture.graphs.append(graph)  # type: ignore[attr-defined]
        return got

    capture.graphs = []  # type: ignore[attr-defined]
    return capture


def test_a_pool_by_every_door(key: Any) -> None:
    one = key((0, 5))
    assert one == key(pool=(0, 5)) == key((0, 5), "relaxed") == key(pool=[0, 5])
    assert one == key((0, 5), capture_error_mode="relaxed", newer=True)
    assert one == key(MemPool((0, 5))) == key(pool=MemPool((0, 5)))
    assert len({one, key((0, 6)), key(), key(pool=None), key((0, 0))}) == 5


def test_a_pool_made_by_torch_is_shared_afterwards(key: Any) -> None:
    first = key()
    pool = key.graphs[0].pool()
    assert key(pool) == key(pool=MemPool(pool)) == first
    del key.graphs[0]
    gc.collect()
    assert key(pool) == first  # graphs that have it are left
    other = key()
    assert other != first
    assert key(key.graphs[-1].pool()) == other


def test_what_is_not_understood_has_a_key_of_its_own(key: Any) -> None:
    class Odd:
        id = "odd"

    odd = Odd()
    key.graphs.clear()
    assert key(odd) != key(odd)


def test_memory_is_bounded(key: Any, registry: Registry, graph_class: type) -> None:
    for _ in range(100):
        key()
        key(key.graphs[-1].pool())
    assert registry.sizes() == (200, 0, 100)
    for graph in key.graphs[:100]:
        graph.reset()
    assert registry.sizes() == (100, 0, 50)
    del graph
    key.graphs.clear()
    gc.collect()
    assert registry.sizes() == (0, 0, 0)


def test_a_pool_that_nobody_asked_for_is_not_remembered(
    graph_class: type, registry: Registry
) -> None:
    graph = graph_class()
    graph.capture_begin()
    graph.capture_end()
    assert registry.sizes() == (1, 0, 0)


@pytest.mark.parametrize("way", ["end", "raises", "reset", "destroyed", "begun again"])
def test_every_way_out_ends_the_count(
    machine: Machine, registry: Registry, graph_class: type, way: str
) -> None:
    graph = graph_class()
    graph.capture_begin((6, 6) if way == "raises" else None)
    capture = machine.last
    assert registry.running() == 1
    if way == "end":
        graph.capture_end()
    elif way == "raises":
        with pytest.raises(RuntimeError, match="invalidated"):
            graph.capture_end()
    elif way == "reset":
        graph.reset()
    elif way == "destroyed":
        del graph
        gc.collect()
    else:
        graph.capture_begin()
        assert registry.running() == 1
        assert registry.pool_of(machine.last) != registry.pool_of(capture)
        graph.capture_end()
    assert registry.running() == 0
    assert registry.pool_of(capture) is None


def test_a_begin_that_fails_is_none(graph_class: type, registry: Registry) -> None:
    with pytest.raises(RuntimeError, match="cannot begin"):
        graph_class().capture_begin(capture_error_mode="broken")
    assert registry.running() == 0


def test_several_at_once(machine: Machine, registry: Registry, graph_class: type) -> None:
    one, two = graph_class(), graph_class()
    one.capture_begin((0, 1))
    two.capture_begin((0, 2))
    assert registry.running() == 2
    assert (registry.pool_of(1), registry.pool_of(2)) == ((0, 1), (0, 2))
    one.capture_end()
    assert registry.running() == 1
    assert (registry.pool_of(1), registry.pool_of(2)) == (None, (0, 2))


def test_a_capture_that_nobody_saw(registry: Registry) -> None:
    assert registry.pool_of(12345) is None


def test_without_a_driver_it_still_counts(
    machine: Machine, registry: Registry, graph_class: type
) -> None:
    registry._capture_of_stream = lambda: None
    graph = graph_class()
    graph.capture_begin()
    assert registry.running() == 1
    graph.capture_end()
    assert registry.running() == 0


def test_the_id_of_a_dead_graph_is_not_taken_for_a_new_one(
    machine: Machine, registry: Registry, graph_class: type
) -> None:
    for _ in range(50):  # CPython gives the same memory again
        graph = graph_class()
        graph.capture_begin()
        assert registry.running() == 1
        del graph
    assert registry.running() == 0


def test_our_errors_never_reach_the_caller(
    registry: Registry,
    graph_class: type,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(*args: Any) -> None:
        raise KeyError("ours")

    monkeypatch.setattr(captures, "before_begin", broken)
    monkeypatch.setattr(registry, "began", broken)
    monkeypatch.setattr(registry, "ended", broken)
    graph = graph_class()
    graph.capture_begin()
    assert graph.capture_end() == "ended"
    assert len(caplog.records) == 3


def test_collects_before_the_capture_begins(
    machine: Machine, graph_class: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int | None] = []
    monkeypatch.setattr(captures, "before_begin", lambda: seen.append(machine.capture))
    graph_class().capture_begin()
    assert seen == [None]


def test_installed_once_and_like_the_original(graph_class: Any) -> None:
    begin = graph_class.capture_begin
    captures.install(graph_class)
    assert graph_class.capture_begin is begin
    assert begin.__doc__ == "Torch's own docstring."
    assert list(inspect.signature(begin).parameters)[:2] == ["self", "pool"]


def test_torchs_own_classes_are_wrapped() -> None:
    assert len(captures.graph_classes()) == 1 + hasattr(torch.accelerator, "Graph")
    for graph_class in captures.graph_classes():
        for name in ("capture_begin", "capture_end", "reset"):
            assert hasattr(getattr(graph_class, name), captures._MARK)
    assert next(iter(inspect.signature(torch.cuda.CUDAGraph.capture_begin).parameters)) == "self"
    assert list(inspect.signature(torch.cuda.CUDAGraph.capture_begin).parameters)[1] == "pool"


def test_a_reset_inside_a_destructor_does_not_wait_for_our_lock(
    registry: Registry, graph_class: type
) -> None:
    graph = graph_class()
    graph.capture_begin()
    with registry._lock:  # as if the garbage collector ran inside the registry
        graph.reset()
    assert registry.running() == 0


def test_a_graph_that_was_made_with_its_pool(
    machine: Machine, registry: Registry, graph_class: type
) -> None:
    """As torch.accelerator.Graph: the pool is an attribute, and its begin takes none."""

    class Graph(graph_class):  # type: ignore[misc]
        def __init__(self, pool: Any = None) -> None:
            self.graph_pool = pool

        def capture_begin(self) -> None:
            graph_class.capture_begin.__wrapped__(self, self.graph_pool)  # type: ignore[attr-defined]

    captures.install(Graph)
    keys = []
    for pool in ((0, 5), (0, 5), None, None):
        graph = Graph(pool)
        graph.capture_begin()
        assert registry.running() == 1
        keys.append(registry.pool_of(machine.last))
        graph.capture_end()
        assert registry.running() == 0
    assert keys[0] == keys[1] == (0, 5)
    assert len({keys[0], keys[2], keys[3]}) == 3


@pytest.mark.skipif(not hasattr(torch.accelerator, "Graph"), reason="torch before 2.12")
def test_torchs_accelerator_graph_is_as_we_think() -> None:
    graph_class: Any = torch.accelerator.Graph
    assert list(inspect.signature(graph_class.capture_begin).parameters) == ["self"]
    assert "graph_pool" in inspect.getsource(graph_class.__init__)


def test_it_says_that_graphs_died(registry: Registry, graph_class: type) -> None:
    graph = graph_class()
    graph.capture_begin()
    graph.capture_end()
    assert not registry.dead
    del graph
    gc.collect()
    assert registry.dead
    registry.running()
    assert not registry.dead
