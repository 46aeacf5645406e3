"""Finds, in a server's log, the lines that tell what the workspaces and the gate did.

Streaming: a log of gigabytes takes as much memory as one of megabytes, and of a line that is longer
than 64 KiB the middle may be left out. gzip is understood.
"""

from __future__ import annotations

import gzip
import re
import stat
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from .facts import Missing

_CHUNK = 1 << 20
_LINE = 1 << 16  # bytes of an unfinished line that are kept

#: What is looked for: name -> bytes of which one is in the line.
MARKS: dict[str, tuple[bytes, ...]] = {
    "gate": (b"Skipping cuDNN in bmm_fp8 auto candidates on SM12x",),
    "growth": (b"GEMM workspace grew",),
    "refused": (b"CudnnPlanBuildInCaptureError", b"CudnnWorkspaceTooSmallInCaptureError"),
    "allowed": (b"FLASHINFER_ALLOW_CUDNN_PLAN_BUILD_IN_CAPTURE=1.",),
    "capture": (b"operation failed due to a previous error during capture",),
    "sealed": (b"workspaces are sealed",),
    "lanes": (b" workspaces are in use: ",),
    "memory": (b"GemmWorkspaceError",),
    "fault": (
        b"an illegal memory access was encountered",
        b"misaligned address",
        b"CUDA_ERROR_ILLEGAL_ADDRESS",
        b"NVRM: Xid",
    ),
    "cache": (b"[Autotuner]: Cache file", b"[Autotuner]: Not saving configs"),
}
_ANY = re.compile(b"|".join(re.escape(mark) for marks in MARKS.values() for mark in marks))
_KIND = {mark: kind for kind, marks in MARKS.items() for mark in marks}


@dataclass(frozen=True)
class Found:
    """Lines of one kind: how many, and the first."""

    lines: int
    first_line: int
    first_text: str


@dataclass(frozen=True)
class Log:
    """What one log file says."""

    path: str
    lines: int
    found: dict[str, Found]
    #: Why reading stopped before the end, if it did.
    stopped: str | None = None


def scan(path: Path) -> Log | Missing:
    """Look through ``path``."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return Missing(f"{path}: not a file")
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            # The protocol of a binary stream is all that is used of either.
            stream: BinaryIO = gzip.GzipFile(fileobj=raw) if packed else raw  # type: ignore[assignment]
            return _scan(str(path), stream)
    except OSError as error:
        return Missing(f"{path}: {error.strerror or error}")
    except ValueError as error:  # a name that no file can have
        return Missing(f"{str(path)!r}: {error}")


def _scan(path: str, stream: BinaryIO) -> Log:
    found: dict[str, Found] = {}
    number, stopped = 0, None
    try:
        for block in _blocks(stream):
            # Nearly every block has no mark, and finding that out is a search for bytes.
            if any(mark in block for mark in _KIND):
                for offset, line in enumerate(block.split(b"\n"), start=1):
                    _note(found, line, number + offset)
            number += block.count(b"\n") + (not block.endswith(b"\n"))
    except (OSError, EOFError, zlib.error) as error:
        stopped = f"stopped after line {number}: {error}"
    return Log(path, number, found, stopped)


def _note(found: dict[str, Found], line: bytes, number: int) -> None:
    for kind in {_KIND[mark] for mark in _ANY.findall(line)}:
        first = found.get(kind)
        text = line[:2000].decode("utf-8", "replace").strip()
        found[kind] = replace(first, lines=first.lines + 1) if first else Found(1, number, text)


def _blocks(stream: BinaryIO) -> Iterator[bytes]:
    """Whole lines, as many at a time as a read gives."""
    begun = b""
    while chunk := stream.read(_CHUNK):
        end = chunk.rfind(b"\n") + 1
        if end:
            yield begun + chunk[:end]
            begun = chunk[end:][:_LINE]
        else:
            begun = (begun + chunk)[:_LINE]
    if begun:
        yield begun
