"""Invariants of the lanes, against a model that only remembers what was handed out."""

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
    lane_workspace,
    lanes,
    reserve_lane,
    stats,
    use_device,
)

from .fake_device import FakeDevice

# A small universe, so that reuse is frequent; a lane starts at 16 bytes here.
NAMES = st.sampled_from(["mm_fp4_workspace", "bmm_fp8_workspace"])
SIZES = st.integers(0, 100)
STREAMS = st.sampled_from([0, 1])
START = 16


class Lanes(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(lanes, "LANE_BYTES", START)
        self.patch.setattr(lanes, "VIEWS", 3)
        self.context = use_device(FakeDevice())
        self.state = self.context.__enter__()
        self.device: FakeDevice = self.state.device  # type: ignore[assignment]
        self.capture = 0
        # Owner of each byte range ever handed out: (storage, lane); and the tensors with what
        # they were then.
        self.owners: dict[int, tuple[object, ...]] = {}
        self.handed: list[tuple[torch.Tensor, int, int]] = []
        self.largest: dict[tuple[object, ...], int] = {}

    def teardown(self) -> None:
        self.context.__exit__(None, None, None)
        self.patch.undo()

    def _lane(self, name: str) -> tuple[object, ...]:
        stream = self.device.raw_stream(0)
        return name, stream, self.device.captures.get((0, stream))

    def _ask(self, name: str, nbytes: int, ask: str, view: torch.Tensor | None = None) -> None:
        lane = self._lane(name)
        start = max(START, self.state.floors.get((name, 0), 0))
        fits = max(nbytes, 1) <= self.largest.get(lane, 0)
        allocated = len(self.device.blocks)
        try:
            if ask == "reserve":
                got = reserve_lane(name, nbytes, "cuda:0")
            elif view is not None:
                got = _gemm_workspace_at_least(view, nbytes)
            else:
                got = lane_workspace(name, nbytes, "cuda:0")
        except (GemmWorkspaceError, CudnnWorkspaceTooSmallInCaptureError):
            assert self.device.fails is not None
            assert not fits
            assert len(self.device.blocks) == allocated
            return
        assert got.numel() == max(nbytes, 1)
        if fits:
            assert len(self.device.blocks) == allocated
        storage = got.untyped_storage().data_ptr()
        assert self.owners.setdefault(storage, lane) == lane
        self.handed.append((got, got.data_ptr(), got.numel()))
        self.largest[lane] = max(self.largest.get(lane, start), nbytes)

    @rule(name=NAMES, nbytes=SIZES)
    def request(self, name: str, nbytes: int) -> None:
        self._ask(name, nbytes, "lane")

    @rule(name=NAMES, nbytes=SIZES)
    def reserve(self, name: str, nbytes: int) -> None:
        self._ask(name, nbytes, "reserve")

    @rule(data=st.data(), nbytes=SIZES)
    def at_least(self, data: st.DataObject, nbytes: int) -> None:
        if not self.handed:
            return
        view, _, length = data.draw(st.sampled_from(self.handed[-5:]))
        name = str(self.owners[view.untyped_storage().data_ptr()][0])
        if nbytes <= length:
            assert _gemm_workspace_at_least(view, nbytes) is view
        else:
            self._ask(name, nbytes, "at_least", view)

    @rule(stream=STREAMS)
    def switch_stream(self, stream: int) -> None:
        self.device.streams[0] = stream

    @rule(stream=STREAMS)
    def begin_or_end_capture(self, stream: int) -> None:
        if self.device.captures.pop((0, stream), None) is None:
            self.capture += 1
            self.device.captures[0, stream] = self.capture

    @rule(full=st.booleans())
    def fill_device(self, full: bool) -> None:
        self.device.fails = torch.OutOfMemoryError("full") if full else None

    @invariant()
    def what_was_handed_out_is_unchanged(self) -> None:
        assert all((t.data_ptr(), t.numel()) == (p, n) for t, p, n in self.handed)

    @invariant()
    def every_block_handed_out_is_held(self) -> None:
        held = sum(entry["bytes"] + entry["kept_bytes"] for entry in stats()["lanes"])
        assert held == sum(block.numel() for block in self.device.blocks)

    @invariant()
    def kept_bytes_are_below_twice_the_largest_request(self) -> None:
        for (name, key), lane in self.state.lanes.items():
            capture = key[1] if len(key) == 3 else None
            assert lane.storage.kept_bytes < 2 * self.largest[name, key[-1], capture]


Lanes.TestCase.settings = settings(
    derandomize=True, deadline=None, max_examples=150, stateful_step_count=40
)
TestLanes = Lanes.TestCase
