"""Wheels that hold nothing, for the runner of the catalogue."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

STAND_IN = (str(Path(__file__).parent / "stand_in.py"),)


@pytest.fixture
def make_wheel(tmp_path: Path) -> Callable[[str], Path]:
    def make(version: str) -> Path:
        path = tmp_path / f"flashinfer_python-{version}-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("flashinfer/__init__.py", "")
        return path

    return make
