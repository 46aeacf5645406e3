"""Verdicts: a table of cases, and graphs of any layout against a model."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashinfer.gemm_workspace.audit import judge
from flashinfer.gemm_workspace.audit_graph import HIGH, Bytes, Extent, Node
from flashinfer.gemm_workspace.audit_memory import (
    AtCapture,
    History,
    Ledger,
    Owned,
    Place,
    Snapshot,
)
from flashinfer.gemm_workspace.audit_owners import Known, Verdict

from .audit_words import words

KIB = 1024
POOL = (0, 5)
BASE = 0x7F00_1230_0000

Blocks = list[tuple[int, str]]


def segment(address: int, blocks: Blocks, pool: tuple[int, int] = (0, 0)) -> dict[str, Any]:
    made = [{"size": size, "requested_size": size, "state": state} for size, state in blocks]
    return {"address": address, "segment_pool_id": pool, "blocks": made}


USED, IDLE, WAITING = "active_allocated", "inactive", "active_awaiting_free"


def of_blocks(*segments: dict[str, Any]) -> Snapshot:
    return Snapshot(segments)


def verdict(address: int, known: Known, named: bool = False) -> str | None:
    """What is said of ``address`` as the only word of a node."""
    if named:
        node = Node("0", "memset", extents=(Extent("destination", address, 8),))
    else:
        node = Node("0", "kernel", parts=(Bytes("parameter 0", struct.pack("<Q", address)),))
    findings = judge([node], known)
    assert len(findings) <= 1
    return str(findings[0].verdict) if findings else None


ONE = segment(BASE, [(KIB, USED), (KIB, IDLE)])


def captured(*segments: dict[str, Any], time: int = 100, **more: Any) -> AtCapture:
    return AtCapture(time, of_blocks(*segments), **more)


def frees(*events: tuple[int, int, int]) -> History:
    return History(
        [
            [{"action": "snapshot", "addr": 0, "size": 0, "time_us": 1}]
            + [
                {"action": "free_completed", "addr": address, "size": size, "time_us": time}
                for address, size, time in events
            ]
        ]
    )


@pytest.mark.parametrize(
    ("before", "now", "history", "expected"),
    [
        # Not watched.
        (None, [(KIB, USED)], None, "live"),
        (None, [(KIB, IDLE)], None, "suspect"),
        (None, [(KIB, WAITING)], None, "suspect"),
        (None, [(KIB, IDLE)], frees((BASE, KIB, 50)), "stale"),
        (None, [(KIB, USED)], frees((BASE, KIB, 50)), "live"),
        # Watched.
        ([(KIB, USED)], [(KIB, USED)], None, "live"),
        ([(KIB, USED)], [(KIB, IDLE)], None, "stale"),
        ([(KIB, USED)], [(KIB, WAITING)], None, "stale"),
        ([(KIB, IDLE)], [(KIB, IDLE)], None, "suspect"),
        ([(KIB, IDLE)], [(KIB, USED)], None, "suspect"),
        ([(2 * KIB, USED)], [(KIB, USED), (KIB, IDLE)], None, "suspect"),
        ([(KIB, USED)], [(KIB, USED)], frees((BASE, KIB, 101)), "stale"),
        ([(KIB, USED)], [(KIB, USED)], frees((BASE, KIB, 100)), "live"),
        ([(2 * KIB, USED)], [(KIB, USED)], frees((BASE, 2 * KIB, 101)), "stale"),
    ],
)
def test_a_block_of_torch(
    before: Blocks | None, now: Blocks, history: History | None, expected: str
) -> None:
    known = Known(
        now=of_blocks(segment(BASE, now)),
        history=history or History(),
        at_capture=None if before is None else captured(segment(BASE, before)),
    )
    assert verdict(BASE + 8, known) == expected


def test_a_requested_size_tells_owners_of_one_block_apart() -> None:
    before, now = segment(BASE, [(KIB, USED)]), segment(BASE, [(KIB, USED)])
    now["blocks"][0]["requested_size"] = 1000
    assert verdict(BASE, Known(of_blocks(now), at_capture=captured(before))) == "suspect"


def test_memory_that_torch_had_not_at_capture() -> None:
    known = Known(of_blocks(ONE), at_capture=captured(segment(2 * BASE, [(KIB, USED)])))
    assert verdict(BASE, known) == "suspect"


@pytest.mark.parametrize("state", [USED, IDLE, WAITING])
def test_the_own_pool_is_the_graphs_whatever_the_state(state: str) -> None:
    known = Known(of_blocks(segment(BASE, [(KIB, state)], POOL)), own_pool=POOL)
    assert verdict(BASE, known) == "own pool"
    assert verdict(BASE, Known(known.now)) == ("live" if state == USED else "suspect")


@pytest.mark.parametrize(
    ("before", "place", "expected"),
    [
        ([(KIB, USED)], None, "stale"),
        ([(KIB, IDLE)], None, "suspect"),
        ([(KIB, USED)], Place(BASE, KIB, True), "stale"),
    ],
)
def test_memory_given_back_since(before: Blocks, place: Place | None, expected: str) -> None:
    known = Known(
        of_blocks(), at_capture=captured(segment(BASE, before)), lookup=lambda address: place
    )
    assert verdict(BASE + 8, known) == expected


def test_memory_given_back_that_only_the_history_knows() -> None:
    history = History([[{"action": "segment_free", "addr": BASE, "size": KIB, "time_us": 3}]])
    assert verdict(BASE + 8, Known(of_blocks(), history=history)) == "stale"


@pytest.mark.parametrize(
    ("place", "expected"),
    [(Place(BASE, KIB, True), "unknown"), (Place(BASE, KIB, False), None), (None, None)],
)
def test_memory_that_only_the_driver_knows(place: Place | None, expected: str | None) -> None:
    known = Known(of_blocks(), lookup=lambda address: place)
    assert verdict(BASE + 8, known) == expected


AROUND = (segment(BASE, [(KIB, USED)]), segment(BASE + 64 * KIB, [(KIB, USED)]))


@pytest.mark.parametrize(
    ("address", "of_the_host", "expected"),
    [
        (BASE + 32 * KIB, False, "suspect"),
        (BASE + 32 * KIB + 8, False, None),  # no start of a block
        (BASE + 32 * KIB, True, None),
        (BASE - KIB, False, None),  # not among device addresses
        (BASE + 128 * KIB, False, None),
    ],
)
def test_an_address_with_nothing_behind_it(
    address: int, of_the_host: bool, expected: str | None
) -> None:
    known = Known(of_blocks(*AROUND), of_the_host=lambda address: of_the_host)
    assert verdict(address, known) == expected


def test_two_sizes_side_by_side_are_no_address() -> None:
    """As cuBLASLt's split-K reduction has them: rows and columns, 1024 and 480."""
    known = Known(of_blocks(segment(HIGH, [(KIB, USED)]), segment(BASE, [(KIB, USED)])))
    assert verdict(0x1E0_0000_0400, known) is None
    assert verdict(0x1E0_1000_0400, known) == "suspect"


