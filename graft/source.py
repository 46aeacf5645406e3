"""A release as the graft takes it in: from a wheel file, or from the copy installed here.

Both doors give the same :class:`Source`, checked against its RECORD in both directions.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.parser import BytesParser
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Protocol

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from . import record
from .errors import UNREADABLE, GraftError
from .releases import DISTRIBUTION, FIRST_AFFECTED, RELEASES, Release, state_of

#: zlib's default level: what upstream's wheels were packed with, so that an installed copy packs
#: to the same bytes as its wheel (with the same zlib).
LEVEL = 6
#: Where a grafted wheel says what it is.
PROVENANCE = "graft.json"


@dataclass(frozen=True)
class Packed:
    """A file in the form in which a wheel holds it."""

    method: int
    crc: int
    size: int
    data: bytes


def pack(data: bytes) -> Packed:
    """Deflate ``data`` the way every member of the output is deflated."""
    deflate = zlib.compressobj(LEVEL, zlib.DEFLATED, -15)
    packed = deflate.compress(data) + deflate.flush()
    return Packed(zipfile.ZIP_DEFLATED, zlib.crc32(data), len(data), packed)


class Store(Protocol):
    """Where the bytes of a release are."""

    def read(self, path: str) -> bytes: ...
    def packed(self, path: str) -> Packed: ...
    def executable(self, path: str) -> bool: ...


class WheelStore:
    """The members of a wheel file; unchanged ones are handed on without recompressing."""

    def __init__(self, archive: zipfile.ZipFile, raw: BinaryIO) -> None:
        self._archive = archive
        self._raw = raw

    def read(self, path: str) -> bytes:
        return self._archive.read(path)

    def packed(self, path: str) -> Packed:
        info = self._archive.getinfo(path)
        if info.compress_type not in (zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED):
            return pack(self.read(path))
        self._raw.seek(info.header_offset)
        header = self._raw.read(30)
        name_length, extra_length = struct.unpack("<HH", header[26:30])
        self._raw.seek(name_length + extra_length, os.SEEK_CUR)
        data = self._raw.read(info.compress_size)
        return Packed(info.compress_type, info.CRC, info.file_size, data)

    def executable(self, path: str) -> bool:
        return bool(self._archive.getinfo(path).external_attr >> 16 & 0o111)


class FolderStore:
    """The files of an installed distribution, below a site-packages folder."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self, path: str) -> bytes:
        return (self._root / path).read_bytes()

    def packed(self, path: str) -> Packed:
        return pack(self.read(path))

    def executable(self, path: str) -> bool:
        return bool((self._root / path).stat().st_mode & 0o111)


@dataclass(frozen=True)
class Source:
    """An upstream release, checked."""

    version: str
    #: The row of the release table, or None for a version that is not in it.
    release: Release | None
    #: Of the wheel file (from the table where the installed copy of a known release is used).
    sha256: str | None
    record_sha256: str
    #: Every file but RECORD, sorted by path.
    rows: tuple[record.Row, ...]
    store: Store

    @property
    def dist_info(self) -> str:
        return f"flashinfer_python-{self.version}.dist-info"


def _check_names(names: Iterable[str]) -> None:
    """Refuse a path that would leave the folder it is unpacked to, and one that comes twice."""
    seen: set[str] = set()
    problems = []
    for name in names:
        parts = PurePosixPath(name).parts
        if name.startswith("/") or ".." in parts or "\\" in name or re.match(r"[A-Za-z]:", name):
            problems.append(f"{name}: escapes the folder it is unpacked to")
        if name in seen:
            problems.append(f"{name}: is there twice")
        seen.add(name)
    folders = {str(parent) for name in seen for parent in PurePosixPath(name).parents}
    problems += [f"{name}: is both a file and a folder" for name in sorted(seen & folders)]
    if problems:
        raise GraftError("the archive has paths that no wheel may have", problems)


def _check_record(rows: list[record.Row], names: set[str], own: str, store: Store) -> None:
    """RECORD and files must agree both ways, and every hash must be right."""
    listed = {row.path: row for row in rows}
    problems = [f"{name}: not in RECORD" for name in sorted(names - set(listed) - {own})]
    for path, row in sorted(listed.items()):
        if path == own:
            continue
        if path not in names:
            problems.append(f"{path}: in RECORD, but missing")
        elif not row.hash.startswith("sha256="):
            problems.append(f"{path}: RECORD has no sha256")
        elif record.hash_of(store.read(path)) != row.hash:
            problems.append(f"{path}: altered (its sha256 is not the one in RECORD)")
    if problems:
        raise GraftError("RECORD and the files disagree", problems)


def _identify(version: str, sha256: str | None, digest: str, allow_unknown: bool) -> Release | None:
    """Find the release in the table, or say why it is not one that can be grafted."""
    try:
        parsed = Version(version)
    except InvalidVersion:
        raise GraftError(f"{version!r} is not a version") from None
    if parsed.local is not None:
        raise GraftError(
            f"{version} has a local version label: only an upstream release can be grafted"
        )
    if parsed < FIRST_AFFECTED:
        raise GraftError(
            f"{DISTRIBUTION} {version} is not supported ({state_of(version)}); "
            f"the first supported base is {FIRST_AFFECTED}"
        )
    release = RELEASES.get(version)
    if release is None:
        if not allow_unknown:
            raise GraftError(
                f"{DISTRIBUTION} {version} is not in the table of known releases; "
                "see `python -m graft releases`, or pass --unknown-release to build it "
                "after the same checks"
            )
        return None
    if sha256 is not None and sha256 != release.sha256:
        raise GraftError(
            f"{DISTRIBUTION} {version} is known with sha256 {release.sha256}, "
            f"this wheel has {sha256}: fetch it again"
        )
    if digest != release.record_sha256:
        raise GraftError(
            f"the installed {DISTRIBUTION} {version} is not the released one: its RECORD digest "
            f"is {digest}, wanted {release.record_sha256}; reinstall it or build from the wheel"
        )
    return release


