"""Ranges of addresses that may overlap: which of them has an address."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from heapq import heappop, heappush


class Ranges:
    """Ranges of which a later one hides what it covers of the earlier ones.

    Sorted at the first question, so that each takes the logarithm of how many there are.
    """

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        """From addresses and bytes."""
        self._ranges = [(start, nbytes) for start, nbytes in ranges if nbytes > 0]
        # Where the answer changes, in order, and what it is from there on.
        self._from: list[int] = []
        self._then: list[tuple[int, int] | None] | None = None

    def find(self, address: int) -> tuple[int, int] | None:
        """The last of the ranges that ``address`` is in."""
        if self._then is None:
            self._then = self._flatten()
        at = bisect_right(self._from, address) - 1
        return None if at < 0 else self._then[at]

    def _flatten(self) -> list[tuple[int, int] | None]:
        ranges = self._ranges
        rising = sorted(range(len(ranges)), key=lambda number: ranges[number][0])
        edges = {start for start, _ in ranges} | {start + nbytes for start, nbytes in ranges}
        then: list[tuple[int, int] | None] = []
        begun = 0
        # Those that have begun, the last of them first; what has ended goes when it comes up.
        last_first: list[int] = []
        self._from = sorted(edges)
        for edge in self._from:
            while begun < len(rising) and ranges[rising[begun]][0] <= edge:
                heappush(last_first, -rising[begun])
                begun += 1
            while last_first and sum(ranges[-last_first[0]]) <= edge:
                heappop(last_first)
            then.append(ranges[-last_first[0]] if last_first else None)
        return then
