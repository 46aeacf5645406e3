"""The state machine: everything that engines do, in any order, with the invariants of DESIGN.md.

The universe is small (three streams, two threads, two ops, a device that is full after some
sixty pages), so that whatever can be reused is reused soon.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Hashable
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from .engine import NEEDS, OPS, Engine, Fetched
from .memory import PAGE, Violation
from .policy import Policy
from .world import Capture, CaptureInvalid, Graph, World

LIMIT = 64 * PAGE
STREAMS = 3
THREADS = 2

ops = st.sampled_from(OPS)
needs = st.sampled_from(NEEDS)
modes = st.sampled_from(["global", "thread_local", "relaxed"])
numbers = st.integers(0, 5)
# A thread and the stream that is current on it.
places = st.integers(0, STREAMS * THREADS - 1)


def forget_frames(error: BaseException | None) -> None:
    """Drop what the frames of a handled error still refer to.

    They make cycles, and a plan in a cycle dies when Python's collector happens to run: no
    sequence would be repeatable. Cycles are tested on purpose, see ``clear_plans``.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


class Machine(RuleBasedStateMachine):
    """Subclasses say which policy runs."""

    policy_over: ClassVar[Callable[[World], Policy]]

    def __init__(self) -> None:
        super().__init__()
        self.world = World(LIMIT, STREAMS, THREADS)
        self.policy = type(self).policy_over(self.world)
        self.engine = Engine(self.world, self.policy)
        self.pools: list[Hashable] = [("pool", number) for number in range(2)]
        self.fetched: list[Fetched] = []

    def teardown(self) -> None:
        self.world.judges_unloads = False
        self.policy.close()

    # -- ops ------------------------------------------------------------------------------------

    def attempt(self, step: Callable[[], object]) -> bool:
        """Run ``step``; false if it was refused."""
        self.world.failed.clear()
        try:
            step()
        except (CaptureInvalid, *self.policy.refusals) as refusal:
            forget_frames(refusal)
            return False
        finally:
            self.world.fuse = None
        return True

    def run(self, op: str, need: int, fetched: Fetched | None = None) -> None:
        self.attempt(lambda: self.engine.call(op, need, fetched))

    def go(self, place: int) -> bool:
        """Continue on one of the threads and streams; false if that stream captures."""
        self.world.thread = self.world.threads[place // STREAMS]
        self.world.thread.stream = self.world.streams[place % STREAMS]
        return self.world.stream.capture is None

    @rule(op=ops, need=needs, place=places)
    def call(self, op: str, need: int, place: int) -> None:
        self.go(place)
        self.run(op, need)

    @precondition(lambda self: self.engine.plans)
    @rule(at=numbers, place=places)
    def call_planned(self, at: int, place: int) -> None:
        """A shape that was called before: the only kind that a capture can take."""
        self.go(place)
        self.run(*list(self.engine.plans)[at % len(self.engine.plans)])

    @precondition(lambda self: self.world.captures and self.engine.plans)
    @rule(capture=numbers, branch=numbers, at=numbers, thread=st.integers(0, THREADS - 1))
    def call_in_capture(self, capture: int, branch: int, at: int, thread: int) -> None:
        """On a branch of a capture, from the thread that began it or from another one."""
        streams = list(self._capture(capture).before)
        self.go(thread * STREAMS + streams[branch % len(streams)].place)
        self.run(*list(self.engine.plans)[at % len(self.engine.plans)])

    @precondition(lambda self: self.world.captures)
    @rule(capture=numbers, branch=numbers, place=places)
    def fork(self, capture: int, branch: int, place: int) -> None:
        streams = list(self._capture(capture).before)
        if self.go(place):
            self.engine.order(streams[branch % len(streams)], self.world.stream)

    @rule(op=ops, need=needs, calls=st.integers(0, 4), place=places)
    def call_with_failing_driver(self, op: str, need: int, calls: int, place: int) -> None:
        self.go(place)
        self.world.fuse = calls
        self.run(op, need)

    @rule(op=ops, place=places)
    def fetch(self, op: str, place: int) -> None:
        """An op has its workspace and is not launched yet; a capture may begin in between."""
        self.go(place)
        self.attempt(lambda: self.fetched.append(self.engine.fetch(op)))

    @precondition(lambda self: self.fetched)
    @rule(at=numbers, need=needs)
    def call_with_fetched(self, at: int, need: int) -> None:
        fetched = self.fetched.pop(at % len(self.fetched))
        if fetched.stream not in self.world.streams:
            return
        self.go(fetched.stream.place)
        # Its stream's, or a pool's whose replays this one is then ordered with.
        if self.engine.may_use(fetched):
            self.run(fetched.op, need, fetched)

    @rule(op=ops, need=needs, place=places)
    def autotune(self, op: str, need: int, place: int) -> None:
        """The autotuner passes a clone, which is of the allocator and nobody's lane."""
        if self.go(place):
            self.attempt(lambda: self.engine.call_with_clone(op, need))

    @rule(thread=numbers)
    def exit_thread(self, thread: int) -> None:
        ended = self.world.threads[thread % THREADS]
        if not any(capture.thread is ended for capture in self.world.captures):
            self.world.exit_thread(ended)

    @rule(place=places)
    def replace_stream(self, place: int) -> None:
        if self.go(place) and self.world.stream.place and self.policy.knows_streams:
            self.world.replace_stream(self.world.stream)

    @precondition(lambda self: not self.world.captures)
    @rule()
    def settle(self) -> None:
        self.engine.settle()
        left = {code.name for code in self.world.loaded() - self.engine.plans_needed()}
        if left and self.policy.releases:
            raise Violation(f"plans {left} outlive every graph that captured them")
        if self.policy.lanes() > len(self.engine.ledger.places):
            raise Violation(
                f"{self.policy.lanes()} workspaces are in use, wanted: those of "
                f"{list(self.engine.ledger.places)}"
            )

    @rule(first=numbers, then=numbers)
    def order(self, first: int, then: int) -> None:
        """One stream waits for another, outside captures or within one (a join)."""
        earlier = self.world.streams[first % STREAMS]
        later = self.world.streams[then % STREAMS]
        if earlier.capture is later.capture:
            self.engine.order(earlier, later)

    # -- captures and graphs --------------------------------------------------------------------

    @rule(pool=numbers, mode=modes, place=places)
    def begin(self, pool: int, mode: str, place: int) -> None:
        """Into a pool (a tuple or a MemPool), that of an earlier graph, or one of its own."""
        pools = self._pools()
        if self.go(place):
            self.engine.begin(pools[pool % len(pools)], mode, known=True)

    def _pools(self) -> list[Hashable]:
        return [*self.pools, None, *(graph.pool for graph in self.world.graphs if graph.known)]

    @rule(mode=modes, place=places)
    def begin_unseen(self, mode: str, place: int) -> None:
        """Through the driver, or before the package was imported."""
        if self.go(place):
            self.engine.begin(None, mode, known=False)

    @rule(
        place=places,
        pool=numbers,
        op=ops,
        sizes=st.lists(needs, min_size=1, max_size=3, unique=True),
        fork=st.booleans(),
    )
    def capture_sizes(self, place: int, pool: int, op: str, sizes: list[int], fork: bool) -> None:
        """What engines do most, in one step: for each size warm up, then capture a call.

        All into one pool, in any order of sizes; with ``fork`` on two branches. Then each is
        replayed once.
        """
        if not self.go(place):
            return
        pools = self._pools()
        chosen = pools[pool % len(pools)]
        here = self.world.stream
        side = next((s for s in self.world.streams if s is not here and s.capture is None), here)
        graphs = []
        for need in sizes:
            self.run(op, need)
            capture = self.engine.begin(chosen, "global", known=True)
            if fork:
                self.engine.order(here, side)
            for stream in (here, side) if fork and side is not here else (here,):
                self.world.thread.stream = stream
                self.run(op, need)
            self.world.thread.stream = here
            self.engine.end(capture)
            graphs.append(capture.graph)
        for graph in graphs:
            if graph.ready:
                self._replay(graph, place)

    @precondition(lambda self: self.engine.plans)
    @rule(place=places, at=numbers, captured=st.booleans())
    def capture_with_fetched(self, place: int, at: int, captured: bool) -> None:
        """A graph uses a workspace that was fetched before: of the stream, or of a graph.

        The one that it was fetched for goes first, the stream or that graph.
        """
        if not self.go(place):
            return
        key = list(self.engine.plans)[at % len(self.engine.plans)]
        former = self.engine.begin(None, "global", known=True) if captured else None
        before = len(self.fetched)
        self.fetch(key[0], place)
        if former is not None:
            self.engine.end(former)
        capture = self.engine.begin(None, "global", known=True)
        if len(self.fetched) > before:
            self.run(*key, self.fetched.pop())
        self.engine.end(capture)
        if former is not None:
            self.engine.destroy(former.graph)
        else:
            self.replace_stream(place)

    @precondition(lambda self: self.world.captures)
    @rule(at=numbers)
    def end(self, at: int) -> None:
        self.engine.end(self._capture(at))

    @precondition(lambda self: self.world.captures)
    @rule(at=numbers)
    def abort(self, at: int) -> None:
        """Something of the engine's own ends the capture."""
        self._capture(at).valid = False

    def _capture(self, at: int) -> Capture:
        return self.world.captures[at % len(self.world.captures)]

    @precondition(lambda self: self.ready)
    @rule(at=numbers, place=places)
    def replay(self, at: int, place: int) -> None:
        self._replay(self.ready[at % len(self.ready)], place)

    @precondition(lambda self: self.ready)
    @rule(place=places)
    def replay_all(self, place: int) -> None:
        """Every graph, on the streams in turn."""
        for step, graph in enumerate(self.ready):
            self._replay(graph, (place + step) % (STREAMS * THREADS))

    @property
    def ready(self) -> list[Graph]:
        return [graph for graph in self.world.graphs if graph.ready]

    def _replay(self, graph: Graph, place: int) -> None:
        self.go(place)
        if self.engine.can_replay(graph):
            self.engine.replay(graph)

    @precondition(lambda self: self.finished)
    @rule(at=numbers)
    def destroy(self, at: int) -> None:
        self.engine.destroy(self.finished[at % len(self.finished)])

    @property
    def finished(self) -> list[Graph]:
        """Graphs that are not being captured: ready ones, and what is left of spoilt ones."""
        capturing = {capture.graph for capture in self.world.captures}
        return [graph for graph in self.world.graphs if graph not in capturing]

    @rule(at=numbers)
    def destroy_pool(self, at: int) -> None:
        """Every graph of a pool and the pool's handle."""
        pool = self.pools[at % len(self.pools)]
        for graph in self.finished:
            if graph.pool == pool:
                self.engine.destroy(graph)
        self.pools[at % len(self.pools)] = ("pool", self.world.number())

    # -- memory and plans -----------------------------------------------------------------------

    @rule(how=st.sampled_from(["now", "into cycles", "cycles only"]))
    def clear_plans(self, how: str) -> None:
        """The builder's cache is emptied, or Python collects cycles: at whatever moment."""
        if how == "cycles only":
            self.engine.garbage.clear()
            return
        if how == "into cycles":
            self.engine.garbage += self.engine.plans.values()
        self.engine.plans.clear()

    @rule(place=places)
    def overflow(self, place: int) -> None:
        """So many shapes that none of the present ones stays in the builder's cache."""
        if not self.go(place):
            return
        for op in OPS:
            for need in NEEDS:
                self.attempt(lambda op=op, need=need: self.engine.plan(op, need))

    @rule(nbytes=st.integers(1, 6 * PAGE), place=places, keep=st.booleans())
    def make_tensor(self, nbytes: int, place: int, keep: bool) -> None:
        self.go(place)
        self.engine.make_tensor(nbytes)
        if not keep:
            self.engine.drop_tensor()

    @rule()
    def sit_on_memory(self) -> None:
        """The allocator takes most of the device and nobody uses it."""
        self.engine.make_tensor(self.world.driver.limit - self.world.driver.used - PAGE)
        self.engine.drop_tensor()

    @precondition(lambda self: not self.world.captures)
    @rule()
    def empty_cache(self) -> None:
        self.world.empty_cache()

    @rule(nbytes=needs, lanes=st.integers(1, 2), place=places)
    def reserve(self, nbytes: int, lanes: int, place: int) -> None:
        self.go(place)
        self.attempt(lambda: self.engine.reserve(nbytes, lanes))

    @rule(nbytes=needs, place=places, clear=st.booleans())
    def use_buffer(self, nbytes: int, place: int, clear: bool) -> None:
        """The release's own cache, which engines clear when they like."""
        self.go(place)
        if clear:
            self.policy.clear_buffers()
        self.attempt(lambda: self.engine.use_buffer(nbytes))

    @rule(sealed=st.sampled_from([False, False, True]))
    def seal(self, sealed: bool) -> None:
        self.policy.seal(sealed)

    # -- what holds after every step ------------------------------------------------------------

    @invariant()
    def check(self) -> None:
        """Besides what the world itself checks at each launch and replay."""
        self.world.check()
        if any(thread.relaxed for thread in self.world.threads):
            raise Violation("a thread is left in RELAXED mode")
        room = self.policy.room(self.engine.ledger.longest)
        if room is not None:
            self.engine.ledger.check_bytes(room)
        driver = self.world.driver
        empty = [start for start in driver.ranges if start not in driver.live]
        if len(empty) > 1:  # one may wait for the next try
            raise Violation(f"{len(empty)} ranges are reserved and empty")
