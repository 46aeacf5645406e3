"""Releases and grafts as folders of Python files, to be put on a PYTHONPATH.

The sources for the compiler (``flashinfer/data``) are left out: nothing is compiled here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from graft import delta, writer
from graft.fetch import open_base

HERE = Path(__file__).parent


def write_tree(version: str, folder: Path, *, grafted: bool) -> Path:
    """Write the release, or its graft, below ``folder``."""
    with open_base(version) as source:
        files: dict[str, bytes | str] = {row.path: row.path for row in source.rows}
        if grafted:
            made = delta.make(source)
            files = {path: content for path, content, _ in writer.members(source, made)}
        for path, content in files.items():
            if path.startswith("flashinfer/data/") or not path.endswith(".py"):
                continue
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            data = content if isinstance(content, bytes) else source.store.read(content)
            target.write_bytes(data)
    return folder


def drive(tree: Path, *arguments: str, script: str = "drive.py") -> Any:
    """Run a drive over a tree; its result. An error of the drive itself fails the test."""
    done = subprocess.run(
        [sys.executable, str(HERE / script), *arguments],
        env={**os.environ, "PYTHONPATH": f"{tree}{os.pathsep}{HERE}"},
        check=False,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
