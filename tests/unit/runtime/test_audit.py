"""The public audit: what it takes, what it refuses, and what its report says."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from flashinfer.gemm_workspace import audit, torch_internals
from flashinfer.gemm_workspace.audit_graph import Bytes, Extent, Node
from flashinfer.gemm_workspace.audit_memory import Place
from flashinfer.gemm_workspace.audit_report import NEVER_INSPECTED, Finding, Report
from flashinfer.gemm_workspace.errors import DriverError, DriverUnavailable
from flashinfer.gemm_workspace.state import State

BASE = 0x7F00_0000_0000
SEGMENTS = [
    {
        "address": BASE,
        "segment_pool_id": (0, 0),
        "blocks": [
            {"size": 1024, "requested_size": 1000, "state": "active_allocated"},
            {"size": 1024, "requested_size": 0, "state": "inactive"},
        ],
    },
    {
        "address": BASE + 0x10000,
        "segment_pool_id": (0, 3),
        "blocks": [{"size": 1024, "requested_size": 0, "state": "inactive"}],
    },
]


class Reader:
    def __init__(self, nodes: list[Node]) -> None:
        self._nodes = nodes
        self.asked: list[int] = []

    def nodes(self, graph: int) -> list[Node]:
        self.asked.append(graph)
        return self._nodes

    def lookup(self, address: int) -> Place | None:
        return None


class Graph:
    """As much of ``torch.cuda.CUDAGraph`` as an audit asks."""

    def __init__(self, raw: int | None = 99, pool: tuple[int, int] = (0, 3)) -> None:
        self.raw, self._pool = raw, pool

    def raw_cuda_graph(self) -> int:
        if self.raw is None:
            raise RuntimeError("You cannot access the raw cudaGraph_t instance unless ...")
        return self.raw

    def pool(self) -> tuple[int, int]:
        return self._pool


def kernel(path: str, *addresses: int) -> Node:
    data = struct.pack(f"<{len(addresses)}Q", *addresses)
    return Node(path, "kernel", "gemm", parts=(Bytes("extra", data),))


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch, state: State) -> Reader:
    made = Reader([kernel("0", BASE, BASE + 0x10000, 17)])

    @contextmanager
    def reading(index: int) -> Iterator[Reader]:
        yield made

    monkeypatch.setattr(audit, "reading", reading)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch_internals, "allocator_state", lambda: (SEGMENTS, []))
    return made


def test_a_graph_of_torch_says_its_own_pool(reader: Reader) -> None:
    report = audit.audit(Graph())
    assert reader.asked == [99]
    assert [str(each.verdict) for each in report.findings] == ["live", "own pool"]
    assert report.exit_status == 0
    assert any("not watched" in limit for limit in report.limits)


class Handle:
    def __int__(self) -> int:
        return 99


@pytest.mark.parametrize("handle", [99, Handle()])
def test_a_raw_handle(reader: Reader, handle: Any) -> None:
    report = audit.audit(handle, pool=(0, 3))
    assert reader.asked == [99]
    assert [str(each.verdict) for each in report.findings] == ["live", "own pool"]
    without = audit.audit(handle)
    assert [str(each.verdict) for each in without.findings] == ["live", "suspect"]
    assert any("own pool is not known" in limit for limit in without.limits)


def test_a_freed_block(reader: Reader) -> None:
    reader._nodes.append(kernel("1", BASE + 1024))
    reader._nodes.append(Node("2", "memset", extents=(Extent("destination", BASE + 1032, 8),)))
    report = audit.audit(Graph())
    assert [(each.node, each.where, each.offset) for each in report.of("suspect")] == [
        ("1", "extra", 0),
        ("2", "destination", None),
    ]
    assert report.exit_status == 1


def test_history_counts_only_while_it_is_recorded(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader._nodes.append(kernel("1", BASE + 1024))
    freed = {"action": "free_completed", "addr": BASE + 1024, "size": 1024, "time_us": 5}
    monkeypatch.setattr(torch_internals, "allocator_state", lambda: (SEGMENTS, [[freed]]))
    assert audit.audit(Graph()).counts["stale"] == 0
    monkeypatch.setattr(torch_internals, "history_recorded", lambda: True)
    assert audit.audit(Graph()).counts["stale"] == 1


def test_an_allocator_without_snapshots(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses() -> Any:
        raise RuntimeError("cudaMallocAsync does not yet support snapshots")

    monkeypatch.setattr(torch_internals, "allocator_state", refuses)
    report = audit.audit(Graph())
    assert report.findings == ()
    assert "cudaMallocAsync" in report.limits[0]


@pytest.mark.parametrize(
    ("graph", "error", "words"),
    [
        (Graph(raw=None), audit.AuditError, r"keep_graph=True.*watch\(\) before"),
        ("graph", TypeError, "is a str, wanted"),
        (None, TypeError, "is a NoneType, wanted"),
        (0, audit.AuditError, "is 0, wanted the handle"),
    ],
)
def test_what_is_no_graph_is_refused(
    reader: Reader, graph: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        audit.audit(graph)
    assert reader.asked == []


@pytest.mark.parametrize("failure", [DriverError("no"), DriverUnavailable("no")])
def test_a_graph_that_cannot_be_read(
    reader: Reader, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    def refuses(graph: int) -> list[Node]:
        raise failure

    monkeypatch.setattr(reader, "nodes", refuses)
    with pytest.raises(audit.AuditError, match="0x63 cannot be read: no"):
        audit.audit(Graph())


def test_the_hosts_memory_is_told_by_the_process_itself() -> None:
    readable = audit._readable()
    data = torch.zeros(4096)
    assert readable(data.data_ptr())
    assert not readable(8)
    assert not readable((1 << 57) - 8)


# Reports. ---------------------------------------------------------------------------------------


def finding(verdict: str, node: str = "0", address: int | None = BASE) -> Finding:
    return Finding(
        node, "kernel", "gemm", "extra", 8, address, "owner", audit.Verdict(verdict), "why"
    )


@pytest.mark.parametrize(
    ("verdicts", "status"),
    [
        ([], 0),
        (["live", "own pool", "unknown"], 0),
        (["live", "not inspected"], 2),
        (["suspect", "not inspected"], 1),
        (["stale"], 1),
    ],
)
def test_exit_status(verdicts: list[str], status: int) -> None:
    report = Report(3, tuple(finding(verdict) for verdict in verdicts))
    assert report.exit_status == status
    assert sum(report.counts.values()) == len(verdicts)
    assert ("nothing that was inspected" in report.text()) == (status != 1)


def test_no_report_reads_as_clean() -> None:
    text = Report(0, ()).text()
    for limit in NEVER_INSPECTED:
        assert limit in text
    assert "clean" not in text
    assert Report(0, ()).as_dict()["never_inspected"] == list(NEVER_INSPECTED)


def test_text_shows_what_needs_a_look_or_everything() -> None:
    report = Report(2, (finding("stale"), finding("live"), finding("live", "4.0")), ("a limit",))
    assert report.text().splitlines()[:3] == [
        "graph audit: 2 nodes: 1 stale, 0 suspect, 0 not inspected, 0 unknown, 2 live, 0 own pool",
        "node 0 kernel gemm",
        "  stale         extra+8 0x7f0000000000  owner: why",
    ]
    assert "4.0" not in report.text()
    assert "node 4.0 kernel gemm" in report.text(everything=True)
    assert "limit: a limit" in report.text()


def test_json_is_plain_and_whole() -> None:
    report = Report(1, (finding("stale"), finding("not inspected", address=None)), ("a",))
    read = json.loads(report.json())
    assert read == report.as_dict()
    assert read["findings"][0]["verdict"] == "stale"
    assert read["findings"][0]["address_hex"] == "0x7f0000000000"
    assert read["findings"][1]["address_hex"] is None
    assert read["exit_status"] == 1
