"""The words of a node, one by one: what the audit reads in columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from flashinfer.gemm_workspace.audit_graph import Node, candidates, packed, places


class Word(NamedTuple):
    """Eight bytes of a node that may be a device address."""

    where: str
    offset: int | None  # in the part; None for an extent
    value: int


def words(node: Node) -> Iterator[Word]:
    """Every word of ``node`` that may be a device address, in order."""
    parts = packed(node.parts)
    where = places(parts.layout)
    for number, value in candidates(parts.data):
        yield Word(*where[number], value)
    for name, address, _ in node.extents:
        yield Word(name, None, address)
