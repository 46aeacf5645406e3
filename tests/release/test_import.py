"""``import flashinfer`` of a graft: what it loads, what it says it is, whom it accepts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .conftest import Trees
from .test_drive import BASES

pytestmark = pytest.mark.release

LOOK = """
import json, sys
import flashinfer, flashinfer.gemm.gemm_base, torch
json.dump({
    "version": flashinfer.__version__,
    "modules": sorted(name for name in sys.modules),
    "cuda": torch.cuda.is_initialized(),
    "names": sorted(vars(flashinfer)),
    "gemm_names": sorted(vars(flashinfer.gemm.gemm_base)),
    "utils_names": sorted(vars(flashinfer.utils)),
}, sys.stdout)
"""


def look(*paths: Path) -> Any:
    """Import in a fresh process with ``paths`` on the path; an error fails the test."""
    done = subprocess.run(
        [sys.executable, "-c", LOOK],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("base", BASES)
def test_a_graft_imports_like_its_release(tree: Trees, base: str) -> None:
    """No third-party module more, no CUDA call, no name less, the version of the base."""
    release = look(tree(base, grafted=False))
    graft = look(tree(base, grafted=True))
    more = set(graft["modules"]) - set(release["modules"])
    assert "flashinfer.gemm_workspace" in more
    assert {name for name in more if not name.startswith("flashinfer.gemm_workspace")} == set()
    assert set(release["modules"]) <= set(graft["modules"])
    assert not graft["cuda"]
    assert graft["version"] == release["version"]
    for names in ("names", "gemm_names", "utils_names"):
        assert set(release[names]) <= set(graft[names]), names
    assert {
        "_gemm_workspace_at_least",
        "DEFAULT_WORKSPACE_SIZE",
        "CudnnCaptureUnsafeError",
        "CudnnWorkspaceTooSmallInCaptureError",
        "CudnnPlanBuildInCaptureError",
    } <= set(graft["gemm_names"])


def package(folder: Path, name: str, version: str) -> Path:
    """A wheel that images pin beside flashinfer-python, as far as the import looks at it."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(
        f"__version__ = {version!r}\n"
        "def get_cubin_dir(): return '/nowhere'\n"
        "def get_jit_cache_dir(): return '/nowhere'\n"
        "def get_jit_cache_providers(): return []\n"
    )
    return folder


@pytest.mark.parametrize("base", BASES)
def test_matching_cubin_and_jit_cache_are_accepted(tree: Trees, base: str, tmp_path: Path) -> None:
    """cubin of the base's version, jit-cache of ``<base>+cu130``: what an image pins."""
    cubin = package(tmp_path / "cubin", "flashinfer_cubin", base)
    cache = package(tmp_path / "cache", "flashinfer_jit_cache", f"{base}+cu130")
    assert look(tree(base, grafted=True), cubin, cache)["version"] == base


def test_a_cubin_of_another_version_is_still_refused(tree: Trees, tmp_path: Path) -> None:
    """The release's own check is in force: the acceptance above means something."""
    cubin = package(tmp_path, "flashinfer_cubin", "0.6.1")
    with pytest.raises(AssertionError, match="does not match"):
        look(tree("0.6.16.post3", grafted=True), cubin)


def test_the_command_line_runs(tree: Trees) -> None:
    """What the console script calls, with the commands of the release."""

    def told(folder: Path) -> str:
        done = subprocess.run(
            [sys.executable, "-c", "from flashinfer.__main__ import cli; cli()", "--help"],
            env={**os.environ, "PYTHONPATH": str(folder)},
            check=False,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    graft = told(tree("0.6.16.post3", grafted=True))
    assert "show-config" in graft
    assert graft == told(tree("0.6.16.post3", grafted=False))