def test_an_address_that_a_node_names_is_one_wherever_it_is() -> None:
    assert verdict(BASE + 8, Known(of_blocks()), named=True) == "suspect"
    host = Known(of_blocks(), of_the_host=lambda address: True)
    assert verdict(BASE + 8, host, named=True) is None
    low = Known(of_blocks(segment(1 << 33, [(KIB, IDLE)])))
    assert verdict((1 << 33) + 8, low, named=True) == "suspect"


def test_a_number_in_one_node_is_an_address_in_another() -> None:
    number = Node("0", "kernel", parts=(Bytes("extra", struct.pack("<Q", BASE + 8)),))
    target = Node("1", "memset", extents=(Extent("destination", BASE + 8, 8),))
    for nodes in ([number, target], [target, number]):
        assert [each.node for each in judge(nodes, Known(of_blocks()))] == ["1"]


def test_what_the_graph_allocates_itself() -> None:
    known = Known(of_blocks(), own_allocations=[(BASE, KIB)])
    assert verdict(BASE + KIB - 8, known) == "own pool"
    assert verdict(BASE + KIB, known) is None


LANE = Owned(BASE, KIB, 8 * KIB, "lane a", True, True, frozenset({7}))


@pytest.mark.parametrize(
    ("owned", "before", "expected"),
    [
        (LANE, None, "live"),
        (LANE, AtCapture(1, None, Ledger([LANE]), 7), "live"),
        (LANE, AtCapture(1, None, Ledger([LANE]), None), "live"),
        (LANE, AtCapture(1, None, Ledger(), 7), "live"),
        # This graph is not among those that hold it.
        (LANE, AtCapture(1, None, Ledger([LANE]), 8), "suspect"),
        (LANE._replace(captured=False), AtCapture(1, None, Ledger(), 8), "live"),
        (LANE._replace(owner="lane b"), AtCapture(1, None, Ledger([LANE]), 7), "suspect"),
        (LANE._replace(used=False), None, "stale"),
    ],
)
def test_the_forks_own(owned: Owned, before: AtCapture | None, expected: str) -> None:
    known = Known(of_blocks(), ledger=Ledger([owned]), at_capture=before)
    assert verdict(BASE + KIB - 8, known) == expected
    # What is reserved and was never mapped is never held against a graph.
    assert verdict(BASE + KIB, known) == "unknown"


