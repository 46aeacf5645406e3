"""The local version label ``ws.<n>``: one label, one delta.

pip and uv do not reinstall an equal version, so two different deltas must never share a label.
A row of ``LABELS`` whose wheel has left this repository is never changed; a new delta gets the
next number (``python -m graft label`` prints the row of the delta at hand).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUNTIME = ROOT / "flashinfer" / "gemm_workspace"
#: Modules of the build that decide what a grafted wheel holds.
DECIDING = ("module", "delta", "native", "releases", "record", "source", "writer")


@dataclass(frozen=True)
class Label:
    """What a label stands for."""

    #: Of the files that are laid over the release; the verifier checks a wheel against it.
    runtime: str
    #: Of those, the edits, and the modules of the build that decide what a wheel holds.
    delta: str


LABELS = {
    1: Label(
        runtime="ef7738a03387faa2fe9f9e5d6d62e00aa5a4103fbcfa95dea86f9eeaa39f7f7f",
        delta="56acf2eaf37a425dd12b441c0456b4a1853d5459aa0d4ab5f71011dbbbcd440d",
    ),
}
CURRENT = max(LABELS)


def runtime_files() -> dict[str, bytes]:
    """The files that are laid over a release: path in the wheel -> bytes, sorted."""
    files = {
        path.relative_to(ROOT).as_posix(): path.read_bytes()
        for path in sorted(RUNTIME.rglob("*.py"))
    }
    return dict(sorted(files.items()))


def digest(hashes: Mapping[str, str]) -> str:
    """One hash for files given by path and sha256.

    >>> digest({"a": "1", "b": "2"}) == digest({"b": "2", "a": "1"})
    True
    """
    lines = "".join(f"{path} {sha256}\n" for path, sha256 in sorted(hashes.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def at_hand() -> Label:
    """The label row of this checkout."""
    graft = Path(__file__).resolve().parent
    runtime = _hashes(runtime_files())
    deciding = [*sorted((graft / "edits").glob("*.py")), *(graft / f"{m}.py" for m in DECIDING)]
    build = _hashes({path.relative_to(ROOT).as_posix(): path.read_bytes() for path in deciding})
    return Label(runtime=digest(runtime), delta=digest({**runtime, **build}))


def _hashes(files: Mapping[str, bytes]) -> dict[str, str]:
    return {path: hashlib.sha256(data).hexdigest() for path, data in files.items()}
