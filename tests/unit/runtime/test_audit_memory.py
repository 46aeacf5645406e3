"""What is known of memory: the allocator's blocks, its history, the ledger."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from flashinfer.gemm_workspace import lane_workspace, reserve, use_device
from flashinfer.gemm_workspace.audit_memory import (
    FREE,
    IN_USE,
    PENDING,
    Block,
    History,
    Ledger,
    Owned,
    Snapshot,
    ledger_of,
)
from flashinfer.gemm_workspace.cache import cache_buffer
from flashinfer.gemm_workspace.state import State

from .fake_device import FakeDevice, MiB

STATES = {"active_allocated": IN_USE, "active_awaiting_free": PENDING, "inactive": FREE}


@st.composite
def segments(draw: Any) -> list[dict[str, Any]]:
    """Segments as torch gives them, in any order, with gaps between."""
    address, made = 0x7F00_0000_0000, []
    for _ in range(draw(st.integers(0, 5))):
        address += 512 * draw(st.integers(0, 8))
        start, blocks = address, []
        for _ in range(draw(st.integers(1, 4))):
            size = 512 * draw(st.integers(1, 5))
            state = draw(st.sampled_from(sorted(STATES)))
            requested = draw(st.integers(1, size))
            blocks.append({"size": size, "requested_size": requested, "state": state})
            address += size
        pool = draw(st.sampled_from([(0, 0), (0, 7)]))
        made.append({"address": start, "segment_pool_id": pool, "blocks": blocks})
    return draw(st.permutations(made))


# Most at the very edges of blocks, where an error of one would show.
offsets = st.builds(lambda step, by: 512 * step + by, st.integers(-1, 60), st.integers(-1, 1))


@given(made=segments(), offset=st.one_of(offsets, st.integers(-600, 40_000)))
def test_the_block_of_any_address(made: list[dict[str, Any]], offset: int) -> None:
    """Against a walk over the segments."""
    address = 0x7F00_0000_0000 + offset
    expected = None
    for segment in made:
        at = segment["address"]
        for block in segment["blocks"]:
            if at <= address < at + block["size"]:
                expected = Block(
                    at,
                    block["size"],
                    block["requested_size"],
                    STATES[block["state"]],
                    segment["segment_pool_id"],
                )
            at += block["size"]
    snapshot = Snapshot(made)
    assert snapshot.block(address) == expected
    span = snapshot.span()
    assert (span is None) == (not made)
    assert span is None or snapshot.block(span[1]) is None
    if expected is not None and span is not None:
        assert span[0] <= address < span[1]


def test_the_states_of_older_torch() -> None:
    blocks = [{"size": 512, "state": "active_pending_free"}]
    found = Snapshot([{"address": 512, "blocks": blocks}]).block(600)
    assert found == Block(512, 512, 0, PENDING, (0, 0))


def event(action: str, address: int, size: int, time: int | None) -> dict[str, Any]:
    entry = {"action": action, "addr": address, "size": size}
    return entry if time is None else {**entry, "time_us": time}


def test_history() -> None:
    history = History(
        [
            [
                event("alloc", 0x1000, 512, 10),
                event("free_requested", 0x1000, 512, 20),
                event("free_completed", 0x1000, 512, 21),
                event("alloc", 0x1000, 512, 30),
                {"action": "oom", "size": 5, "device_free": 3, "time_us": 31},
                event("segment_free", 0x8000, 4096, 40),
            ],
            [],
        ]
    )
    block = Block(0x1000, 512, 512, IN_USE, (0, 0))
    assert history.freed_since(block, 20) is not None
    assert history.freed_since(block, 21) is None
    assert history.freed_since(block._replace(address=0x1200), 0) is None
    last = history.last_free(0x11FF)
    assert last is not None
    assert last.time == 21
    assert history.last_free(0x1200) is None
    gone = history.last_free(0x8FFF)
    assert gone is not None
    assert gone.to_driver
    assert history.reaches_back_to(10)
    assert not history.reaches_back_to(9)


def test_history_without_times_and_without_anything() -> None:
    timeless = History([[event("free_completed", 0x1000, 512, None)]])
    assert timeless.last_free(0x1000) is not None
    assert timeless.freed_since(Block(0x1000, 512, 512, IN_USE, (0, 0)), 0) is None
    assert not timeless.reaches_back_to(1 << 62)
    assert not History().reaches_back_to(1 << 62)
    assert History().last_free(0x1000) is None


def test_the_ledger_finds_what_is_mapped_and_what_is_reserved() -> None:
    ledger = Ledger([Owned(100, 10, 50, "b", True), Owned(0, 10, 10, "a", True)])
    assert [getattr(ledger.find(at), "owner", None) for at in (0, 9, 10, 99, 100, 149, 150)] == [
        "a",
        "a",
        None,
        None,
        "b",
        "b",
        None,
    ]
    assert ledger.span() == (0, 150)
    assert Ledger().span() is None


def test_ledger_of_a_state(state: State, device: FakeDevice) -> None:
    reserve(8 * MiB, "cuda:0")
    with device.capturing(capture=7, stream=3, pool=(0, 9)):
        captured = lane_workspace("bmm_fp8_workspace", 32 * MiB, "cuda:0")
    eager = lane_workspace("bmm_fp8_workspace", 32 * MiB, "cuda:0")
    cache: Any = {}
    buffer = cache_buffer(cache, "topk_buffer", 100, captured.device)
    outgrown = buffer.data_ptr()
    buffer = cache_buffer(cache, "topk_buffer", 1000, captured.device)
    reserve(8 * MiB, "cuda:0")
    ledger = ledger_of(state)
    of_capture = ledger.find(captured.data_ptr() + 5)
    assert of_capture is not None
    assert of_capture.captured
    assert of_capture.users == {7}
    assert "pool" in of_capture.owner
    assert of_capture.mapped >= 40 * MiB
    assert of_capture.reserved == device.total
    of_stream = ledger.find(eager.data_ptr())
    assert of_stream is not None
    assert not of_stream.captured
    assert of_stream.used
    assert of_stream.owner.startswith("lane ")
    spare = [each for each in ledger._owned if not each.used]
    assert [each.owner for each in spare] == ["spare workspace of cuda:0"]
    for address in (outgrown, buffer.data_ptr()):
        found = ledger.find(address)
        assert found is not None
        assert found.owner.startswith("buffer topk_buffer")


def test_outgrown_blocks_are_in_the_ledger() -> None:
    """On a device that cannot map, a lane's old blocks stay in use."""
    with use_device(FakeDevice(vmm=False)) as state:
        small = lane_workspace("bmm_fp8_workspace", 32 * MiB, "cuda:0")
        large = lane_workspace("bmm_fp8_workspace", 100 * MiB, "cuda:0")
        assert small.data_ptr() != large.data_ptr()
        owners = {
            getattr(ledger_of(state).find(view.data_ptr()), "owner", None)
            for view in (small, large)
        }
    assert len(owners) == 1
    assert None not in owners
