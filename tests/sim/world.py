"""The simulated machine: streams and events, threads, captures, graphs, plans.

It knows the rules of CUDA and nothing of the policy. *May run at once* is a happens-before
relation: each operation carries a bit mask of the operations that are ordered before it, by its
stream, by the events that the stream waited for, by the edges of its graph, or because the host
saw them finish. Two operations of which neither is before the other may overlap in time, and
then they must not touch the same byte.

Calls happen one at a time: the test interleaves threads between calls, never inside one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from .memory import Allocation, CachingAllocator, Driver, Violation


class CallFailed(Exception):
    """A driver call failed because the test wants it to."""


class CaptureInvalid(Exception):
    """The capture had been ended by an error before."""


@dataclass(eq=False)
class Code:
    """What an execution plan has on the device, and what a captured launch refers to."""

    name: str
    loaded: bool = True

    def __repr__(self) -> str:
        return f"plan {self.name}{'' if self.loaded else ' (unloaded)'}"


class Plan:
    """A plan as Python has it: its code is unloaded when the last reference goes."""

    def __init__(self, world: World, name: str) -> None:
        self.code = Code(name)
        self._world = world
        world.load(self.code)

    def __del__(self) -> None:
        self._world.unload(self.code)


@dataclass(eq=False)
class Tie:
    """A user object: released when the graph and its last replay are gone."""

    gone: bool = False

    def released(self) -> bool:
        return self.gone


@dataclass(frozen=True)
class Touch:
    """Bytes that a launch may write, and what was allocated there at that moment.

    ``temporary``: a tensor inside a graph's own pool. Its memory is the graph's for as long as
    the graph lives, even after the tensor is gone, so it has no allocation to compare with.
    ``shared``: the release itself shares these bytes between streams; only their life counts.
    """

    start: int
    size: int
    allocations: tuple[Allocation, ...]
    temporary: bool = False
    shared: bool = False

    def overlaps(self, other: Touch) -> bool:
        if self.shared or other.shared:
            return False
        return self.start < other.start + other.size and other.start < self.start + self.size


@dataclass(frozen=True)
class Operation:
    touches: tuple[Touch, ...]
    before: int
    what: str


@dataclass(frozen=True)
class Node:
    """A captured launch. ``before`` is a mask over the nodes of its graph."""

    touches: tuple[Touch, ...]
    code: Code | None
    before: int
    what: str


@dataclass(eq=False)
class Stream:
    """``handle`` may come back after destruction, ``identity`` never does.

    The one at place 0 is the default stream, which is there for good; its handle is 0.
    """

    place: int
    identity: int
    before: int = 0
    capture: Capture | None = None

    @property
    def handle(self) -> int:
        """A pointer, so never one of the driver's names of streams (1 and 2)."""
        return 64 * self.place


@dataclass(eq=False)
class Thread:
    number: int
    stream: Stream
    relaxed: int = 0


@dataclass(frozen=True)
class Event:
    before: int
    capture: Capture | None


@dataclass(eq=False)
class Graph:
    """What a capture makes. Lives until destroyed; its ties until its last replay ended too."""

    number: int
    pool: Hashable
    known: bool
    nodes: list[Node] = field(default_factory=list)
    # Code of the plans that were to be captured, also of launches that were then refused.
    codes: set[Code] = field(default_factory=set)
    ready: bool = False
    destroyed: bool = False
    # Destroyed, and its last replay has ended.
    released: bool = False
    # A tie to it failed: what it needs cannot be given back any more.
    untied: bool = False
    # Operations of replays so far: a graph never runs at once with itself.
    replays: int = 0
    ties: list[Tie] = field(default_factory=list)


@dataclass(eq=False)
class Capture:
    """``known``: whether it began through a door that the policy watches."""

    identity: int
    graph: Graph
    origin: Stream
    thread: Thread
    mode: str
    known: bool
    # Nodes ordered before the next launch of each stream that takes part.
    before: dict[Stream, int] = field(default_factory=dict)
    valid: bool = True


def bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class World:
    """One device and the threads that use it."""

    def __init__(self, limit: int, streams: int, threads: int) -> None:
        self.driver = Driver(limit)
        self.allocator = CachingAllocator(self.driver)
        self._identity = 0
        self.streams = [Stream(place, self.number()) for place in range(streams)]
        self.threads = [Thread(number, self.streams[0]) for number in range(threads)]
        self.thread = self.threads[0]
        self.operations: list[Operation] = []
        self.done = 0
        self.captures: list[Capture] = []
        self.graphs: list[Graph] = []
        # Calls until one fails; None: none does. Names of those that did.
        self.fuse: int | None = None
        self.failed: list[str] = []
        # Whether unloading a plan during a capture is wrong: not for one policy of old, nor when
        # the test is over.
        self.judges_unloads = True
        self._dying: list[Graph] = []
        self._codes: list[Code] = []
        self._wrong: Violation | None = None

    def number(self) -> int:
        """One that was never given before."""
        self._identity += 1
        return self._identity

    @property
    def stream(self) -> Stream:
        return self.thread.stream

    def stream_at(self, handle: int) -> Stream:
        return self.streams[handle // 64]

    def graph_at(self, number: int) -> Graph:
        return next(graph for graph in self.graphs if graph.number == number)

    def allocate(self, nbytes: int) -> Allocation:
        """A block of torch's allocator for the current stream, of its graph's pool if any."""
        stream = self.stream
        pool = stream.capture.graph.pool if stream.capture else None
        retry = None if self.captures else self.empty_cache
        return self.allocator.allocate(nbytes, stream.identity, pool, retry)

    def empty_cache(self) -> None:
        """``torch.cuda.empty_cache()``: idle blocks go back, also of pools without a graph now.

        The driver waits for the device before it frees.
        """
        self._finish()
        self.allocator.release(keep=self.pools)

    @property
    def pools(self) -> set[Hashable]:
        """Pools that have a graph."""
        return {graph.pool for graph in self.graphs}

    def exit_thread(self, thread: Thread) -> None:
        """``thread`` ends, and another one starts in its place."""
        self.threads[thread.number] = Thread(thread.number, self.streams[0])
        if self.thread is thread:
            self.thread = self.threads[thread.number]

    def replace_stream(self, stream: Stream) -> None:
        """``stream`` is destroyed, and the next one gets its handle; its work goes on."""
        assert stream.place, "the default stream is never destroyed"
        fresh = Stream(stream.place, self.number())
        self.streams[stream.place] = fresh
        for thread in self.threads:
            if thread.stream is stream:
                thread.stream = fresh

    def held_bytes(self) -> int:
        """What was taken from the driver past the allocator."""
        return sum(a.size for a in self.driver.live.values() if a.kind != "torch")

    # -- driver calls ---------------------------------------------------------------------------

    def call(
        self, name: str, *, unsafe: bool = True, frees: bool = False, may_fail: bool = True
    ) -> None:
        """Every driver call that the policy causes passes here first, and may fail here.

        ``unsafe``: one that ends captures which forbid it. ``frees``: one that gives memory or
        code back, which the design forbids during a capture in any mode.
        """
        for capture in self.captures:
            if capture.valid and unsafe and not self.thread.relaxed:
                own = capture.thread is self.thread
                if capture.mode == "global" or (capture.mode == "thread_local" and own):
                    raise Violation(f"{name} ends capture {capture.identity} ({capture.mode})")
            if frees and capture.known:
                raise Violation(f"{name} during capture {capture.identity}")
        if may_fail and self.fuse is not None:
            self.fuse -= 1
            if self.fuse < 0:
                self.fuse = None
                self.failed.append(name)
                raise CallFailed(name)

    @contextmanager
    def relaxed(self) -> Iterator[None]:
        thread = self.thread
        thread.relaxed += 1
        try:
            yield
        finally:
            thread.relaxed -= 1

    def load(self, code: Code) -> None:
        self._codes.append(code)

    def loaded(self) -> set[Code]:
        return {code for code in self._codes if code.loaded}

    def unload(self, code: Code) -> None:
        """From a destructor, which cannot raise: what it did wrong is told by :meth:`check`."""
        code.loaded = False
        if not self.judges_unloads:
            return
        try:
            # Not judged against captures that began unseen: nobody could have waited for them.
            self.call(f"unload of {code.name}", unsafe=False, frees=True, may_fail=False)
        except Violation as violation:
            # Not with its frames: they would keep alive whatever the destructor interrupted.
            self._wrong = self._wrong or violation.with_traceback(None)

    def check(self) -> None:
        """Raise what a destructor could not."""
        if self._wrong is not None:
            raise self._wrong

    # -- order ----------------------------------------------------------------------------------

    @property
    def _all(self) -> int:
        return (1 << len(self.operations)) - 1

    def record(self, stream: Stream) -> Event:
        """An event on ``stream``."""
        if stream.capture is not None:
            return Event(stream.capture.before[stream], stream.capture)
        return Event(stream.before, None)

    def wait(self, event: Event, stream: Stream) -> None:
        """``stream`` waits for ``event``, and so joins the capture of the event."""
        if event.capture is None:
            assert stream.capture is None, "a captured stream cannot wait for an outside event"
            stream.before |= event.before
            return
        assert stream.capture in (None, event.capture), "two captures cannot merge"
        stream.capture = event.capture
        before = event.capture.before
        before[stream] = before.get(stream, 0) | event.before

    def synchronize(self) -> None:
        """Wait for the whole device."""
        assert not self.captures, "a device with a capture cannot be waited for"
        self._finish()

    def finish(self, stream: Stream) -> None:
        """Wait for one stream."""
        self.done |= stream.before
        self._release_ties()

    def _finish(self) -> None:
        self.done = self._all
        self._release_ties()

    # -- launches -------------------------------------------------------------------------------

    def touch(self, start: int, size: int, shared: bool = False) -> Touch:
        """The bytes as they are allocated now."""
        allocations = self.driver.under(start, size)
        for allocation in allocations:
            if allocation.kind != "torch" and not allocation.zeroed:
                raise Violation(f"{allocation} is used before it was zeroed")
        pool = self.stream.capture.graph.pool if self.stream.capture else None
        temporary = pool is not None and all(a.pool == pool for a in allocations)
        return Touch(start, size, allocations, temporary, shared)

    def launch(self, touches: Iterable[Touch], code: Code | None = None) -> None:
        """A kernel on the current stream: runs, or becomes a node of the stream's capture."""
        stream, touches = self.stream, tuple(touches)
        if code is not None and not code.loaded:
            raise Violation(f"{code} is launched")
        capture = stream.capture
        if capture is None:
            what = f"a launch on stream {stream.handle}"
            stream.before |= 1 << self._run(touches, stream.before, what)
            return
        if not capture.valid:
            raise CaptureInvalid(str(capture.identity))
        nodes = capture.graph.nodes
        what = f"node {len(nodes)} of graph {capture.graph.number}"
        nodes.append(Node(touches, code, capture.before[stream], what))
        capture.before[stream] |= 1 << (len(nodes) - 1)

    def _run(self, touches: tuple[Touch, ...], before: int, what: str) -> int:
        number = len(self.operations)
        for other in bits(self._all & ~before & ~self.done):
            for theirs in self.operations[other].touches:
                if any(mine.overlaps(theirs) for mine in touches):
                    raise Violation(
                        f"{what} and {self.operations[other].what} may run at once and share "
                        f"bytes of {theirs.allocations}"
                    )
        self.operations.append(Operation(touches, before, what))
        return number

    # -- captures and graphs --------------------------------------------------------------------

    def begin(self, pool: Hashable, mode: str, known: bool) -> Capture:
        """The current stream captures from here on."""
        assert self.stream.capture is None
        number = self.number()
        graph = Graph(number, pool if pool is not None else ("own", number), known)
        capture = Capture(self.number(), graph, self.stream, self.thread, mode, known)
        capture.before[self.stream] = 0
        self.stream.capture = capture
        self.captures.append(capture)
        self.graphs.append(graph)
        return capture

    def end(self, capture: Capture) -> None:
        """End ``capture``; raises CaptureInvalid if an error or a stray branch spoilt it."""
        nodes = (1 << len(capture.graph.nodes)) - 1
        joined = capture.before[capture.origin] == nodes
        for stream in capture.before:
            stream.capture = None
        self.captures.remove(capture)
        if not (capture.valid and joined):
            raise CaptureInvalid(str(capture.identity))
        capture.graph.ready = True

    def replay(self, graph: Graph) -> None:
        """Launch ``graph`` on the current stream."""
        assert graph.ready
        assert not graph.destroyed
        stream = self.stream
        assert stream.capture is None
        for node in graph.nodes:
            if node.code is not None and not node.code.loaded:
                raise Violation(f"a replay runs {node.code}")
            for touch in node.touches:
                freed = [a for a in touch.allocations if not a.alive]
                if freed and not touch.temporary:
                    raise Violation(f"a replay of {node.what} touches {freed}")
        first = len(self.operations)
        before = stream.before | graph.replays
        for node in graph.nodes:
            self._run(node.touches, before | node.before << first, f"a replay of {node.what}")
        graph.replays |= self._all & ~((1 << first) - 1)
        stream.before |= graph.replays

    def destroy(self, graph: Graph) -> None:
        """The graph object dies; replays that run go on to their end."""
        assert not graph.destroyed
        graph.destroyed = True
        self.graphs.remove(graph)
        self._dying.append(graph)
        self._release_ties()

    def _release_ties(self) -> None:
        for graph in [g for g in self._dying if not g.replays & ~self.done]:
            self._dying.remove(graph)
            graph.released = True
            for tie in graph.ties:
                tie.gone = True
