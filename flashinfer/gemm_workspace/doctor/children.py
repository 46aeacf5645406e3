"""Runs ``probe.py`` in child processes and reads what they say, up to where they got."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .facts import Missing

PROBE = Path(__file__).with_name("probe.py")

_MARK = "\x1eflashinfer-doctor "

#: Seconds. The driver answers at once or hangs; a first import of torch reads gigabytes.
DRIVER_TIMEOUT, IMPORT_TIMEOUT = 60.0, 300.0

Step = Mapping[str, Any]


def ask_driver(environment: Mapping[str, str]) -> dict[str, Step | Missing]:
    """What ``probe.py driver`` says, by step."""
    return _ask("driver", ("devices",), dict(environment), DRIVER_TIMEOUT)


def ask_python(environment: Mapping[str, str]) -> dict[str, Step | Missing]:
    """What ``probe.py python`` says, by step.

    No GPU is shown to it, so that no import can take memory from a server that runs, and what
    FlashInfer writes on import goes to a folder that is removed.
    """
    steps = ("torch", "frontend", "bindings", "flashinfer", "mapped")
    with tempfile.TemporaryDirectory(prefix="flashinfer-doctor-") as folder:
        shown = {
            **environment,
            "CUDA_VISIBLE_DEVICES": "",
            "FLASHINFER_WORKSPACE_BASE": folder,
        }
        return _ask("python", steps, shown, IMPORT_TIMEOUT)


def _ask(
    what: str, steps: tuple[str, ...], environment: dict[str, str], timeout: float
) -> dict[str, Step | Missing]:
    process = subprocess.Popen(
        # Its search path is this process's, so that both look at the same packages.
        [sys.executable, "-B", *_flags(), str(PROBE), what, json.dumps(sys.path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    )
    ended = ""
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        # Its children too: what hangs may be one of them.
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        ended = f"gave no answer in {timeout:.0f} seconds"
    if not ended and process.returncode:
        ended = _death(process.returncode)
    return read(output.decode("utf-8", "replace"), steps, ended or "ended without an answer")


def _flags() -> list[str]:
    """What this interpreter was started with, as far as it decides what an import finds."""
    flags = sys.flags
    given = (("-I", flags.isolated), ("-E", flags.ignore_environment), ("-S", flags.no_site))
    return [flag for flag, is_set in (*given, ("-s", flags.no_user_site)) if is_set]


def _death(status: int) -> str:
    if status > 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def read(output: str, steps: tuple[str, ...], ended: str) -> dict[str, Step | Missing]:
    """The answer of each step; ``ended`` says how the process went if it has none."""
    said: dict[str, Step | Missing] = {}
    begun: set[str] = set()
    for line in output.split("\n"):  # splitlines() would break at the mark itself
        if not line.startswith(_MARK):
            continue
        try:
            answer = json.loads(line[len(_MARK) :])
        except ValueError:
            continue  # cut off where the process died
        if not isinstance(answer, dict):
            continue
        step = answer.pop("step", None)
        if answer.pop("begins", False):
            begun.add(step)
        elif "error" in answer:
            said[step] = Missing(answer["error"])
        else:
            said[step] = answer
    for step in steps:
        if step not in said:
            where = "in this step" if step in begun else "before this step"
            said[step] = Missing(f"the child process {ended}, {where}")
    return said
