"""RECORD files: rows of path, hash and size, as the wheel format has them."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
from collections.abc import Iterable
from dataclasses import dataclass

from .errors import GraftError

#: Files that an installer adds to a distribution, or that nobody ships.
INSTALLER_FILES = frozenset({"INSTALLER", "REQUESTED", "direct_url.json"})


@dataclass(frozen=True, order=True)
class Row:
    """One file of a distribution. ``hash`` is ``sha256=<urlsafe base64>``, empty for RECORD."""

    path: str
    hash: str
    size: str

    @property
    def by_installer(self) -> bool:
        """True for what pip or uv wrote: scripts, byte code, its own notes."""
        parts = self.path.split("/")
        return (
            self.path.startswith(("../", "/"))
            or self.path.endswith(".pyc")
            or (parts[0].endswith(".dist-info") and parts[-1] in INSTALLER_FILES)
        )


def hash_of(data: bytes) -> str:
    """RECORD's spelling of a sha256.

    >>> hash_of(b"")
    'sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU'
    """
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
    return "sha256=" + digest.rstrip(b"=").decode()


def row_of(path: str, data: bytes) -> Row:
    """The row of a file with these bytes."""
    return Row(path, hash_of(data), str(len(data)))


def parse(text: str) -> list[Row]:
    """Rows of a RECORD. Raises GraftError for a row that does not have three fields."""
    rows = []
    reader = csv.reader(io.StringIO(text, newline=""))
    try:
        for fields in filter(None, reader):
            if len(fields) != 3:
                raise GraftError(f"RECORD line {reader.line_num} has {len(fields)} fields, not 3")
            rows.append(Row(*fields))
    except csv.Error as error:
        raise GraftError(f"RECORD line {reader.line_num} is malformed: {error}") from None
    return rows


def render(rows: Iterable[Row], own_path: str) -> bytes:
    """A RECORD with the given rows, sorted, and its own row (no hash, no size) at the end."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerows((row.path, row.hash, row.size) for row in sorted(rows))
    writer.writerow((own_path, "", ""))
    return out.getvalue().encode()


def digest(rows: Iterable[Row]) -> str:
    """Hash over the sorted ``path,hash`` lines of a release, whatever door it came in by.

    RECORD itself and what an installer adds are left out, so the wheel and its installed copy
    give the same digest.
    """
    lines = sorted(
        f"{row.path},{row.hash}\n"
        for row in rows
        if not row.by_installer and not row.path.endswith(".dist-info/RECORD")
    )
    return hashlib.sha256("".join(lines).encode()).hexdigest()
