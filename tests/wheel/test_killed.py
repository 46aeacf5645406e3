"""Killed in the middle: the output is absent or whole, and nothing else is in the folder."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from wheelfile import ROOT

from graft.build import build
from graft.verify import verify

pytestmark = pytest.mark.release

BASE = "0.6.16.post3"
POINTS = 12
WheelOf = Callable[[str], Path]


def command(folder: Path, wheel: Path) -> list[str]:
    return [sys.executable, "-m", "graft", "build", str(wheel), "-o", str(folder)]


@pytest.fixture(scope="module")
def seconds(tmp_path_factory: pytest.TempPathFactory, release_wheel: WheelOf) -> float:
    """How long a build takes here and now."""
    folder = tmp_path_factory.mktemp("measured")
    start = time.perf_counter()
    subprocess.run(
        command(folder, release_wheel(BASE)), cwd=ROOT, check=True, stdout=subprocess.DEVNULL
    )
    return time.perf_counter() - start


def test_absent_or_whole(
    tmp_path: Path, release_wheel: WheelOf, grafted: WheelOf, seconds: float
) -> None:
    wheel = release_wheel(BASE)
    target = tmp_path / grafted(BASE).name
    outcomes = []
    for point in range(1, POINTS + 1):
        older = point % 3 == 0
        target.unlink(missing_ok=True)
        if older:
            target.write_bytes(b"older")
        with contextlib.suppress(subprocess.TimeoutExpired):
            # At the end of its time the process gets SIGKILL.
            subprocess.run(
                command(tmp_path, wheel),
                cwd=ROOT,
                check=True,
                stdout=subprocess.DEVNULL,
                timeout=seconds * point / POINTS,
            )
        assert {path.name for path in tmp_path.iterdir()} <= {target.name}
        if target.exists() and target.read_bytes() != b"older":
            verify(target)
            outcomes.append("whole")
        else:
            assert target.exists() is older
            outcomes.append("absent")
    assert "absent" in outcomes  # or the points were no points


#: The calls that give the output its name or make sure of it, with what must be there afterwards:
#: nothing, what was there before, or the new one.
CALLS = [
    ("os.fsync", "before", "nothing", "nothing"),
    ("os.fsync", "before", "older", "older"),
    ("os.link", "before", "nothing", "nothing"),
    ("os.link", "after", "nothing", "new"),
    ("os.link", "after", "older", "older"),
    ("os.replace", "before", "older", "older"),
    ("os.replace", "after", "older", "new"),
]
#: Runs the command with one function that kills the process.
DRIVER = """
import os, runpy, signal, sys
module, name, when = sys.argv[1:4]
home = __import__(module)
plain = getattr(home, name)
def fatal(*arguments, **named):
    if when == "after":
        plain(*arguments, **named)
    os.kill(os.getpid(), signal.SIGKILL)
setattr(home, name, fatal)
sys.argv = ["graft", *sys.argv[4:]]
runpy.run_module("graft", run_name="__main__")
"""


@pytest.mark.parametrize(("call", "when", "before", "after"), CALLS)
def test_killed_at_a_call(
    tmp_path: Path,
    release_wheel: WheelOf,
    grafted: WheelOf,
    call: str,
    when: str,
    before: str,
    after: str,
) -> None:
    wheel = release_wheel(BASE)
    target = tmp_path / grafted(BASE).name
    if before == "older":
        target.write_bytes(b"older")
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, *call.split("."), when, *command(tmp_path, wheel)[3:]],
        cwd=ROOT,
        check=False,
        stdout=subprocess.DEVNULL,
    )
    assert done.returncode == -signal.SIGKILL
    if after == "new":
        verify(target)
    else:
        assert target.exists() is (after == "older")
        assert after == "nothing" or target.read_bytes() == b"older"
    left = {path.name for path in tmp_path.iterdir()} - {target.name}
    if before == "older" and call != "os.fsync":
        # Over an older one the new one has for a moment a name of its own, in a folder of its own.
        assert len(left) <= 1
        assert build(str(wheel), tmp_path).wheel == target  # the next build is none the worse
        verify(target)
    else:
        assert not left
