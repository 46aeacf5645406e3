"""The command: wheels in, a table out.

Exit status 0: every wheel that is a fork passes everything that applies; 1: one does not; 2: bad
input, or no CUDA device.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import report, schedule
from .command import exit_status, last_line, output_folder, work_folder, write_whole
from .launch import CHILD, Fresh, Launcher, Server, ServerEnded
from .wheels import BadInput, Wheel, unpack

HARNESS = Path(__file__).resolve().parent.parent
SEND = "On other hardware than SM90, please send these lines (dirty workspaces, plan sizes):"
#: Seconds for importing, and for compiling what a lane's first call compiles.
FACTS_SECONDS, WARM_SECONDS = 240.0, 400.0


@dataclass
class Ready:
    """A wheel that has said what is here."""

    wheel: Wheel
    launcher: Launcher
    how: str
    facts: dict[str, Any]
    cases: list[dict[str, Any]]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="catalogue", description="Run the hazard catalogue over FlashInfer wheels on a GPU."
    )
    made.add_argument("wheels", nargs="*", metavar="[LABEL=]WHEEL", help="a file, or unpacked")
    made.add_argument("-j", "--jobs", type=int, default=6, help="cases at a time (6)")
    made.add_argument(
        "-k", "--only", default="", help="case ids or keys, by commas: B13,B1.fp8-cudnn"
    )
    made.add_argument("-o", "--out", type=Path, default=Path("catalogue-out"), help="folder")
    made.add_argument("--site", action="append", default=[], help="folder with dependencies")
    made.add_argument("--fresh", action="store_true", help="a new interpreter for each case")
    made.add_argument("--patience", type=float, default=1.0, help="multiplies time limits (1)")
    made.add_argument("--work", type=Path, help="folder for unpacked wheels and compiled code")
    made.add_argument("--no-send", action="store_true", help="no lines for us at the end")
    return made


def main(arguments: list[str] | None = None, command: tuple[str, ...] = CHILD) -> int:
    """Run; the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(given)
    try:
        return exit_status("catalogue", lambda: _main(options, given, command))
    except KeyboardInterrupt:
        print("catalogue: interrupted", file=sys.stderr)
        return 130


def _main(options: argparse.Namespace, given: list[str], command: tuple[str, ...]) -> int:
    if options.jobs < 1:
        raise BadInput(f"-j is {options.jobs}, wanted at least 1")
    for site in options.site:
        if not Path(site).is_dir():
            raise BadInput(f"--site {site} is no folder")
    started = time.monotonic()
    with work_folder(options.work, "catalogue") as work:
        for name in ("wheels", "jit", "shared", "logs", "cwd"):
            (work / name).mkdir(parents=True, exist_ok=True)
        wheels = unpack(options.wheels, work / "wheels")
        arch = arch_list()
        output_folder(options.out)
        with ThreadPoolExecutor(len(wheels)) as pool:
            futures = [pool.submit(_ready, wheel, work, options, arch, command) for wheel in wheels]
            ready, failed = [], None
            for future in futures:
                try:
                    ready.append(future.result())
                except BadInput as error:
                    failed = failed or error
        try:
            if failed is not None:
                raise failed
            run = _run(ready, work, options, started, given)
        finally:
            for each in ready:
                each.launcher.close()
        return _write(run, options, started)


def environment_of(wheel: Wheel, work: Path, sites: list[str], arch: str) -> dict[str, str]:
    """The environment of a wheel's processes."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    paths = [str(wheel.folder), *(str(Path(site).resolve()) for site in sites), str(HARNESS)]
    if existing := os.environ.get("PYTHONPATH"):
        paths.append(existing)
    kept.update(
        PYTHONPATH=os.pathsep.join(paths),
        FLASHINFER_WORKSPACE_BASE=str((work / "jit" / wheel.label).resolve()),
        CATALOGUE_SHARED=str((work / "shared").resolve()),
        # Counting devices must not initialise CUDA before the server forks.
        PYTORCH_NVML_BASED_CUDA_CHECK="1",
    )
    if arch:
        kept.setdefault("FLASHINFER_CUDA_ARCH_LIST", arch)
    return kept


def arch_list() -> str:
    """What FlashInfer compiles for, asked without initialising CUDA; empty if it cannot be."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    found = sorted({line.strip() for line in done.stdout.splitlines() if line.strip()})
    return " ".join(f"{each}a" if each.startswith("9.") else each for each in found)


def _ready(
    wheel: Wheel, work: Path, options: argparse.Namespace, arch: str, command: tuple[str, ...]
) -> Ready:
    environment = environment_of(wheel, work, options.site, arch)
    Path(environment["FLASHINFER_WORKSPACE_BASE"]).mkdir(parents=True, exist_ok=True)
    folder = work / "cwd" / wheel.label
    folder.mkdir(parents=True, exist_ok=True)
    why = "as asked"
    if not options.fresh:
        try:
            server = Server(environment, folder, command, FACTS_SECONDS)
        except ServerEnded as error:
            why = f"no server: {error}"
        else:
            answer = _ask(server, wheel, work, "facts", options.patience)
            if "facts" in answer:
                how = "one process a case, forked after the imports"
                return Ready(wheel, server, how, answer["facts"], answer["cases"])
            server.close()
            why = f"cannot fork: {answer.get('no_device') or answer.get('note')}"
    fresh = Fresh(environment, folder, command)
    answer = _ask(fresh, wheel, work, "facts-fresh", options.patience)
    if "no_device" in answer:
        raise BadInput(f"no CUDA device to run on: {answer['no_device']}")
    if "facts" not in answer:
        raise BadInput(f"{wheel.label} does not come up: {answer.get('note')}")
    how = f"one interpreter a case ({why})"
    return Ready(wheel, fresh, how, answer["facts"], answer["cases"])