LOW = 0x3_0200_0000  # where a driver may reserve addresses: two small numbers look like it


def test_two_numbers_that_look_like_a_low_address() -> None:
    known = Known(of_blocks(segment(LOW, [(64 * KIB, IDLE)])))
    inside = LOW + 4 * KIB + 8
    assert verdict(inside, known) == "unknown"
    assert verdict(LOW + 4 * KIB, known) == "suspect"
    # Beside a word that can hardly be numbers, of the same block, it is believed.
    both = Node("0", "kernel", parts=(Bytes("extra", struct.pack("<QQ", inside, LOW)),))
    assert [str(each.verdict) for each in judge([both], known)] == ["suspect", "suspect"]
    # In another node it is not.
    apart = [
        Node(str(number), "kernel", parts=(Bytes("extra", struct.pack("<Q", value)),))
        for number, value in enumerate((inside, LOW))
    ]
    assert [str(each.verdict) for each in judge(apart, known)] == ["unknown", "suspect"]


def test_what_could_not_be_read_is_a_finding() -> None:
    (finding,) = judge([Node("3", "conditional", unread=("bodies",))], Known(of_blocks()))
    assert finding.verdict is Verdict.NOT_INSPECTED
    assert (finding.node, finding.why, finding.address) == ("3", "bodies", None)


# Any layout. ------------------------------------------------------------------------------------

# One address range a verdict, far from each other and high: no two numbers look like them.
RANGES = {
    "live": BASE,
    "suspect": BASE + 0x10_0000,
    "own pool": BASE + 0x20_0000,
    "stale": BASE + 0x30_0000,
    "unknown": BASE + 0x40_0000,
}
LENGTH = 64 * KIB
EVERYTHING = Known(
    now=of_blocks(
        segment(RANGES["live"], [(LENGTH, USED)]),
        segment(RANGES["suspect"], [(LENGTH, IDLE)]),
        segment(RANGES["own pool"], [(LENGTH, IDLE)], POOL),
    ),
    ledger=Ledger([Owned(RANGES["stale"], LENGTH, LENGTH, "spare", False)]),
    own_pool=POOL,
    lookup=lambda address: (
        Place(RANGES["unknown"], LENGTH, True)
        if RANGES["unknown"] <= address < RANGES["unknown"] + LENGTH
        else None
    ),
)

