"""What an engine does: call ops, cache plans, capture and replay, within the written contracts.

The contracts are the caller's part, so the engine keeps them and the machine need not: graphs of
one pool are not replayed at once (PyTorch documents it), a branch is joined before its capture
ends, a graph that uses a workspace fetched before its capture is ordered with that workspace's
other users.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import torch

from .ledger import Ledger
from .memory import PAGE, Allocation, OutOfMemory, Violation, tensor_at
from .policy import Policy
from .world import Capture, CaptureInvalid, Code, Event, Graph, Plan, Stream, World

T = TypeVar("T")

OPS = ("bmm_fp8_workspace", "mm_fp4_workspace")
# Whose workspace a caller's own tensor that is too short is replaced by.
GENERIC = "gemm_workspace"
# The length that every op is handed, and what its plans need.
LENGTH = 2 * PAGE
NEEDS = (PAGE, 3 * PAGE, 5 * PAGE)
# Plans that a builder's cache keeps.
PLANS = 3


@dataclass(frozen=True)
class Fetched:
    """A workspace in the hands of an op, and whose it is: a stream's or a pool's."""

    op: str
    tensor: torch.Tensor
    key: Hashable
    stream: Stream
    user: Hashable
    graph: Graph | None


class Engine:
    def __init__(self, world: World, policy: Policy) -> None:
        self.world = world
        self.policy = policy
        self.ledger = Ledger(world)
        self.plans: OrderedDict[tuple[str, int], Plan] = OrderedDict()
        # Plans that left the cache but sit in a reference cycle: Python frees them when it likes.
        self.garbage: list[Plan] = []
        self.tensors: list[Allocation] = []
        self._last_replay: dict[Hashable, Event] = {}
        self.graphs: list[Graph] = []
        self._users: dict[Graph, set[Hashable]] = {}

    # -- calls of the policy --------------------------------------------------------------------

    def ask(self, call: Callable[[], T], whole: bool = True) -> T:
        """``call`` of the policy, which must have a reason to refuse and then changes nothing.

        Not ``whole``: one that may have done a part of what was asked for.
        """
        before = self._state()
        try:
            return call()
        except self.policy.refusals as refusal:
            if not self.policy.is_fair(refusal):
                raise Violation(f"no reason for {refusal!r}") from refusal
            if whole and self._state() != before:
                raise Violation(f"{refusal!r} left {self._state()}, was {before}") from refusal
            raise

    def _state(self) -> tuple[object, ...]:
        """Bytes held, the capture and its nodes, and the capture modes."""
        world, capture = self.world, self.world.stream.capture
        return (
            world.held_bytes(),
            capture and (capture.valid, len(capture.graph.nodes)),
            [thread.relaxed for thread in world.threads],
        )

    def pool(self) -> Hashable:
        """What stands for the pool of the current stream's capture; ``None`` outside captures."""
        capture = self.world.stream.capture
        if capture is None:
            return None
        return "any" if self.policy.one_pool else capture.graph.pool

    def use(self, op: str, workspace: torch.Tensor) -> None:
        """Remember that the current stream was given ``workspace`` for ``op``."""
        self._use(self._key(op), workspace)

    def _key(self, op: str) -> Hashable:
        return self.policy.key(op, self.pool(), self.world.stream.identity)

    def _use(self, key: Hashable, workspace: torch.Tensor) -> None:
        self.ledger.use(key, workspace.data_ptr(), workspace.numel(), self.policy.moves())

    # -- ops ------------------------------------------------------------------------------------

    def plan(self, op: str, need: int) -> Plan:
        """From the builder's cache, or built. Eviction is by least recent use."""
        key = (op, need)
        plan = self.plans.get(key)
        if plan is None:

            def make() -> Plan:
                self.world.call("load")
                return Plan(self.world, f"{op}/{need}")

            plan = self.ask(lambda: self.policy.build(make))
            self.plans[key] = plan
            if len(self.plans) > PLANS:
                self.plans.popitem(last=False)
        self.plans.move_to_end(key)
        return plan

    def user(self) -> Hashable:
        """Who uses the workspaces of the current stream."""
        return self.world.stream if self.world.stream.capture is None else self.pool()

    def fetch(self, op: str) -> Fetched:
        stream = self.world.stream
        workspace = self.ask(lambda: self.policy.workspace(op, LENGTH))
        self.use(op, workspace)
        graph = stream.capture.graph if stream.capture else None
        return Fetched(op, workspace, self._key(op), stream, self.user(), graph)

    def call(self, op: str, need: int, fetched: Fetched | None = None) -> torch.Tensor:
        """One call of ``op``; returns the workspace that it was launched with."""
        plan = self.plan(op, need)
        if fetched is None:
            fetched = self.fetch(op)
        workspace = fetched.tensor

        def launch() -> None:
            nonlocal workspace
            short = workspace
            workspace = self.ask(lambda: self.policy.at_least(short, need))
            self._use(fetched.key if workspace is short else self._key(op), workspace)
            self._launch(workspace, need, plan)

        if self.world.stream.capture is not None:
            self.world.stream.capture.graph.codes.add(plan.code)
        self.policy.execute(plan, workspace, launch)
        if workspace is fetched.tensor and self.world.stream.capture:
            self._users[self.world.stream.capture.graph].add(fetched.user)
        return workspace

    def may_use(self, fetched: Fetched) -> bool:
        """Whether it is the current user's, or one that a graph can be ordered with for life."""
        if fetched.graph is not None and fetched.graph.destroyed:
            return False  # what it was fetched for is gone
        return fetched.user == self.user() or self.world.stream.capture is not None

    def call_with_clone(self, op: str, need: int) -> None:
        """As the autotuner does: the op gets a copy of its workspace, to start cold."""
        plan = self.plan(op, need)
        self.fetch(op)
        try:
            clone = self.world.allocate(LENGTH)
        except OutOfMemory:
            return
        tensor = tensor_at(clone.start, LENGTH)

        def launch() -> None:
            workspace = self.ask(lambda: self.policy.at_least(tensor, need))
            if need <= LENGTH and workspace is not tensor:
                raise Violation("a tensor of the caller's that is long enough was not used")
            if workspace is not tensor:
                self.use(GENERIC, workspace)
            self._launch(workspace, need, plan)

        try:
            self.policy.execute(plan, tensor, launch)
            if tensor.data_ptr() != clone.start or not clone.alive:
                raise Violation("a tensor of the caller's was moved")
        finally:
            self.world.allocator.free(clone)

    def _launch(
        self, workspace: torch.Tensor, nbytes: int, plan: Plan | None = None, shared: bool = False
    ) -> None:
        touch = self.world.touch(workspace.data_ptr(), nbytes, shared)
        for allocation in touch.allocations:
            if allocation.pool is not None:
                raise Violation(f"a workspace in {allocation} of graph pool {allocation.pool}")
        self.world.launch([touch], plan and plan.code)

    def use_buffer(self, nbytes: int) -> None:
        """A launch on a buffer of the release's cache, on whatever stream: all share it."""
        self.ledger.buffer = max(self.ledger.buffer, nbytes)
        buffer = self.ask(lambda: self.policy.buffer(nbytes))
        if buffer is not None:
            self._launch(buffer, nbytes, shared=True)

    # -- tensors of others ----------------------------------------------------------------------

    def make_tensor(self, nbytes: int) -> None:
        """A tensor of the allocator that is written to at once, if there is room."""
        try:
            tensor = self.world.allocate(nbytes)
        except OutOfMemory:
            return
        self.tensors.append(tensor)
        with suppress(CaptureInvalid):
            self.world.launch([self.world.touch(tensor.start, nbytes)])

    def drop_tensor(self) -> None:
        """The last one that is left."""
        if self.tensors:
            self.world.allocator.free(self.tensors.pop())

    # -- captures and graphs --------------------------------------------------------------------

    def begin(self, pool: Hashable, mode: str, known: bool) -> Capture:
        if known:
            self.policy.before_capture()
            if not any(capture.known for capture in self.world.captures):
                self.ledger.collected()
        capture = self.world.begin(pool, mode, known)
        self.graphs.append(capture.graph)
        self._users[capture.graph] = {self.pool()}
        return capture

    def end(self, capture: Capture) -> bool:
        """Join all branches and end ``capture`` where it began; false if it was spoilt."""
        world = self.world
        thread, world.thread = world.thread, capture.thread
        stream, world.thread.stream = world.stream, capture.origin
        try:
            for branch in list(capture.before):
                self.order(branch, capture.origin)
            world.end(capture)
        except CaptureInvalid:
            return False
        finally:
            world.thread.stream, world.thread = stream, thread
        return True

    def order(self, first: Stream, then: Stream) -> None:
        """``then`` waits for what ``first`` has been given so far."""
        if first is not then:
            self.world.wait(self.world.record(first), then)

    def can_replay(self, graph: Graph) -> bool:
        """Not from, nor ordered with, a stream that captures."""
        users = self._users[graph]
        return self.world.stream.capture is None and not any(
            isinstance(user, Stream) and user.capture for user in users
        )

    def replay(self, graph: Graph) -> None:
        """Launch ``graph`` on the current stream, after the other users of what it uses."""
        world = self.world
        for user in self._users[graph]:
            if isinstance(user, Stream):
                self.order(user, world.stream)
            elif user in self._last_replay:
                world.wait(self._last_replay[user], world.stream)
        world.replay(graph)
        for user in self._users[graph]:
            if isinstance(user, Stream):
                self.order(world.stream, user)
            else:
                self._last_replay[user] = world.record(world.stream)

    def reserve(self, nbytes: int, lanes: int) -> None:
        self.ledger.reserved(nbytes, lanes)
        self.ask(lambda: self.policy.reserve(nbytes, lanes), whole=False)

    def settle(self) -> None:
        """Wait for everything and collect; then only what is needed is left."""
        self.world.synchronize()
        self.policy.collect()
        self.ledger.collected()

    def plans_needed(self) -> set[Code]:
        """Plans in the builder's cache, in cycles, and of graphs that are not gone."""
        needed = {plan.code for plan in (*self.plans.values(), *self.garbage)}
        for graph in self.graphs:
            if not self.ledger.is_gone(graph):
                needed |= graph.codes
        return needed

    def destroy(self, graph: Graph) -> None:
        del self._users[graph]
        self.world.destroy(graph)