@contextmanager
def open_wheel(path: Path, *, allow_unknown: bool = False) -> Iterator[Source]:
    """Open an upstream wheel. Raises GraftError for anything that is not one."""
    try:
        raw = path.open("rb")
    except OSError as error:
        raise GraftError(f"{path}: {error.strerror}") from None
    with raw:
        sha256 = (
            hashlib.file_digest(raw, "sha256").hexdigest()
            if hasattr(hashlib, "file_digest")
            else hashlib.sha256(raw.read()).hexdigest()
        )
        try:
            archive = zipfile.ZipFile(raw)
        except (*UNREADABLE, ValueError) as error:
            raise GraftError(f"{path}: not a zip archive, or a truncated one ({error})") from None
        with archive:
            try:
                source = _source_of(archive, raw, path, sha256, allow_unknown)
            except UNREADABLE as error:
                raise GraftError(f"{path}: damaged archive ({error})") from None
            yield source


def _source_of(
    archive: zipfile.ZipFile,
    raw: BinaryIO,
    path: Path,
    sha256: str,
    allow_unknown: bool,
) -> Source:
    infos = [info for info in archive.infolist() if not info.is_dir()]
    _check_names(info.filename for info in infos)
    names = {info.filename for info in infos}
    folders = {name.split("/")[0] for name in names if ".dist-info/" in name}
    if len(folders) != 1:
        raise GraftError(f"{path}: has {len(folders)} dist-info folders, a wheel has one")
    (folder,) = folders
    for needed in ("METADATA", "RECORD", "WHEEL"):
        if f"{folder}/{needed}" not in names:
            raise GraftError(f"{path}: has no {folder}/{needed}")
    metadata = BytesParser().parsebytes(archive.read(f"{folder}/METADATA"))
    name, version = str(metadata["Name"]), str(metadata["Version"])
    if canonicalize_name(name) != DISTRIBUTION:
        raise GraftError(f"{path}: is a wheel of {name}, wanted {DISTRIBUTION}")
    refuse_grafted(names, folder, f"{path}")
    if folder != f"flashinfer_python-{version}.dist-info":
        raise GraftError(f"{path}: METADATA says {version}, the dist-info folder is {folder}")
    own = f"{folder}/RECORD"
    rows = record.parse(archive.read(own).decode())
    store = WheelStore(archive, raw)
    release = RELEASES.get(version)
    if release is None or sha256 != release.sha256:
        # The pinned sha256 of a known wheel vouches for every member.
        _check_record(rows, names, own, store)
    rows = sorted(row for row in rows if row.path != own)
    digest = record.digest(rows)
    release = _identify(version, sha256, digest, allow_unknown)
    return Source(version, release, sha256, digest, tuple(rows), store)


def refuse_grafted(names: Iterable[str], folder: str, what: str) -> None:
    """A grafted wheel is never an input: its base is not what its RECORD says."""
    names = set(names)
    if f"{folder}/{PROVENANCE}" in names or "flashinfer/gemm_workspace/__init__.py" in names:
        raise GraftError(f"{what}: is grafted already ({folder}); build from the upstream release")


def installed_version() -> str:
    """Version of the distribution installed in this environment, as its metadata has it."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        raise GraftError(f"{DISTRIBUTION} is not installed in this environment") from None


def check_installed() -> int:
    """Hash the files installed in this environment against their RECORD; say how many.

    Raises GraftError with every file that is missing or altered.
    """
    importlib.invalidate_caches()
    distribution = importlib.metadata.distribution(DISTRIBUTION)
    rows = [row for row in record.parse(distribution.read_text("RECORD") or "") if row.hash]
    root = Path(str(distribution.locate_file("")))
    names = {row.path for row in rows if (root / row.path).is_file()}
    _check_record(rows, names, "", FolderStore(root))
    return len(rows)


@contextmanager
def open_installed(*, allow_unknown: bool = False) -> Iterator[Source]:
    """Open the copy installed in this environment, from its RECORD."""
    version = installed_version()
    distribution = importlib.metadata.distribution(DISTRIBUTION)
    text = distribution.read_text("RECORD")
    if text is None:
        raise GraftError(f"the installed {DISTRIBUTION} {version} has no RECORD: no pip install?")
    rows = [row for row in record.parse(text) if not row.by_installer]
    folder = f"flashinfer_python-{version}.dist-info"
    own = f"{folder}/RECORD"
    _check_names(row.path for row in rows)
    refuse_grafted((row.path for row in rows), folder, f"the installed {DISTRIBUTION}")
    root = Path(str(distribution.locate_file("")))
    names = {row.path for row in rows if (root / row.path).is_file()}
    store = FolderStore(root)
    _check_record(rows, names, own, store)
    rows = sorted(row for row in rows if row.path != own)
    digest = record.digest(rows)
    release = _identify(version, None, digest, allow_unknown)
    sha256 = release.sha256 if release is not None else None
    yield Source(version, release, sha256, digest, tuple(rows), store)
