"""The delta as one unified patch against the release's source layout, for ``git apply``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

from .delta import Delta

NO_NEWLINE = "\\ No newline at end of file\n"


def _lines(data: bytes) -> list[str]:
    """Lines as git has them: only a line feed ends one (``str.splitlines`` knows ten more)."""
    return re.findall("[^\n]*\n|[^\n]+", data.decode())


def _hunks(before: bytes, after: bytes, path: str, *, new: bool) -> Iterator[str]:
    old, now = _lines(before), _lines(after)
    lines = difflib.unified_diff(old, now, "/dev/null" if new else f"a/{path}", f"b/{path}")
    for line in lines:
        yield line if line.endswith("\n") else f"{line}\n{NO_NEWLINE}"


def patch(delta: Delta) -> Iterator[str]:
    """Lines of the patch: changed modules, then the new package. dist-info is left out."""
    for file in sorted(delta.edited, key=lambda f: f.path):
        yield f"diff --git a/{file.path} b/{file.path}\n"
        yield from _hunks(file.before, file.after, file.path, new=False)
    for path, data in sorted(delta.added.items()):
        yield f"diff --git a/{path} b/{path}\nnew file mode 100644\n"
        yield from _hunks(b"", data, path, new=True)
