"""The policy as it ships, over the simulated device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from contextlib import ExitStack
from unittest.mock import patch

import torch

from flashinfer import gemm_workspace
from flashinfer.gemm_workspace import holds, lanes
from flashinfer.gemm_workspace.arena import HEADROOM
from flashinfer.gemm_workspace.errors import (
    CudnnCaptureUnsafeError,
    CudnnPlanBuildInCaptureError,
    DriverError,
    GemmWorkspaceError,
)
from flashinfer.gemm_workspace.settings import Settings
from flashinfer.gemm_workspace.state import use_device

from .device import INDEX, SimDevice
from .engine import NEEDS
from .memory import PAGE, pages
from .policy import Policy
from .world import CallFailed, Plan, World

# What index_of() of the simulated device makes device 0 of. With an index, or no request would
# be remembered for the hot path.
DEVICE = torch.device("cpu", INDEX)

# What a new lane starts with; the shipped constant, scaled down like everything here.
LANE_BYTES = 2 * PAGE


class Shipped(Policy):
    """``ranges``: addresses can be reserved. ``driver``: it can be reached from Python. ``shares``:
    ops share a workspace. ``one_pool``: the switch for engines that never replay two graphs at
    once."""

    refusals = (CudnnCaptureUnsafeError, GemmWorkspaceError, DriverError, CallFailed)

    def __init__(
        self,
        world: World,
        ranges: bool = True,
        driver: bool = True,
        shares: bool = True,
        one_pool: bool = False,
    ) -> None:
        self.world = world
        self.one_pool = one_pool
        self.knows_streams = driver
        self.device = SimDevice(world, ranges, driver)
        # Whether what was asked last grows by doubling.
        self._doubles = False
        self._undo = ExitStack()
        self._undo.enter_context(patch.object(lanes, "LANE_BYTES", LANE_BYTES))
        # What the hot path asks of torch itself.
        for name, answer in (
            ("_here", lambda: INDEX),
            ("_capturing", lambda: self.device.is_capturing(INDEX)),
            ("_raw_stream", self.device.raw_stream),
        ):
            self._undo.enter_context(patch.object(lanes, name, answer))
        self.state = self._undo.enter_context(use_device(self.device))
        self.state.settings = Settings(share=shares, single_capture_lane=one_pool)
        self.buffers: dict[tuple[str, torch.device], torch.Tensor] = {}
        # It warns of what happens here all the time, and building the text takes longest.
        logger = logging.getLogger("flashinfer.gemm_workspace")
        self._undo.callback(setattr, logger, "disabled", logger.disabled)
        logger.disabled = True

        @gemm_workspace.guard_plan_build
        def build_cudnn_gemm_graph(device: int, make: Callable[[], Plan]) -> Plan:
            return make()

        @gemm_workspace.device_locked
        def execute_cudnn_gemm_graph(
            graph: Plan, a: torch.Tensor, launch: Callable[[], None]
        ) -> None:
            gemm_workspace._retain_cudnn_graph_if_capturing(graph)
            launch()

        self._build, self._execute = build_cudnn_gemm_graph, execute_cudnn_gemm_graph

    def is_fair(self, refusal: BaseException) -> bool:
        capture = self.world.stream.capture
        if isinstance(refusal, CudnnPlanBuildInCaptureError):
            return capture is not None
        if self.world.failed or self.state.sealed:
            return True
        if capture is not None and not (capture.valid and self.device.has_driver):
            return True
        return self._memory_is_short()

    def _memory_is_short(self) -> bool:
        driver = self.world.driver
        free = driver.limit - driver.used
        if not self.world.captures:
            free += self.world.allocator.idle_bytes(keep=self.world.pools)
        # An arena asks for what it lacks, and for no room when there is none; blocks double.
        return free < max(NEEDS) * (2 if self._doubles else 1)

    def workspace(self, op: str, nbytes: int) -> torch.Tensor:
        self._doubles = not self.device.has_ranges
        return gemm_workspace.lane_workspace(op, nbytes, DEVICE)

    def at_least(self, workspace: torch.Tensor, nbytes: int) -> torch.Tensor:
        self._doubles = not self.device.has_ranges
        return gemm_workspace._gemm_workspace_at_least(workspace, nbytes)

    def build(self, make: Callable[[], Plan]) -> Plan:
        return self._build(INDEX, make)

    def execute(self, plan: Plan, workspace: torch.Tensor, launch: Callable[[], None]) -> None:
        self._execute(plan, workspace, launch)

    def buffer(self, nbytes: int) -> torch.Tensor:
        self._doubles = True
        return gemm_workspace.cache_buffer(self.buffers, "some_workspace", nbytes, DEVICE)

    def clear_buffers(self) -> None:
        self.buffers.clear()

    def lanes(self) -> int:
        return len(gemm_workspace.stats()["lanes"])

    def before_capture(self) -> None:
        holds.before_capture()

    def reserve(self, nbytes: int, lanes: int) -> None:
        self._doubles = not self.device.has_ranges
        gemm_workspace.reserve(nbytes, DEVICE, lanes)

    def seal(self, sealed: bool) -> None:
        gemm_workspace.seal(sealed)

    def collect(self) -> None:
        holds.collect()

    def key(self, op: str, pool: Hashable, stream: int) -> Hashable:
        return lanes.part_of(self.state, op, INDEX), pool, stream

    def moves(self) -> bool:
        return not self.device.has_ranges

    def room(self, longest: int) -> int:
        longest = max(longest, LANE_BYTES)
        if self.device.has_ranges:
            return pages(longest + longest // HEADROOM)
        # A block is below twice the longest, and those that it outgrew are below it together.
        return 4 * longest

    def close(self) -> None:
        self._undo.close()
