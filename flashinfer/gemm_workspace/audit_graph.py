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


# What the words of parameters are: of each part, where it stands and how many words it has.
Layout = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Packed:
    """The whole words of all parts of a node, one behind the other.

    One object where a :class:`Bytes` each would be many, in a graph of thousands of kernels:
    Python's garbage collection goes by the number of objects.
    """

    layout: Layout
    data: bytes

    def __iter__(self) -> Iterator[Bytes]:
        end = 0
        for where, count in self.layout:
            start, end = end, end + 8 * count
            yield Bytes(where, self.data[start:end])


class Node(NamedTuple):
    """One node. ``path`` is its number; ``4.0`` is node 0 of the child graph that is node 4."""

    path: str
    kind: str
    name: str = ""  # of the kernel
    parts: tuple[Bytes, ...] | Packed = ()
    extents: tuple[Extent, ...] = ()
    # Memory that the graph itself allocates here: address and bytes.
    allocates: tuple[int, int] | None = None
    # What of it could not be read, and why.
    unread: tuple[str, ...] = ()


def looks_like_an_address(value: int) -> bool:
    """Whether a word of a parameter can hardly be two 32-bit numbers side by side."""
    return value >= HIGH or value % _ALIGNMENT == 0


def packed(parts: tuple[Bytes, ...] | Packed) -> Packed:
    """``parts`` as one.

    Pointers in a parameter stand at multiples of eight bytes from its start, as C lays them out.
    Bytes after the last whole word hold none.
    """
    if isinstance(parts, Packed):
        return parts
    layout = tuple((where, len(data) // 8) for where, data in parts)
    whole = [data[: 8 * count] for (_, data), (_, count) in zip(parts, layout, strict=True)]
    return Packed(layout, b"".join(whole))


def candidates(data: bytes) -> list[tuple[int, int]]:
    """Number and value of the words that may be device addresses, in order."""
    values = enumerate(struct.unpack_from(f"<{len(data) // 8}Q", data))
    return [(number, value) for number, value in values if _LOWEST <= value < _HIGHEST]


def places(layout: Layout) -> list[tuple[str, int | None]]:
    """Of each word in turn, its part and its offset there in bytes."""
    return [(where, 8 * number) for where, count in layout for number in range(count)]
