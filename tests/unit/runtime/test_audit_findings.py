"""Findings in columns, and reports that make them when they are asked for."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import struct

import pytest

from flashinfer.gemm_workspace.audit_findings import Finding, Findings
from flashinfer.gemm_workspace.audit_graph import Bytes, Extent, Node, Packed
from flashinfer.gemm_workspace.audit_memory import Snapshot
from flashinfer.gemm_workspace.audit_owners import Known, Verdict
from flashinfer.gemm_workspace.audit_report import Report

from .audit_words import words

BASE = 0x7F00_0000_0000
BLOCKS = 40


def known() -> Known:
    """Blocks of 512 bytes, every fourth one free."""
    states = ["active_allocated", "active_allocated", "active_allocated", "inactive"]
    blocks = [{"size": 512, "state": states[number % 4]} for number in range(BLOCKS)]
    return Known(Snapshot([{"address": BASE, "blocks": blocks}]))


def kernel(path: str, *addresses: int) -> Node:
    data = struct.pack(f"<{len(addresses)}Q", *addresses)
    return Node(path, "kernel", "gemm", Packed((("extra", len(addresses)),), data))


NODES = [
    kernel("0", BASE, 17, BASE + 512),
    Node("1", "event wait"),
    Node("2", "memset", extents=(Extent("destination", BASE + 3 * 512, 8),), unread=("why",)),
    kernel("3", BASE + 8, BASE + 7 * 512),
]


def test_findings_stand_where_they_were_found() -> None:
    found = [
        (each.node, each.where, each.offset, each.address and each.address - BASE, each.verdict)
        for each in Findings(NODES, known()).of()
    ]
    assert found == [
        ("0", "extra", 0, 0, "live"),
        ("0", "extra", 16, 512, "live"),
        ("2", "destination", None, 3 * 512, "suspect"),
        ("2", "", None, None, "not inspected"),
        ("3", "extra", 0, 8, "live"),
        ("3", "extra", 8, 7 * 512, "suspect"),
    ]


def test_packed_parts_are_the_parts() -> None:
    parts = (Bytes("parameter 0", b"a" * 8), Bytes("parameter 2", b"b" * 24))
    whole = Packed((("parameter 0", 1), ("parameter 2", 3)), b"a" * 8 + b"b" * 24)
    assert tuple(whole) == parts
    one, other = (Node("0", "kernel", parts=each) for each in (parts, whole))
    assert list(words(one)) == list(words(other))


def reports() -> tuple[Report, Report]:
    """The same report, with findings that are there and with findings still to be made."""
    found = Findings(NODES, known())
    return Report(4, tuple(found.of()), ("a",)), Report.over(4, found, ("a",))


def test_a_report_says_the_same_before_and_after_its_findings_are_made() -> None:
    there, made = reports()
    for _ in range(2):
        assert made.counts == there.counts
        assert made.exit_status == there.exit_status == 1
        assert made.as_dict() == there.as_dict()
        for everything in (False, True):
            assert made.text(everything) == there.text(everything)
        for verdict in Verdict:
            assert made.of(verdict) == there.of(verdict)
        assert made.findings == there.findings
        assert isinstance(made.findings, tuple)
    assert made.findings is made.findings


def test_such_a_report_is_like_any_other() -> None:
    for act in (
        hash,
        repr,
        dataclasses.asdict,
        copy.copy,
        copy.deepcopy,
        lambda report: pickle.loads(pickle.dumps(report)),
        lambda report: dataclasses.replace(report, limits=()),
    ):
        there, made = reports()
        assert act(made) == act(there)
    assert made == there
    with pytest.raises(AttributeError, match="'Report' object has no attribute 'finding'"):
        getattr(made, "finding")  # noqa: B009 - what it is about
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.nodes = 3  # type: ignore[misc]


def test_no_object_is_kept_for_an_address() -> None:
    """Python's garbage collection over a whole process is due by the number of these."""
    nodes = [
        kernel(str(number), *(BASE + 512 * (number * at % BLOCKS) for at in range(17)))
        for number in range(200)
    ]
    known_then = known()
    gc.collect()
    before = len(gc.get_objects())
    found = Findings(nodes, known_then)
    gc.collect()
    after = len(gc.get_objects())
    assert sum(1 for _ in found.of()) == 17 * len(nodes)
    assert after - before < 50
    assert isinstance(next(found.of()), Finding)
