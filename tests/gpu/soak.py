"""Soak: the same server, step for step, over several wheels; figures and samples as JSON.

::

    python tests/gpu/soak.py RELEASE.whl FORK.whl [-o soak-out] [--minutes 4] [--steps N]

The first wheel runs for ``--minutes`` (``$SOAK_MINUTES``, 4); the others do as many steps, for at
most twice as long. ``--steps`` fixes the number instead. ``plot_soak.py`` draws the result.
``--sanitize`` runs a short one under compute-sanitizer's memcheck instead (see README.md there).

Exit status 0: every fork has 0 wrong results, 0 canary hits and did not die; 1: one does not; 2:
bad input, no CUDA device, or no compute-sanitizer.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from catalogue.command import exit_status, last_line, output_folder, work_folder, write_whole
from catalogue.runner import FACTS_SECONDS, WARM_SECONDS, arch_list, environment_of
from catalogue.wheels import BadInput, Wheel, unpack

COLUMNS = (
    "steps",
    "calls",
    "replays",
    "captures",
    "refused",
    "wrong_calls",
    "wrong_replays",
    "canary_hits",
    "canary_bytes",
    "plans_cached",
    "plans_held",
    "lanes",
    "device_bytes",
    "call_us_p50",
    "call_us_p99",
    "replay_us_p50",
    "replay_us_p99",
    "seconds",
    "died",
)
#: Where CUDA toolkits put it, beside the PATH.
SANITIZERS = ("compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="soak", description="The same server over several wheels.")
    made.add_argument("wheels", nargs="*", metavar="[LABEL=]WHEEL")
    made.add_argument("--minutes", type=float, default=float(os.environ.get("SOAK_MINUTES", "4")))
    made.add_argument("--steps", type=int)
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("-o", "--out", type=Path, default=Path("soak-out"))
    made.add_argument("--site", action="append", default=[])
    made.add_argument("--work", type=Path)
    made.add_argument("--sanitize", action="store_true", help="short, under compute-sanitizer")
    made.add_argument("--sanitize-seconds", type=float, default=900.0)
    return made


def main(arguments: list[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(given)
    return exit_status("soak", lambda: _main(options, given))


def _main(options: argparse.Namespace, given: list[str]) -> int:
    if options.minutes <= 0 or (options.steps is not None and options.steps < 1):
        raise BadInput("--minutes and --steps must be more than 0")
    sanitizer = _sanitizer() if options.sanitize else ""
    with work_folder(options.work, "soak") as work:
        (work / "wheels").mkdir(parents=True, exist_ok=True)
        wheels = unpack(options.wheels, work / "wheels")
        arch = arch_list()
        output_folder(options.out)
        runs: dict[str, Any] = {}
        steps = options.steps
        for wheel in wheels:
            environment = environment_of(wheel, work, options.site, arch)
            Path(environment["FLASHINFER_WORKSPACE_BASE"]).mkdir(parents=True, exist_ok=True)
            facts = _facts(wheel, environment, work)
            if facts["data"]:
                _warm(environment, work)
            if options.sanitize:
                runs[wheel.label] = _sanitized(wheel, environment, work, options, sanitizer)
            else:
                limit = options.minutes if steps is None else 2 * options.minutes
                seen = _served(wheel, environment, work, options, steps, limit)
                runs[wheel.label] = seen
                if steps is None and not seen["figures"].get("died"):
                    steps = seen["figures"]["steps"]
            runs[wheel.label]["facts"] = facts
    result = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": "python tests/gpu/soak.py " + shlex.join(given),
        "seed": options.seed,
        "runs": runs,
    }
    return _write(result, options)


def _facts(wheel: Wheel, environment: dict[str, str], work: Path) -> dict[str, Any]:
    done = _child(["-m", "catalogue.child", "facts"], environment, work, FACTS_SECONDS)
    try:
        answer = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        last = last_line(done.stderr)
        raise BadInput(f"{wheel.label} does not come up: {last}") from None
    if "no_device" in answer:
        raise BadInput(f"no CUDA device to run on: {answer['no_device']}")
    facts: dict[str, Any] = answer["facts"]
    return facts


def _child(
    arguments: list[str], environment: dict[str, str], work: Path, seconds: float
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            [sys.executable, *arguments],
            env=environment,
            cwd=work,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as hang:
        return subprocess.CompletedProcess(hang.cmd, 124, "", f"no end after {seconds:.0f} s")


def _warm(environment: dict[str, str], work: Path) -> None:
    """Compile what the cuBLAS layer compiles, outside the measured time."""
    done = _child(["-m", "catalogue.child", "warm", "fp8-cublas"], environment, work, WARM_SECONDS)
    if done.returncode:
        raise BadInput(f"the cuBLAS module does not compile: {last_line(done.stderr)}")


def _serving(samples: Path, seed: int, steps: int | None, minutes: float) -> list[str]:
    arguments = ["-m", "catalogue.serving", "--seed", str(seed), "--minutes", str(minutes)]
    if steps is not None:
        arguments += ["--steps", str(steps)]
    return [*arguments, "--out", str(samples)]


def _served(
    wheel: Wheel,
    environment: dict[str, str],
    work: Path,
    options: argparse.Namespace,
    steps: int | None,
    minutes: float,
) -> dict[str, Any]:
    name = re.sub(r"[^\w.+-]", "_", wheel.label)
    samples = work.resolve() / f"{name}.jsonl"
    print(f"soak: {wheel.label}, at most {minutes:g} minutes", file=sys.stderr, flush=True)
    done = _child(
        _serving(samples, options.seed, steps, minutes), environment, work, 60 * minutes + 300
    )
    lines = samples.read_text().splitlines() if samples.is_file() else []
    read = [json.loads(line) for line in lines]
    figures = dict(read[-1]) if read else {}
    if done.returncode or not figures.get("done"):
        figures["died"] = f"exit status {done.returncode}: {last_line(done.stderr)}"
    return {"figures": figures, "samples": read}


def _sanitizer() -> str:
    for name in SANITIZERS:
        if found := shutil.which(name):
            return found
    raise BadInput("no compute-sanitizer on the PATH: it comes with the CUDA toolkit")


def _sanitized(
    wheel: Wheel,
    environment: dict[str, str],
    work: Path,
    options: argparse.Namespace,
    sanitizer: str,
) -> dict[str, Any]:
    samples = work.resolve() / "sanitized.jsonl"
    samples.unlink(missing_ok=True)
    log = work.resolve() / "sanitizer.log"
    steps = options.steps or 60
    child = [sys.executable, *_serving(samples, options.seed, steps, 1e6), "--short"]
    # Errors that API calls return are not accesses: cuda-python looks up functions that this
    # driver has not, and torch asks what it expects to be refused.
    command = [sanitizer, "--tool", "memcheck", "--report-api-errors", "no"]
    command += ["--log-file", str(log), "--error-exitcode", "9"]
    print(f"soak: {wheel.label} under {sanitizer}, {steps} steps", file=sys.stderr, flush=True)
    try:
        done = subprocess.run(
            [*command, *child],
            env=environment,
            cwd=work,
            capture_output=True,
            text=True,
            timeout=options.sanitize_seconds,
            check=False,
        )
        status, stderr = done.returncode, done.stderr
    except subprocess.TimeoutExpired:
        status, stderr = 124, f"no end after {options.sanitize_seconds:.0f} s"
    text = log.read_text(errors="replace") if log.is_file() else ""
    summary = re.findall(r"ERROR SUMMARY: (\d+) error", text)
    figures = {}
    if samples.is_file() and samples.read_text().strip():
        figures = json.loads(samples.read_text().splitlines()[-1])
    figures["memcheck_errors"] = int(summary[-1]) if summary else None
    if not figures.get("done") or status not in (0, 9):
        figures["died"] = f"exit status {status}: {last_line(stderr)}"
    return {"figures": figures, "samples": [], "memcheck": text[-4000:]}


def bad(run: dict[str, Any]) -> str:
    """What is wrong with a run, empty if nothing is."""
    figures = run["figures"]
    said = [
        f"{figures[name]} {name.replace('_', ' ')}"
        for name in ("wrong_calls", "wrong_replays", "canary_hits", "memcheck_errors")
        if figures.get(name)
    ]
    if "memcheck_errors" in figures and figures["memcheck_errors"] is None:
        said.append("no summary of memcheck")
    if figures.get("died"):
        said.append(f"died ({figures['died']})")
    return ", ".join(said)


def table(result: dict[str, Any]) -> str:
    """Markdown: a column for each wheel."""
    runs = result["runs"]
    names = [*COLUMNS]
    if any("memcheck_errors" in run["figures"] for run in runs.values()):
        names.append("memcheck_errors")
    lines = ["| | " + " | ".join(runs) + " |", "|" + " --- |" * (len(runs) + 1)]
    for name in names:
        cells = [str(run["figures"].get(name, "")).replace("|", "\\|") for run in runs.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _write(result: dict[str, Any], options: argparse.Namespace) -> int:
    facts = next(iter(result["runs"].values()))["facts"]
    head = (
        f"# Soak\n\n- Date: {result['date']}\n- Machine: {facts['gpu']}, driver {facts['driver']}\n"
        f"- Software: torch {facts['torch']}, cuDNN {facts['cudnn']}\n"
        f"- Command: `{result['command']}`, seed {result['seed']}\n\n"
    )
    name = "memcheck" if options.sanitize else "soak"
    for ending, text in (("json", json.dumps(result)), ("md", head + table(result) + "\n")):
        write_whole(options.out / f"{name}.{ending}", text)
    print(table(result))
    print(f"\nwritten: {options.out / name}.json, {options.out / name}.md")
    wrong = [
        f"{label}: {bad(run)}"
        for label, run in result["runs"].items()
        if run["facts"]["fork"] and bad(run)
    ]
    if wrong:
        print("forks that are not fine:\n  " + "\n  ".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