addresses = st.tuples(st.sampled_from(sorted(RANGES)), st.integers(0, LENGTH - 1))


def _is_no_address(value: int) -> bool:
    return all(not start <= value < start + LENGTH for start in RANGES.values()) and (
        # The start of a block, among the others, with nothing behind it, is no mere number.
        value % 512 != 0 or not BASE <= value < max(RANGES.values())
    )


# Small numbers, floats, host pointers, one past an end, one before a start: no address of a device.
numbers = st.one_of(
    st.integers(0, (1 << 32) - 1),
    st.integers(1 << 57, (1 << 64) - 1),
    st.integers(1 << 32, (1 << 57) - 1),
    st.sampled_from(sorted(RANGES.values())).map(lambda start: start - 1),
    st.sampled_from(sorted(RANGES.values())).map(lambda start: start + LENGTH + 1),
    st.floats(allow_nan=False).map(lambda value: struct.unpack("<Q", struct.pack("<d", value))[0]),
    st.tuples(st.floats(width=32, allow_nan=False), st.floats(width=32, allow_nan=False)).map(
        lambda pair: struct.unpack("<Q", struct.pack("<ff", *pair))[0]
    ),
).filter(_is_no_address)

words_of = st.lists(st.one_of(addresses, numbers), max_size=8)
# Parameters of 1 to 64 bytes, or a blob: whole words, then up to seven bytes that hold none.
part = st.tuples(words_of, st.binary(max_size=7))


@st.composite
def graphs(draw: Any) -> tuple[list[Node], list[tuple[str, str, int, int, str]]]:
    """Nodes of any layout, and what must be found: node, where, offset, address, verdict."""
    nodes, expected = [], []

    def kernel(path: str) -> None:
        packed = draw(st.booleans())
        drawn = draw(st.lists(part, min_size=1, max_size=1 if packed else 5))
        parts = []
        for number, (contents, rest) in enumerate(drawn):
            where = "extra" if packed else f"parameter {number}"
            data = b""
            for content in contents:
                if isinstance(content, tuple):
                    verdict, offset = content
                    value = RANGES[verdict] + offset
                    expected.append((path, where, len(data), value, verdict))
                else:
                    value = content
                data += struct.pack("<Q", value)
            parts.append(Bytes(where, data + rest))
        nodes.append(Node(path, "kernel", "k", tuple(parts)))

    for number in range(draw(st.integers(0, 4))):
        path = str(number)
        kind = draw(st.sampled_from(["kernel", "memset", "child graph"]))
        if kind == "kernel":
            kernel(path)
        elif kind == "memset":
            verdict, offset = draw(addresses)
            value = RANGES[verdict] + offset
            nodes.append(Node(path, "memset", extents=(Extent("destination", value, 8),)))
            expected.append((path, "destination", -1, value, verdict))
        else:
            nodes.append(Node(path, "child graph"))
            for inner in range(draw(st.integers(0, 3))):
                kernel(f"{path}.{inner}")
    return nodes, expected


@given(graphs())
def test_every_address_of_any_layout_is_found_and_no_number_is(
    drawn: tuple[list[Node], list[tuple[str, str, int, int, str]]],
) -> None:
    nodes, expected = drawn
    found = [
        (
            each.node,
            each.where,
            -1 if each.offset is None else each.offset,
            each.address,
            str(each.verdict),
        )
        for each in judge(nodes, EVERYTHING)
    ]
    assert found == expected


@given(st.binary(max_size=80))
def test_words_of_any_bytes(data: bytes) -> None:
    """Every eight-byte word is looked at, and nothing behind the last whole one."""
    node = Node("0", "kernel", parts=(Bytes("extra", data),))
    for word in words(node):
        assert word.offset is not None
        assert word.offset % 8 == 0
        assert data[word.offset : word.offset + 8] == word.value.to_bytes(8, "little")
