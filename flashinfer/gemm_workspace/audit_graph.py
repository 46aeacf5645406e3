"""A captured graph as plain data: of each node, what may hold device addresses."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

# A word below or above is no device address on any system that CUDA supports: allocations start
# above 4 GiB, and addresses have at most 57 bits. Nearly all numbers and pairs of floats fall out.
_LOWEST = 1 << 32
_HIGHEST = 1 << 57

# From here on a word is hardly two 32-bit numbers that happen to stand side by side.
HIGH = 1 << 40

# Allocators hand out addresses that are multiples of this (bytes).
_ALIGNMENT = 256


class Bytes(NamedTuple):
    """What a kernel is given: one parameter, or the packed blob of all."""

    where: str
    data: bytes


class Extent(NamedTuple):
    """Memory that a node names itself: the ends of a copy, the target of a fill. Bytes."""

    where: str
    address: int
    nbytes: int


@dataclass(frozen=True)
class Node:
    """One node. ``path`` is its number; ``4.0`` is node 0 of the child graph that is node 4."""

    path: str
    kind: str
    name: str = ""  # of the kernel
    parts: tuple[Bytes, ...] = ()
    extents: tuple[Extent, ...] = ()
    # Memory that the graph itself allocates here: address and bytes.
    allocates: tuple[int, int] | None = None
    # What of it could not be read, and why.
    unread: tuple[str, ...] = ()


class Word(NamedTuple):
    """Eight bytes of a node that may be a device address."""

    where: str
    offset: int | None  # in the part; None for an extent
    value: int
    # Whether it is an address by what the node is; a word of a parameter may be a number.
    named: bool

    @property
    def looks_like_an_address(self) -> bool:
        """Whether it can hardly be two 32-bit numbers side by side."""
        return self.named or self.value >= HIGH or self.value % _ALIGNMENT == 0


def words(node: Node) -> Iterator[Word]:
    """Every word of ``node`` that may be a device address, in order.

    Pointers in a parameter stand at multiples of eight bytes from its start, as C lays them out.
    Bytes after the last whole word hold none.
    """
    for where, data in node.parts:
        count = len(data) // 8
        for position, value in enumerate(struct.unpack_from(f"<{count}Q", data)):
            if _LOWEST <= value < _HIGHEST:
                yield Word(where, 8 * position, value, False)
    for where, address, _ in node.extents:
        yield Word(where, None, address, True)
