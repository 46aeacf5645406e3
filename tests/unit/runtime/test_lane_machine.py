"""Invariants of the lanes, against a model that only remembers what was handed out to whom."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from flashinfer.gemm_workspace import (
    CudnnWorkspaceTooSmallInCaptureError,
    GemmWorkspaceError,
    _gemm_workspace_at_least,
    collect,
    holds,
    lane_workspace,
    lanes,
    reserve,
    reserve_lane,
    seal,
    stats,
    use_device,
)
from flashinfer.gemm_workspace.errors import DriverOutOfMemory

from .fake_device import FakeDevice

# A small universe, so that reuse is frequent; a lane starts at 16 bytes here.
NAMES = st.sampled_from(["mm_fp4_workspace", "bmm_fp8_workspace"])
SIZES = st.integers(0, 100)
STREAMS = st.sampled_from([0, 1])
START = 16

Owner = tuple[object, ...]


class Lanes(RuleBasedStateMachine):
    vmm = True

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(lanes, "LANE_BYTES", START)
        self.patch.setattr(lanes, "VIEWS", 3)
        self.device = FakeDevice(self.vmm)
        self.device.granularity, self.device.total, self.device.sm = 4, 512, (10, 0)
        self.device.idle = 0
        self.context = use_device(self.device)
        self.state = self.context.__enter__()
        self.capture = 0
        self.pools: dict[int, object] = {}  # by every capture there ever was
        # Graphs that exist, and who was handed which bytes; an owner of the past is dropped.
        self.graphs: set[int] = set()
        self.users: dict[Owner, set[int]] = {}
        self.handed: list[tuple[torch.Tensor, int, int, Owner, str]] = []
        self.largest: dict[Owner, int] = {}

    def teardown(self) -> None:
        self.context.__exit__(None, None, None)
        self.patch.undo()

    def _owner(self, name: str) -> tuple[Owner, int | None]:
        stream = self.device.raw_stream(0)
        capture = self.device.captures.get((0, stream))
        if capture is None:
            return (name, stream), None
        return (name, stream, self.pools[capture] or f"capture {capture}"), capture

    def _ask(self, name: str, nbytes: int, ask: str, view: torch.Tensor | None = None) -> None:
        owner, capture = self._owner(name)
        fits = max(nbytes, 1) <= self.largest.get(owner, 0)
        before = self._memory()
        try:
            if ask == "reserve":
                got = reserve_lane(name, nbytes, "cuda:0")
            elif view is not None:
                got = _gemm_workspace_at_least(view, nbytes)
            else:
                got = lane_workspace(name, nbytes, "cuda:0")
        except (GemmWorkspaceError, CudnnWorkspaceTooSmallInCaptureError):
            assert self.device.fails is not None or self.state.sealed
            assert not fits
            assert self._memory() == before
            return
        assert got.numel() == max(nbytes, 1)
        if fits:
            assert self._memory() == before
        self.handed.append((got, got.data_ptr(), got.numel(), owner, name))
        self.largest[owner] = max(self.largest.get(owner, START), nbytes)
        if capture is not None:
            self.users.setdefault(owner, set()).add(capture)
            self.graphs.add(capture)

    def _memory(self) -> int:
        return sum(size for _, size in self.device.mapped) + sum(
            block.numel() for block in self.device.blocks
        )

    @rule(name=NAMES, nbytes=SIZES)
    def request(self, name: str, nbytes: int) -> None:
        self._ask(name, nbytes, "lane")

    @rule(name=NAMES, nbytes=SIZES)
    def reserve_a_lane(self, name: str, nbytes: int) -> None:
        self._ask(name, nbytes, "reserve")

    @rule(data=st.data(), nbytes=SIZES)
    def at_least(self, data: st.DataObject, nbytes: int) -> None:
        if not self.handed:
            return
        view, _, length, _, name = data.draw(st.sampled_from(self.handed[-5:]))
        if nbytes > length:
            self._ask(name, nbytes, "at_least", view)

    @rule(nbytes=SIZES, count=st.integers(0, 2))
    def reserve_ahead(self, nbytes: int, count: int) -> None:
        try:
            reserve(nbytes, "cuda:0", count)
        except (GemmWorkspaceError, CudnnWorkspaceTooSmallInCaptureError):
            assert self.device.fails is not None or self.state.sealed

    @rule(sealed=st.booleans())
    def seal_or_open(self, sealed: bool) -> None:
        seal(sealed)

    @rule(stream=STREAMS)
    def switch_stream(self, stream: int) -> None:
        self.device.streams[0] = stream

    @rule(stream=STREAMS, pool=st.sampled_from([None, "p", "q"]))
    def begin_or_end_capture(self, stream: int, pool: str | None) -> None:
        if self.device.captures.pop((0, stream), None) is None:
            holds.before_capture()
            self.capture += 1
            self.pools[self.capture] = pool
            if pool is not None:
                self.device.pools[self.capture] = pool
            self.device.captures[0, stream] = self.capture

    @rule(data=st.data())
    def destroy_graph(self, data: st.DataObject) -> None:
        ended = sorted(self.graphs - set(self.device.captures.values()))
        if not ended:
            return
        capture = data.draw(st.sampled_from(ended))
        self.graphs.discard(capture)
        self.device.destroy_graph(capture)
        for owner, users in list(self.users.items()):
            users.discard(capture)
            if not users:
                del self.users[owner]
                self.largest.pop(owner)
                self.handed = [each for each in self.handed if each[3] != owner]

    @rule()
    def collect_now(self) -> None:
        collect()

    @rule(full=st.booleans())
    def fill_device(self, full: bool) -> None:
        self.device.fails = DriverOutOfMemory("full") if full else None

    @invariant()
    def what_was_handed_out_is_unchanged(self) -> None:
        assert all((view.data_ptr(), view.numel()) == (p, n) for view, p, n, _, _ in self.handed)

    @invariant()
    def no_two_owners_share_a_byte(self) -> None:
        ends = sorted((p, p + n, owner) for _, p, n, owner, _ in self.handed)
        latest: dict[Owner, int] = {}
        for start, end, owner in ends:
            assert all(end_ <= start for other, end_ in latest.items() if other != owner)
            latest[owner] = max(latest.get(owner, 0), end)

    @invariant()
    def an_arena_has_one_address(self) -> None:
        if self.vmm:
            places = {(owner, p) for _, p, _, owner, _ in self.handed}
            assert len(places) == len({owner for owner, _ in places})

    @invariant()
    def all_memory_is_accounted_for(self) -> None:
        assert stats()["lane_bytes"] == self._memory()

    @invariant()
    def kept_bytes_are_below_the_block_in_use(self) -> None:
        for lane in self.state.lanes.values():
            assert lane.storage.kept_bytes < max(lane.storage.nbytes, 1)


class LanesOfBlocks(Lanes):
    vmm = False


PROFILE = settings(derandomize=True, deadline=None, max_examples=150, stateful_step_count=40)
Lanes.TestCase.settings = PROFILE
LanesOfBlocks.TestCase.settings = PROFILE
TestLanes = Lanes.TestCase
TestLanesOfBlocks = LanesOfBlocks.TestCase
