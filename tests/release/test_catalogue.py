"""The catalogue's own logic: its cases over real releases, on a pretended GPU.

What the cases find on a real GPU is not shown here. That they run, see a workspace that moves, and
accept one that does not, is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .conftest import Trees
from .trees import HERE

pytestmark = pytest.mark.release

GPU = HERE.parent / "gpu"
CASES = ["B1", "B2", "B3", "B7", "B8", "B9", "B17", "B25", "B30"]


def run(tree: Path, shared: Path, *keys: str) -> dict[str, Any]:
    """Verdict, note and figures by case."""
    done = subprocess.run(
        [sys.executable, str(HERE / "pretend_gpu.py"), *keys],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (tree, HERE, GPU))),
            "CATALOGUE_SHARED": str(shared),
        },
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_release_then_its_graft(tree: Trees, tmp_path: Path) -> None:
    keys = [f"{name}.fp8-cudnn" for name in CASES]
    release = run(tree("0.6.16.post3", grafted=False), tmp_path, *keys)
    assert release["B1.fp8-cudnn"][0] == "fail"
    assert "workspace moved" in release["B1.fp8-cudnn"][2]["a plan of this cuDNN"]
    assert release["B3.fp8-cudnn"][2]["length after"] == 32 * 2**20 + 256
    graft = run(tree("0.6.16.post3", grafted=True), tmp_path, *keys)
    assert {key: seen[0] for key, seen in graft.items()} == dict.fromkeys(keys, "pass")
    assert "CudnnPlanBuildInCaptureError" in graft["B9.fp8-cudnn"][2]["capture"]
    assert graft["B30.fp8-cudnn"][2]["same after growth"]


def test_the_newest_release(tree: Trees, tmp_path: Path) -> None:
    keys = ["B1.bf16-cudnn", "B4.bf16-cudnn", "B12.bf16-cudnn", "B25-plans.bf16-cudnn"]
    seen = run(tree("0.7.4", grafted=False), tmp_path, *keys)
    assert [seen[key][0] for key in keys] == ["pass", "pass", "fail", "fail"]
    assert "CudnnWorkspaceTooSmallInCaptureError" in seen["B4.bf16-cudnn"][1]
    assert seen["B25-plans.bf16-cudnn"][2]["left"] == 32