def _ask(
    launcher: Launcher, wheel: Wheel, work: Path, name: str, patience: float
) -> dict[str, Any]:
    """The facts, or what went wrong as ``note``."""
    logs = work / "logs"
    job = schedule.Job(wheel.label, name, ["facts"], FACTS_SECONDS)
    schedule.run([job], {wheel.label: launcher}, logs, 1, patience)
    stem = schedule.stem(job)
    lines = (logs / f"{stem}.out").read_text(errors="replace").strip().splitlines()
    try:
        answer = json.loads(lines[-1])
    except (IndexError, ValueError):
        answer = None
    if isinstance(answer, dict) and ("facts" in answer or "no_device" in answer):
        return answer
    assert job.result is not None
    return {"note": f"{job.result['note']}; {last_line(job.result.get('stderr', ''))}"[:400]}


def _wanted(case: dict[str, Any], only: str) -> bool:
    names = {name.strip() for name in only.split(",") if name.strip()}
    return not names or bool(names & {case["id"], case["key"], case["lane"]})


def _run(
    ready: list[Ready], work: Path, options: argparse.Namespace, started: float, given: list[str]
) -> dict[str, Any]:
    jobs: list[schedule.Job] = []
    cases: dict[str, dict[str, Any]] = {}
    for each in ready:
        jobs += _jobs(each, ready, options.only, cases)
    if not cases:
        raise BadInput(f"no case is called {options.only}")
    counted = len(jobs)
    done = 0

    def said(job: schedule.Job) -> None:
        nonlocal done
        done += 1
        assert job.result is not None
        seconds = time.monotonic() - started
        print(
            f"[{seconds:6.1f} s, {done}/{counted}] {job.wheel} {job.key}: "
            f"{job.result['verdict']} {job.result['note'][:120]}",
            file=sys.stderr,
            flush=True,
        )

    launchers = {each.wheel.label: each.launcher for each in ready}
    schedule.run(jobs, launchers, work / "logs", options.jobs, options.patience, said)
    results = {job.name: job.result for job in jobs}
    wheels = {}
    for each in ready:
        label = each.wheel.label
        wheels[label] = {
            "source": each.wheel.source,
            "sha256": _sha256(Path(each.wheel.source)),
            "launcher": each.how,
            "facts": each.facts,
            "known": [case["key"] for case in each.cases if case["known"] and case["key"] in cases],
            "results": {
                case["key"]: results.get((label, case["key"]))
                or {
                    "verdict": "not applicable",
                    "note": case["reason_not"],
                    "figures": {},
                    "seconds": 0.0,
                }
                for case in each.cases
                if case["key"] in cases
            },
            "compiled": {
                key: result
                for (name, key), result in results.items()
                if name == label and "warm" in key
            },
        }
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": "python tests/gpu/catalogue " + shlex.join(given),
        "jobs": options.jobs,
        "cases": cases,
        "wheels": wheels,
    }


def _jobs(
    each: Ready, ready: list[Ready], only: str, cases: dict[str, dict[str, Any]]
) -> list[schedule.Job]:
    """The jobs of one wheel; fills ``cases`` with what is known of each case."""
    label, made, lanes = each.wheel.label, [], set()
    for case in each.cases:
        if not _wanted(case, only):
            continue
        cases.setdefault(
            case["key"], {name: case[name] for name in ("id", "lane", "title", "hazards")}
        )
        if case["reason_not"]:
            continue
        job = schedule.Job(
            label,
            case["key"],
            ["run", case["key"]],
            case["seconds"],
            case["alone"],
            case["environment"],
        )
        if case["compiles"]:
            lanes.add(case["lane"])
            job.only_if.append((label, f"warm.{case['lane']}"))
        if case["after_release"] and each.facts["fork"]:
            job.after += [
                (other.wheel.label, case["key"])
                for other in ready
                if not other.facts["fork"] and other.facts["version"] == each.facts["version"]
            ]
        made.append(job)
    warm = [
        schedule.Job(label, f"warm.{lane}", ["warm", lane], WARM_SECONDS) for lane in sorted(lanes)
    ]
    return [*warm, *made]


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def _write(run: dict[str, Any], options: argparse.Namespace, started: float) -> int:
    run["seconds"] = round(time.monotonic() - started, 1)
    write_whole(options.out / "catalogue.json", json.dumps(run, indent=1) + "\n")
    write_whole(options.out / "catalogue.md", report.markdown(run))
    print(report.markdown(run).split("## Figures")[0].rstrip())
    bad = report.failures(run)
    if not options.no_send:
        print(f"\n{SEND}\n\n{report.to_send(run)}")
    print(f"\nwritten: {options.out / 'catalogue.md'}, {options.out / 'catalogue.json'}")
    if bad:
        print("forks that are not fine:\n  " + "\n  ".join(bad))
        return 1
    forks = sum(wheel["facts"]["fork"] for wheel in run["wheels"].values())
    print(f"every fork ({forks}) passes everything that applies" if forks else "no fork among them")
    return 0
