"""Policies of the releases and of discarded drafts, one defect each, for the machine to find.

Each differs from :class:`Kept`, which is wasteful and right, in a single method. So what the
machine reports is that defect and not another one of the same policy.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from .memory import Allocation, OutOfMemory, tensor_at
from .policy import Policy
from .world import CallFailed, Plan, World


class Refused(Exception):
    """No plan builds under capture."""


class Kept(Policy):
    """A block per (pool or nothing, stream, op), outgrown blocks and plans kept for ever."""

    releases = False
    refusals = (Refused, CallFailed, OutOfMemory)

    def __init__(self, world: World) -> None:
        self.world = world
        self.blocks: dict[Hashable, Allocation] = {}
        self.ops: dict[int, str] = {}  # address -> op of the block there
        self.plans: list[Plan] = []

    def lane(self, op: str) -> Hashable:
        capture = self.world.stream.capture
        pool = capture.graph.pool if capture else None
        return pool, self.world.stream.identity, op

    def grow(self, key: Hashable, nbytes: int) -> None:
        # Not through the allocator: a captured first use must not land in the graph's pool.
        block = self.world.driver.allocate(nbytes)
        block.zeroed = True
        self.blocks[key] = block

    def workspace(self, op: str, nbytes: int) -> torch.Tensor:
        key = self.lane(op)
        if key not in self.blocks or self.blocks[key].size < nbytes:
            self.grow(key, nbytes)
        start = self.blocks[key].start
        self.ops[start] = op
        return tensor_at(start, nbytes)

    def at_least(self, workspace: torch.Tensor, nbytes: int) -> torch.Tensor:
        if workspace.numel() >= nbytes:
            return workspace
        return self.workspace(self.ops.get(workspace.data_ptr(), "generic"), nbytes)

    def build(self, make: Callable[[], Plan]) -> Plan:
        if self.world.stream.capture is not None:
            raise Refused
        with self.world.relaxed():
            plan = make()
        self.hold(plan)
        return plan

    def hold(self, plan: Plan) -> None:
        self.plans.append(plan)

    def execute(self, plan: Plan, workspace: torch.Tensor, launch: Callable[[], None]) -> None:
        launch()


class Resized(Kept):
    """``workspace.resize_(n)``: the tensor moves, and the allocator gets the old block back."""

    def grow(self, key: Hashable, nbytes: int) -> None:
        world, old = self.world, self.blocks.get(key)
        self.blocks[key] = world.allocator.allocate(nbytes, world.stream.identity)
        if old is not None:
            world.allocator.free(old)


class Dropped(Kept):
    """``cache[name] = torch.empty(n)``: whoever grows drops the cache's reference to the old."""

    def grow(self, key: Hashable, nbytes: int) -> None:
        world, old = self.world, self.blocks.pop(key, None)
        if old is not None:
            world.allocator.free(old)
        self.blocks[key] = world.allocator.allocate(nbytes, world.stream.identity)


class Unheld(Kept):
    """Plans live in the builder's least-recently-used cache and nowhere else."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        # It unloads during captures as well; looked for here is the replay of what is gone.
        world.judges_unloads = False

    def hold(self, plan: Plan) -> None:
        pass


class PerPool(Kept):
    """One lane for all branches of the graphs of a pool."""

    def lane(self, op: str) -> Hashable:
        capture = self.world.stream.capture
        if capture is not None:
            return capture.graph.pool, op
        return super().lane(op)


class Single(Kept):
    """One workspace for everything, as the release has."""

    def lane(self, op: str) -> Hashable:
        return op
