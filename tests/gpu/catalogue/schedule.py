"""Which case runs when: several at a time, some alone, some after others; a watchdog over all."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .command import last_line, signal_name
from .launch import LOST, Launcher, Running

#: Seconds between looks at what runs.
PAUSE = 0.02
VERDICTS = frozenset({"pass", "fail", "not applicable", "crash", "error"})


@dataclass
class Job:
    """One process to run: a case of a wheel, or what must come before cases."""

    wheel: str
    key: str
    arguments: list[str]
    seconds: float
    alone: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    #: (wheel, key) of jobs that must have ended; those of them that must have passed.
    after: list[tuple[str, str]] = field(default_factory=list)
    only_if: list[tuple[str, str]] = field(default_factory=list)
    result: dict[str, Any] | None = None

    @property
    def name(self) -> tuple[str, str]:
        return self.wheel, self.key


@dataclass
class _Active:
    job: Job
    process: Running
    started: float
    stdout: Path
    stderr: Path
    killed: bool = False


def run(
    jobs: list[Job],
    launchers: dict[str, Launcher],
    folder: Path,
    at_once: int,
    patience: float = 1.0,
    said: Callable[[Job], None] = lambda job: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Run every job, at most ``at_once`` together, and set its ``result``.

    Jobs marked ``alone`` come last, one after another. ``patience`` multiplies every time limit.
    ``said`` is called as each ends. Output goes to files below ``folder``.
    """
    by_name = {job.name: job for job in jobs}
    waiting = sorted(jobs, key=lambda job: (job.alone, -job.seconds))
    active: list[_Active] = []
    try:
        while waiting or active:
            for each in list(active):
                if _ended(each, patience, clock()):
                    active.remove(each)
                    said(each.job)
            job = _next(waiting, active, by_name, at_once)
            if job is None:
                sleep(PAUSE)
                continue
            waiting.remove(job)
            blocked = [name for name in job.only_if if not _passed(by_name.get(name))]
            if blocked:
                other = by_name[blocked[0]]
                note = (other.result or {}).get("note", "")
                job.result = _result("error", f"{other.key} did not pass: {note}"[:300], 0.0)
                said(job)
                continue
            stdout, stderr = (folder / f"{stem(job)}.{end}" for end in ("out", "err"))
            process = launchers[job.wheel].start(job.arguments, stdout, stderr, job.environment)
            active.append(_Active(job, process, clock(), stdout, stderr))
    finally:
        for each in active:
            each.process.kill()


def stem(job: Job) -> str:
    """Name of a job's files, without ``.out`` and ``.err``."""
    return re.sub(r"[^\w.+-]", "_", f"{job.wheel}.{job.key}")


def _passed(job: Job | None) -> bool:
    return job is None or (job.result is not None and job.result["verdict"] == "pass")


def _next(
    waiting: list[Job], active: list[_Active], by_name: dict[tuple[str, str], Job], at_once: int
) -> Job | None:
    if len(active) >= at_once:
        return None
    for job in waiting:
        unmet = [name for name in (*job.after, *job.only_if) if _pending(by_name.get(name))]
        if unmet or (job.alone and (active or any(not other.alone for other in waiting))):
            continue
        return job
    if waiting and not active:
        # What they wait for waits for them: run one rather than none.
        return waiting[0]
    return None


def _pending(job: Job | None) -> bool:
    return job is not None and job.result is None


def _ended(each: _Active, patience: float, now: float) -> bool:
    status = each.process.status()
    took = now - each.started
    if status is None:
        limit = each.job.seconds * patience
        if took > limit and not each.killed:
            each.killed = True
            each.process.kill()
        # A process that cannot be killed (it waits in the driver) is given up.
        if not each.killed or took < limit + 20:
            return False
        status = LOST
    each.job.result = verdict_of(
        status,
        _read(each.stdout),
        _read(each.stderr),
        took,
        limit=each.job.seconds * patience if each.killed else None,
    )
    return True


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def verdict_of(
    status: int, stdout: str, stderr: str, took: float, limit: float | None = None
) -> dict[str, Any]:
    """What a process that ended with ``status`` came to; ``limit``: it was ended at that second."""
    lines = stdout.strip().splitlines()
    seen = _result_in(lines)
    after = f" after it said {seen['verdict']}" if seen else ""
    if limit is not None:
        return _result("hang", f"no end after {limit:.0f} s{after}", took, stderr)
    if status < 0:
        return _result("crash", f"{signal_name(-status)}{after}", took, stderr)
    if status != 0:
        return _result("error", f"exit status {status}: {last_line(stderr)}", took, stderr)
    if seen is None:
        last = lines[-1][:100] if lines else "nothing"
        return _result("error", f"printed no result, but {last!r}", took, stderr)
    result = _result(seen["verdict"], str(seen.get("note", "")), took, stderr)
    result["figures"] = seen.get("figures") or {}
    return result


def _result_in(lines: list[str]) -> dict[str, Any] | None:
    """The result that the last of ``lines`` is, if it is one."""
    try:
        seen = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    return seen if isinstance(seen, dict) and seen.get("verdict") in VERDICTS else None


def _result(verdict: str, note: str, took: float, stderr: str = "") -> dict[str, Any]:
    result: dict[str, Any] = {
        "verdict": verdict,
        "note": note,
        "figures": {},
        "seconds": round(took, 1),
    }
    if verdict in ("error", "crash", "hang") and stderr:
        result["stderr"] = stderr[-1500:]
    return result
