"""The one exception of the build, and the ones that it stands in for."""

from __future__ import annotations

import lzma
import struct
import zipfile
import zlib
from collections.abc import Iterable

#: What zipfile raises on an archive that is damaged or made for other readers. RuntimeError has
#: NotImplementedError below it: encrypted members, unknown methods.
UNREADABLE = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, EOFError, OSError),
    *(RuntimeError, UnicodeDecodeError, IndexError),
)


class GraftError(Exception):
    """Why no wheel was written: a headline and every problem found, not only the first.

    >>> print(GraftError("two sites are not understood", ["a.py:1: x", "a.py:9: y"]))
    two sites are not understood
      a.py:1: x
      a.py:9: y
    """

    def __init__(self, headline: str, problems: Iterable[str] = ()) -> None:
        self.headline = headline
        self.problems = list(problems)
        super().__init__("\n  ".join([headline, *self.problems]))
