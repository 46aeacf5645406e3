"""Which tuned shape serves a number of tokens.

The autotuner rounds the rows of a GEMM up to a bucket: to a power of two up to 256, to a multiple
of 256 up to 2048, to a multiple of 512 up to 4096, and to a power of two above. Read in releases
0.6.12 to 0.7.4. An engine may give buckets of its own, which a cache file does not tell.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_MOST_TOKENS = 1 << 30


def bucket(tokens: int) -> int:
    """
    >>> [bucket(n) for n in (1, 3, 256, 405, 482, 2048, 2049, 4097)]
    [1, 4, 256, 512, 512, 2048, 2560, 8192]
    """
    for upto, step in ((256, None), (2048, 256), (4096, 512)):
        if tokens <= upto and step:
            return -(-tokens // step) * step
        if tokens <= upto:
            break
    return 1 << (tokens - 1).bit_length() if tokens > 1 else 1


@dataclass(frozen=True)
class Tokens:
    """A range of prompt lengths, both ends included."""

    first: int
    last: int

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"

    def buckets(self) -> list[int]:
        """The buckets that serve it, in order."""
        found = [bucket(self.first)]
        while found[-1] < self.last:
            found.append(bucket(found[-1] + 1))
        return found


def parse(text: str) -> list[Tokens]:
    """``405-482`` or ``1,512,2000-4000``. Raises ValueError for anything else.

    >>> parse("405-482")[0].buckets()
    [512]
    """
    ranges = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,10})(?:\s*-\s*(\d{1,10}))?\s*", part, re.ASCII)
        first = int(found[1]) if found else 0
        last = int(found[2] or found[1]) if found else 0
        if not 1 <= first <= last <= _MOST_TOKENS:
            raise ValueError(
                f"{part!r} is no number of tokens, wanted 1 to {_MOST_TOKENS} or a range like "
                "405-482, several with commas"
            )
        ranges.append(Tokens(first, last))
    return ranges
