"""Searching logs."""

from __future__ import annotations

import gzip
import io
import os
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashinfer.gemm_workspace.doctor import logs
from flashinfer.gemm_workspace.doctor.facts import Missing
from flashinfer.gemm_workspace.doctor.logs import MARKS, Found, Log, scan

GATE = "WARNING Skipping cuDNN in bmm_fp8 auto candidates on SM12x: cuDNN backend version 92000"
REFUSED = "flashinfer.gemm_workspace.errors.CudnnPlanBuildInCaptureError: cuDNN plan for (4, 4)"
FAULT = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"


def scanned(path: Path) -> Log:
    log = scan(path)
    assert isinstance(log, Log), log
    return log


def test_what_is_found(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text("\n".join(["start", GATE, "x", REFUSED, REFUSED, FAULT, "end"]))
    log = scanned(path)
    assert log.lines == 7
    assert log.stopped is None
    assert log.found == {
        "gate": Found(1, 2, GATE),
        "refused": Found(2, 4, REFUSED),
        "fault": Found(1, 6, FAULT),
    }


def test_an_empty_log(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text("")
    assert scanned(path) == Log(str(path), 0, {})


def test_gzip_whole_and_cut(tmp_path: Path) -> None:
    path = tmp_path / "server.log.gz"
    path.write_bytes(gzip.compress(f"a\n{GATE}\n".encode()))
    assert scanned(path).found == {"gate": Found(1, 2, GATE)}
    rows = os.urandom(40_000).hex()
    path.write_bytes(gzip.compress(f"{GATE}\n{rows}\n{GATE}\n".encode())[:-20])
    log = scanned(path)
    assert log.stopped is not None
    path.write_bytes(b"\x1f\x8b" + b"no gzip at all")
    assert scanned(path).stopped is not None


def test_what_is_no_log(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, reason in (
        (tmp_path / "none", "No such file"),
        (tmp_path, "not a file"),
        (tmp_path / "pipe", "not a file"),
        (Path("a\0b"), "null"),
    ):
        log = scan(path)
        assert isinstance(log, Missing)
        assert reason in log.reason


LINE = st.one_of(
    st.binary(max_size=30).map(lambda text: text.replace(b"\n", b"")),
    st.sampled_from([mark for marks in MARKS.values() for mark in marks]),
)


@given(st.lists(LINE), st.booleans(), st.integers(1, 200))
def test_as_a_search_line_by_line(lines: list[bytes], ends: bool, chunk: int) -> None:
    data = b"\n".join(lines) + (b"\n" if ends and lines else b"")
    wanted: dict[str, list[int]] = {}
    listed = data.split(b"\n")
    for number, line in enumerate(listed, start=1):
        for kind, marks in MARKS.items():
            if any(mark in line for mark in marks):
                wanted.setdefault(kind, []).append(number)
    stream = io.BytesIO(data)
    read = stream.read
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logs, "_CHUNK", chunk)
        log = logs._scan("log", stream)
    assert read() == b""
    assert {k: (f.lines, f.first_line) for k, f in log.found.items()} == {
        kind: (len(numbers), numbers[0]) for kind, numbers in wanted.items()
    }
    assert log.lines == len(listed) - (not listed[-1])


class _Endless(io.RawIOBase):
    """64 MiB, of one line or of many."""

    def __init__(self, chunk: bytes) -> None:
        self.chunk, self.left = chunk, (64 << 20) // len(chunk)

    def read(self, size: int = -1) -> bytes:
        self.left -= 1
        return self.chunk if self.left >= 0 else b""


@pytest.mark.parametrize("line", [b"x" * 64, b"x" * 63 + b"\n"])
def test_memory_does_not_grow_with_the_log(line: bytes) -> None:
    chunk = line * (1 << 14)
    tracemalloc.start()
    logs._scan("log", _Endless(chunk))  # type: ignore[arg-type]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 << 20


def test_a_mark_at_the_end_of_a_long_line_of_many_reads(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_bytes(b"x" * (3 << 20) + GATE.encode() + b"\nnext " + GATE.encode())
    found = scanned(path).found["gate"]
    assert (found.lines, found.first_line) == (2, 1)
