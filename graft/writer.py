"""Writes the wheel: the same bytes for the same input, and whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from . import record
from .delta import Delta
from .errors import GraftError
from .source import Packed, Source, pack
from .verify import Proof

#: 1980-01-01 00:00:00, the first moment a zip archive can name.
DOS_TIME, DOS_DATE = 0, (1 << 5) | 1
#: Zip without the 64-bit extension; a larger wheel is refused.
MAX_BYTES, MAX_MEMBERS = (1 << 32) - 1, (1 << 16) - 1


class ZipWriter:
    """A zip archive of packed members, in the order given.

    ``zipfile`` cannot take over a member that is compressed already, which is most of a wheel.
    """

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._offset = 0
        self._directory: list[bytes] = []

    def add(self, name: str, member: Packed, *, executable: bool) -> None:
        """Append one member. Raises GraftError if the archive would outgrow the format."""
        encoded = name.encode()
        utf8 = 0 if encoded.isascii() else 0x800
        common = struct.pack(
            "<HHHHHIIIHH",
            20,
            utf8,
            member.method,
            DOS_TIME,
            DOS_DATE,
            member.crc,
            len(member.data),
            member.size,
            len(encoded),
            0,
        )
        mode = 0o100755 if executable else 0o100644
        self._directory.append(
            b"PK\x01\x02"
            + struct.pack("<BB", 20, 3)  # made by: version 2.0 on Unix
            + common
            + struct.pack("<HHHII", 0, 0, 0, mode << 16, self._offset)
            + encoded
        )
        self._write(b"PK\x03\x04" + common + encoded)
        self._write(member.data)
        if len(self._directory) > MAX_MEMBERS:
            raise GraftError(f"more than {MAX_MEMBERS} files: needs zip64, which is not written")

    def close(self) -> None:
        """Append the central directory."""
        start = self._offset
        for entry in self._directory:
            self._write(entry)
        count = len(self._directory)
        size = self._offset - start
        self._write(b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, count, count, size, start, 0))

    def _write(self, data: bytes) -> None:
        if self._offset + len(data) > MAX_BYTES:
            raise GraftError("the wheel would pass 4 GiB: needs zip64, which is not written")
        self._out.write(data)
        self._offset += len(data)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file that appears at ``path`` complete, or does not appear.

    Where the system has unnamed temporary files a killed process leaves nothing behind at all.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _unnamed(path.parent) as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
            _publish(out, path)
    except OSError as error:
        raise GraftError(f"cannot write {path}: {error.strerror}") from None


def _unnamed(folder: Path) -> BinaryIO:
    """A file without a name, on the file system of ``folder`` where that is possible."""
    with contextlib.suppress(AttributeError, OSError):
        return os.fdopen(os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o666), "w+b")
    return tempfile.TemporaryFile(dir=folder)


def _publish(out: BinaryIO, path: Path) -> None:
    """Give the file its name in one step, over an older one if need be."""
    with contextlib.suppress(OSError, NotImplementedError):
        # Where nothing stands yet no other name is needed, which a killed process would leave.
        _link(out, path)
        return
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".graft-") as folder:
        named = Path(folder, path.name)
        try:
            _link(out, named)
        except (OSError, NotImplementedError):
            out.seek(0)
            with named.open("xb") as copy:
                shutil.copyfileobj(out, copy)
                copy.flush()
                os.fsync(copy.fileno())
        os.replace(named, path)


def _link(out: BinaryIO, path: Path) -> None:
    """Name an unnamed file. Raises FileExistsError if the name is taken."""
    # The descriptor is given only to make Python call linkat(), which can follow the link.
    source = f"/proc/self/fd/{out.fileno()}"
    os.link(source, path, src_dir_fd=out.fileno(), follow_symlinks=True)


def wheel_name(delta: Delta) -> str:
    """File name of the output."""
    return f"flashinfer_python-{delta.version}-{delta.tag}.whl"


def members(source: Source, delta: Delta) -> Iterator[tuple[str, bytes | str, record.Row]]:
    """Every file of the output but RECORD: ``(path, bytes or path in the source, row)``.

    Sorted, with dist-info last, as the wheel format recommends.
    """
    replaced = {file.path: file.after for file in delta.edited} | dict(delta.added)
    replaced |= delta.metadata
    out: dict[str, tuple[bytes | str, record.Row]] = {}
    for row in source.rows:
        path = row.path
        if path.startswith(f"{source.dist_info}/"):
            path = delta.dist_info + path[len(source.dist_info) :]
        out[path] = (row.path, record.Row(path, row.hash, row.size))
    for path, data in replaced.items():
        out[path] = (data, record.row_of(path, data))
    for path in sorted(out, key=lambda p: (p.startswith(f"{delta.dist_info}/"), p)):
        yield path, *out[path]


@dataclass(frozen=True)
class Written:
    """A finished wheel and what the check said of it."""

    path: Path
    sha256: str
    proofs: list[Proof]


def write(
    source: Source, delta: Delta, folder: Path, check: Callable[[BinaryIO], list[Proof]]
) -> Written:
    """Write the wheel into ``folder``; it gets its name only after ``check`` has passed it."""
    target = folder / wheel_name(delta)
    with whole_file(target) as out:
        archive = ZipWriter(out)
        rows = []
        for path, content, row in members(source, delta):
            rows.append(row)
            if isinstance(content, bytes):
                archive.add(path, pack(content), executable=False)
            else:
                store = source.store
                archive.add(path, store.packed(content), executable=store.executable(content))
        own = f"{delta.dist_info}/RECORD"
        archive.add(own, pack(record.render(rows, own)), executable=False)
        archive.close()
        out.flush()
        out.seek(0)
        proofs = check(out)
        out.seek(0)
        digest = hashlib.sha256()
        while chunk := out.read(1 << 20):
            digest.update(chunk)
    return Written(target, digest.hexdigest(), proofs)
