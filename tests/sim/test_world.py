"""The simulated device itself: what it must find, and what it must let pass."""

from __future__ import annotations

import pytest

from .memory import PAGE, Allocation, CachingAllocator, Driver, OutOfMemory, Violation, tensor_at
from .world import CaptureInvalid, Graph, Plan, Tie, World


@pytest.fixture
def world() -> World:
    return World(limit=32 * PAGE, streams=3, threads=2)


def block(world: World, pages: int = 1) -> Allocation:
    allocation = world.driver.allocate(pages * PAGE)
    allocation.zeroed = True
    return allocation


def launch(world: World, stream: int, allocation: Allocation) -> None:
    world.thread.stream = world.streams[stream]
    world.launch([world.touch(allocation.start, allocation.size)])


def order(world: World, first: int, then: int) -> None:
    world.wait(world.record(world.streams[first]), world.streams[then])


def captured(world: World, *allocations: Allocation) -> Graph:
    """A graph with one launch on each of ``allocations``, on branches that are joined."""
    world.thread.stream = world.streams[0]
    capture = world.begin(("pool", 0), "global", known=True)
    order(world, 0, 1)
    for stream, allocation in enumerate(allocations):
        launch(world, stream, allocation)
    order(world, 1, 0)
    world.end(capture)
    world.thread.stream = world.streams[0]
    return capture.graph


# Memory. -----------------------------------------------------------------------------------------


def test_the_last_freed_block_comes_first_and_is_another_allocation() -> None:
    allocator = CachingAllocator(Driver(32 * PAGE))
    first, second = (allocator.allocate(PAGE, stream=0) for _ in range(2))
    allocator.free(first)
    allocator.free(second)
    again = allocator.allocate(PAGE, stream=0)
    assert (again.start, again.number) == (second.start, 3)
    assert not second.alive


def test_idle_blocks_are_of_their_stream_and_pool_and_the_driver_cannot_see_them() -> None:
    allocator = CachingAllocator(Driver(2 * PAGE))
    allocator.free(allocator.allocate(2 * PAGE, stream=0, pool="p"))
    for stream, pool in ((0, None), (1, "p")):
        with pytest.raises(OutOfMemory):
            allocator.allocate(PAGE, stream, pool)
    allocator.release(keep={"p"})
    assert allocator.driver.used == 2 * PAGE
    allocator.release(keep=())
    assert allocator.driver.used == 0


def test_a_mapped_range_does_not_move_and_is_mapped_once() -> None:
    driver = Driver(4 * PAGE)
    start = driver.reserve(8 * PAGE)
    driver.map(start, PAGE)
    driver.map(start + PAGE, PAGE)
    assert [a.size for a in driver.under(start, 2 * PAGE)] == [PAGE, PAGE]
    with pytest.raises(Violation, match="mapped twice"):
        driver.map(start, PAGE)
    with pytest.raises(Violation, match="outside every reserved range"):
        driver.map(start + 8 * PAGE, PAGE)
    with pytest.raises(Violation, match="nothing is allocated"):
        driver.under(start, 3 * PAGE)


def test_an_owned_tensor_is_freed_with_its_last_view() -> None:
    freed: list[bool] = []
    start = Driver(PAGE).allocate(PAGE).start
    tensor = tensor_at(start, PAGE, lambda: freed.append(True))
    view = tensor[:3]
    assert view.data_ptr() == start
    del tensor
    assert not freed
    del view
    assert freed


# Order. ------------------------------------------------------------------------------------------


def test_two_streams_that_share_bytes_need_an_order(world: World) -> None:
    shared = block(world)
    launch(world, 0, shared)
    launch(world, 0, shared)
    with pytest.raises(Violation, match="may run at once"):
        launch(world, 1, shared)
    order(world, 0, 2)
    launch(world, 2, shared)  # ordered with stream 0
    world.synchronize()
    launch(world, 1, shared)  # after all of it


def test_branches_of_a_graph_and_two_graphs_may_run_at_once(world: World) -> None:
    shared, other = block(world), block(world)
    world.replay(captured(world, other, shared))
    with pytest.raises(Violation, match="may run at once"):
        world.replay(captured(world, shared, shared))
    world.synchronize()
    first, second = captured(world, shared), captured(world, shared)
    world.replay(first)
    world.replay(second)  # the same stream
    world.thread.stream = world.streams[1]
    with pytest.raises(Violation, match="may run at once"):
        world.replay(second)
    order(world, 0, 1)
    world.replay(second)


def test_a_graph_is_never_at_once_with_itself(world: World) -> None:
    graph = captured(world, block(world))
    for stream in world.streams:
        world.thread.stream = stream
        world.replay(graph)


# Life. -------------------------------------------------------------------------------------------


def test_a_replay_needs_what_was_captured_even_at_the_same_address(world: World) -> None:
    old = block(world)
    graph = captured(world, old)
    world.replay(graph)
    world.driver.free(old)
    assert block(world).start == old.start
    with pytest.raises(Violation, match="freed"):
        world.replay(graph)


def test_a_replay_needs_its_plans(world: World) -> None:
    plan = Plan(world, "plan")
    capture = world.begin(None, "global", known=True)
    world.launch([], plan.code)
    world.end(capture)
    del plan
    with pytest.raises(Violation, match="unloaded"):
        world.replay(capture.graph)


def test_a_tie_outlives_the_graph_until_its_last_replay_ends(world: World) -> None:
    graph, tie = captured(world, block(world)), Tie()
    graph.ties.append(tie)
    world.replay(graph)
    world.destroy(graph)
    assert not tie.released()
    world.synchronize()
    assert tie.released()


def test_nothing_is_unloaded_during_a_capture(world: World) -> None:
    plan = Plan(world, "plan")
    world.begin(None, "relaxed", known=True)
    del plan
    with pytest.raises(Violation, match="unload"):
        world.check()


# Captures. ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "thread", "ends"),
    [
        ("global", 0, True),
        ("global", 1, True),
        ("thread_local", 0, True),
        ("thread_local", 1, False),
        ("relaxed", 0, False),
    ],
)
def test_an_unsafe_call_ends_captures_unless_it_is_relaxed(
    world: World, mode: str, thread: int, ends: bool
) -> None:
    world.begin(None, mode, known=True)
    world.thread = world.threads[thread]
    with world.relaxed():
        world.call("map")
    if ends:
        with pytest.raises(Violation, match="ends capture"):
            world.call("map")
    else:
        world.call("map")


def test_a_branch_that_is_not_joined_spoils_the_capture(world: World) -> None:
    capture = world.begin(None, "global", known=True)
    order(world, 0, 1)
    launch(world, 1, block(world))
    with pytest.raises(CaptureInvalid):
        world.end(capture)
    assert world.streams[1].capture is None
