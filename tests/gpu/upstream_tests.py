"""Upstream's own tests over several wheels, compared case by case.

::

    git clone --depth 1 -b v0.6.16.post3 https://github.com/flashinfer-ai/flashinfer CHECKOUT
    python tests/gpu/upstream_tests.py CHECKOUT RELEASE.whl FORK.whl [-o upstream-out] [-n 4]

The checkout is the user's; its ``tests`` folder is copied to a temporary place, so that only the
wheel's package is imported, and nothing of it is kept but outcomes. The first wheel is what the
others are compared with. ``upstream_differences.txt`` lists the tests that assert what the fork
replaces, each with its reason.

Exit status 0: the same outcomes, but for those listed; 1: another difference; 2: bad input.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import json
import re
import shlex
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from catalogue.command import exit_status, last_line, output_folder, work_folder, write_whole
from catalogue.runner import arch_list, environment_of
from catalogue.wheels import BadInput, Wheel, unpack

#: Run where the version has them.
FILES = (
    "tests/gemm/test_bmm_fp8.py",
    "tests/gemm/test_mm_bf16.py",
    "tests/gemm/test_bmm_bf16.py",
    "tests/autotuner/test_autotuner_bmm_fp8.py",
    "tests/gemm/test_cudnn_gemm_cuda_graph_lifetime.py",
)
DIFFERENCES = Path(__file__).resolve().parent / "upstream_differences.txt"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="upstream_tests", description=(__doc__ or "").split("\n")[0]
    )
    made.add_argument("checkout", type=Path)
    made.add_argument("wheels", nargs="+", metavar="[LABEL=]WHEEL")
    made.add_argument("-f", "--file", action="append", default=[], help="instead of the default")
    made.add_argument("-k", default="", help="passed on to pytest")
    made.add_argument("-n", type=int, default=0, help="processes, with pytest-xdist")
    made.add_argument("--seconds", type=float, default=1800.0, help="limit for one wheel")
    made.add_argument("-o", "--out", type=Path, default=Path("upstream-out"))
    made.add_argument("--site", action="append", default=[])
    made.add_argument("--work", type=Path)
    return made


def main(arguments: list[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(given)
    return exit_status("upstream_tests", lambda: _main(options, given))


def _main(options: argparse.Namespace, given: list[str]) -> int:
    known = read_differences(DIFFERENCES.read_text())
    files = [name for name in options.file or FILES if (options.checkout / name).is_file()]
    if not files:
        raise BadInput(f"{options.checkout} has none of {', '.join(options.file or FILES)}")
    with work_folder(options.work, "upstream") as work:
        (work / "wheels").mkdir(parents=True, exist_ok=True)
        wheels = unpack(options.wheels, work / "wheels")
        if len(wheels) < 2:
            raise BadInput("one wheel named, wanted two or more to compare")
        copy = work / "checkout"
        shutil.copytree(options.checkout / "tests", copy / "tests", dirs_exist_ok=True)
        arch = arch_list()
        output_folder(options.out)
        seen = {wheel.label: _run(wheel, copy, files, work, options, arch) for wheel in wheels}
    result = compared(seen, known)
    result.update(
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        command="python tests/gpu/upstream_tests.py " + shlex.join(given),
        files=files,
    )
    write_whole(options.out / "upstream.json", json.dumps(result, indent=1) + "\n")
    text = table(result)
    write_whole(options.out / "upstream.md", text)
    print(text)
    return 1 if result["unexpected"] else 0


def _run(
    wheel: Wheel,
    copy: Path,
    files: list[str],
    work: Path,
    options: argparse.Namespace,
    arch: str,
) -> dict[str, str]:
    """Outcome by test of one wheel."""
    environment = environment_of(wheel, work, options.site, arch)
    Path(environment["FLASHINFER_WORKSPACE_BASE"]).mkdir(parents=True, exist_ok=True)
    environment["PYTHONPATH"] += f":{copy.resolve()}"  # its tests import one another
    report = (work / f"{re.sub(r'[^A-Za-z0-9.+-]', '_', wheel.label)}.xml").resolve()
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
    ]
    command += ["-o", "junit_family=xunit1", f"--rootdir={copy.resolve()}"]
    command += ["-k", options.k] if options.k else []
    command += ["-n", str(options.n)] if options.n else []
    print(f"upstream_tests: {wheel.label}, {len(files)} files", file=sys.stderr, flush=True)
    try:
        done = subprocess.run(
            [*command, *files],
            env=environment,
            cwd=copy,
            capture_output=True,
            text=True,
            timeout=options.seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise BadInput(f"{wheel.label}: no end after {options.seconds:.0f} s") from None
    if not report.is_file():
        last = last_line(done.stdout + done.stderr, "nothing")
        raise BadInput(f"{wheel.label}: pytest wrote no report: {last}")
    return outcomes(report.read_text())


def outcomes(junit: str) -> dict[str, str]:
    """``file or module::test`` to ``passed``, ``failed``, ``error`` or ``skipped``."""
    found: dict[str, str] = {}
    for case in ElementTree.fromstring(junit).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        kinds = {child.tag for child in case}
        outcome = next(
            (kind for kind in ("error", "failure", "skipped") if kind in kinds), "passed"
        )
        found[name] = "failed" if outcome == "failure" else outcome
    return found


def read_differences(text: str) -> list[tuple[str, str]]:
    """(pattern, reason) of each line ``pattern | reason``. Raises BadInput."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        pattern, bar, reason = (part.strip() for part in line.partition(" | "))
        if not bar or not reason:
            raise BadInput(f"{DIFFERENCES.name}:{number}: wanted `pattern | reason`, not {line!r}")
        found.append((pattern, reason))
    return found


def compared(seen: dict[str, dict[str, str]], known: list[tuple[str, str]]) -> dict[str, Any]:
    """Counts of each wheel, and every test whose outcome is not that of the first wheel."""
    first, *others = seen
    expected, unexpected = [], []
    for label in others:
        for test in sorted(seen[first].keys() | seen[label].keys()):
            pair = seen[first].get(test, "absent"), seen[label].get(test, "absent")
            if pair[0] == pair[1]:
                continue
            reason = next((why for pattern, why in known if fnmatch.fnmatch(test, pattern)), "")
            row = {"wheel": label, "test": test, "first": pair[0], "here": pair[1]}
            (expected if reason else unexpected).append({**row, "reason": reason})
    return {
        "first": first,
        "counts": {label: dict(Counter(tests.values())) for label, tests in seen.items()},
        "expected": expected,
        "unexpected": unexpected,
    }


def table(result: dict[str, Any]) -> str:
    """Markdown."""
    kinds = ("passed", "failed", "error", "skipped")
    columns = ("wheel", "test", "first", "here", "reason")
    lines = [
        "# Upstream's tests",
        "",
        f"- Date: {result.get('date', '')}",
        f"- Command: `{result.get('command', '')}`",
        f"- Files: {', '.join(result.get('files', []))}",
        "",
        "| wheel | " + " | ".join(kinds) + " |",
        "|" + " --- |" * 5,
    ]
    for label, counts in result["counts"].items():
        lines.append(f"| {label} | " + " | ".join(str(counts.get(k, 0)) for k in kinds) + " |")
    for title in ("unexpected", "expected"):
        if rows := result[title]:
            lines += ["", f"## {title.capitalize()} differences from {result['first']}", ""]
            lines += ["| wheel | test | there | here | reason |", "|" + " --- |" * 5]
            lines += ["| " + " | ".join(row[name] for name in columns) + " |" for row in rows]
    if not result["unexpected"]:
        lines += ["", "No other test has another outcome."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
