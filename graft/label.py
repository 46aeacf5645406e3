"""The local version label ``ws.<n>``: one label, one delta.

pip and uv do not reinstall an equal version, so two different deltas must never share a label.
A row of ``LABELS`` whose wheel has left this repository is never changed; a new delta gets the
next number (``python -m graft label`` prints the digest of the delta at hand).
"""

from __future__ import annotations

import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUNTIME = ROOT / "flashinfer" / "gemm_workspace"

#: label number -> digest of the runtime and the edits that it stands for
LABELS = {
    1: "4901606618ef3b75ac7426382c8f9ab7174d2912f9595cb94a2cdae47e19ef60",
}
CURRENT = max(LABELS)


def runtime_files() -> dict[str, bytes]:
    """The files that are laid over a release: path in the wheel -> bytes, sorted."""
    files = {
        path.relative_to(ROOT).as_posix(): path.read_bytes()
        for path in sorted(RUNTIME.rglob("*.py"))
    }
    return dict(sorted(files.items()))


def delta_sha256() -> str:
    """Hash over everything that decides what a grafted wheel holds beside its base."""
    graft = Path(__file__).resolve().parent
    files = runtime_files()
    for path in [
        *sorted((graft / "edits").glob("*.py")),
        graft / "module.py",
        graft / "delta.py",
    ]:
        files[path.relative_to(ROOT).as_posix()] = path.read_bytes()
    digest = hashlib.sha256()
    for name, data in sorted(files.items()):
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()
