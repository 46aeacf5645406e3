"""Trees of releases and grafts, written once a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from .trees import write_tree

Trees = Callable[..., Path]


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Trees:
    """``tree(version, grafted=True)``: a folder for PYTHONPATH."""
    made: dict[tuple[str, bool], Path] = {}

    def get(version: str, *, grafted: bool) -> Path:
        key = version, grafted
        if key not in made:
            made[key] = write_tree(version, tmp_path_factory.mktemp("tree"), grafted=grafted)
        return made[key]

    return get
