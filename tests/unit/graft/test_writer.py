"""The zip archive and the file that appears whole or not at all."""

from __future__ import annotations

import errno
import io
import os
import shutil
import stat
import subprocess
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graft import writer
from graft.errors import GraftError
from graft.source import Packed, pack
from graft.writer import ZipWriter, whole_file

MEMBERS = {
    "a/empty.py": (b"", False),
    "a/größe/語.py": (b"x = 1\n" * 1000, False),
    "bin/run": (b"#!/bin/sh\n", True),
}


def archive_of(members: dict[str, tuple[bytes, bool]]) -> bytes:
    out = io.BytesIO()
    archive = ZipWriter(out)
    for name, (data, executable) in members.items():
        archive.add(name, pack(data), executable=executable)
    archive.close()
    return out.getvalue()


@given(
    st.dictionaries(
        st.text(st.sampled_from("abc/é語😀"), min_size=1, max_size=8).filter(
            lambda name: not name.endswith("/")
        ),
        st.tuples(st.binary(max_size=50), st.booleans()),
        max_size=6,
    )
)
def test_zipfile_reads_what_is_written(members: dict[str, tuple[bytes, bool]]) -> None:
    with zipfile.ZipFile(io.BytesIO(archive_of(members))) as archive:
        assert archive.testzip() is None
        assert archive.namelist() == list(members)
        for info in archive.infolist():
            data, executable = members[info.filename]
            assert archive.read(info) == data
            assert info.external_attr >> 16 == stat.S_IFREG | (0o755 if executable else 0o644)
            assert info.date_time == (1980, 1, 1, 0, 0, 0)


def test_a_stored_member_is_taken_over_as_it_is() -> None:
    out = io.BytesIO()
    archive = ZipWriter(out)
    archive.add("a", Packed(zipfile.ZIP_STORED, zlib.crc32(b"xyz"), 3, b"xyz"), executable=False)
    archive.close()
    with zipfile.ZipFile(out) as read:
        assert read.read("a") == b"xyz"
        assert read.getinfo("a").compress_type == zipfile.ZIP_STORED


@pytest.mark.skipif(shutil.which("unzip") is None, reason="no unzip here")
def test_unzip_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    path.write_bytes(archive_of(MEMBERS))
    done = subprocess.run(["unzip", "-t", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    subprocess.run(
        ["unzip", "-q", path, "-d", tmp_path / "out"], check=True, env={"LC_ALL": "C.UTF-8"}
    )
    for name, (data, executable) in MEMBERS.items():
        out = tmp_path / "out" / name
        assert out.read_bytes() == data
        assert bool(out.stat().st_mode & 0o100) is executable


@pytest.mark.parametrize(("limit", "most"), [("MAX_BYTES", 200), ("MAX_MEMBERS", 2)])
def test_what_would_need_zip64_is_refused(
    monkeypatch: pytest.MonkeyPatch, limit: str, most: int
) -> None:
    monkeypatch.setattr(writer, limit, most)
    with pytest.raises(GraftError, match="zip64"):
        archive_of(MEMBERS)


def no_unnamed_files(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = os.open

    def without(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return plain(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", without)


def no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)


def links_not_implemented(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(os, "link", refuse)


def neither(monkeypatch: pytest.MonkeyPatch) -> None:
    no_unnamed_files(monkeypatch)
    no_links(monkeypatch)


SYSTEMS = [lambda _: None, no_unnamed_files, no_links, links_not_implemented, neither]
System = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(params=SYSTEMS, ids=["linux", "no O_TMPFILE", "no link", "no linkat", "neither"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> System:
    """With and without unnamed files and links to them."""
    request.param(monkeypatch)
    return request.param  # type: ignore[no-any-return]


def fail_after_half(path: Path, error: Exception) -> None:
    with whole_file(path) as out:
        out.write(b"half")
        raise error


@pytest.mark.usefixtures("system")
class TestWholeFile:
    def test_appears_with_its_content_and_nothing_beside_it(self, tmp_path: Path) -> None:
        path = tmp_path / "new" / "folder" / "a.whl"
        with whole_file(path) as out:
            out.write(b"content")
            out.flush()
            assert not list(path.parent.iterdir()) or not path.exists()
        assert path.read_bytes() == b"content"
        assert list(path.parent.iterdir()) == [path]

    def test_replaces_an_older_one(self, tmp_path: Path) -> None:
        path = tmp_path / "a.whl"
        path.write_bytes(b"older")
        with whole_file(path) as out:
            out.write(b"newer")
            assert path.read_bytes() == b"older"
        assert path.read_bytes() == b"newer"
        assert list(tmp_path.iterdir()) == [path]

    def test_an_error_inside_leaves_nothing(self, tmp_path: Path) -> None:
        path = tmp_path / "a.whl"

        with pytest.raises(KeyError):
            fail_after_half(path, KeyError("x"))
        assert not list(tmp_path.iterdir())

    def test_an_error_inside_keeps_the_older_one(self, tmp_path: Path) -> None:
        path = tmp_path / "a.whl"
        path.write_bytes(b"older")

        with pytest.raises(GraftError, match="No space left"):
            fail_after_half(path, OSError(28, "No space left on device"))
        assert path.read_bytes() == b"older"
        assert list(tmp_path.iterdir()) == [path]

    @pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0, 0o666)])
    def test_has_the_mode_of_an_ordinary_file(self, tmp_path: Path, mask: int, mode: int) -> None:
        before = os.umask(mask)
        try:
            with whole_file(tmp_path / "a.whl") as out:
                out.write(b"x")
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / "a.whl").stat().st_mode) == mode


def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(GraftError, match="cannot write"), whole_file(tmp_path / "file" / "a"):
        pass
