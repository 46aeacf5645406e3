"""Real releases and the wheels made of them, each fetched and built once a session."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent
# The build under test, and `wheelfile`, which two of the folders share.
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "wheel")]

# A slow machine is no failure.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")

WheelOf = Callable[[str], Path]


@pytest.fixture(scope="session")
def release_wheel() -> WheelOf:
    """``release_wheel(version)``: path of the upstream wheel, from the cache or from PyPI."""
    from graft.fetch import fetch

    return fetch


@pytest.fixture(scope="session")
def grafted(tmp_path_factory: pytest.TempPathFactory) -> WheelOf:
    """``grafted(version)``: path of the grafted wheel."""
    from graft.build import build

    folder = tmp_path_factory.mktemp("grafted")
    built: dict[str, Path] = {}

    def wheel_of(version: str) -> Path:
        if version not in built:
            built[version] = build(version, folder).wheel
        return built[version]

    return wheel_of
