"""The doctor's command line."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from . import autotune, buckets, folders, gather, logs, render
from .autotune import Cache
from .buckets import Tokens
from .caches import is_of_another_release
from .facts import Facts, Missing
from .findings import status
from .judge import judge

_EPILOG = """\
exit status: 0 healthy, 1 affected, 2 could not tell (and for arguments that make no sense).

Where `python -m flashinfer.gemm_workspace.doctor` fails because FlashInfer or torch does not
import, run the folder itself; it needs neither:
  python <site-packages>/flashinfer/gemm_workspace/doctor
No CUDA context is made and no GPU memory used.
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"doctor: {message}\n")


def _tokens(text: str) -> list[Tokens]:
    try:
        return buckets.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _sm(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(?:SM|sm)?(\d{1,2})\.?(\d)[a-z]?", text, re.ASCII)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no compute capability, wanted one like 12.0")
    return int(found[1]), int(found[2])


def _site_packages(text: str) -> Path:
    if not os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"{text}: no such folder")
    return Path(text)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m flashinfer.gemm_workspace.doctor",
        description="Says whether this environment has the defect of FlashInfer's moving GEMM "
        "workspaces, or another one that it knows, and the one thing to do about it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--autotune-cache",
        action="append",
        default=[],
        type=Path,
        metavar="PATH",
        help="a cache file of the autotuner, or a folder of them; more than once. Without it, the "
        "folders of vLLM and SGLang are looked through (not with --site-packages)",
    )
    add(
        "--tokens",
        type=_tokens,
        default=[],
        metavar="N-M",
        help="prompt lengths, as 405-482 or 1,512: say which tuned shapes serve them",
    )
    add(
        "--log",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="a server's log, of any size, also gzip: find the gate's line, growths, refusals "
        "under capture and GPU faults; more than once",
    )
    add(
        "--site-packages",
        action="append",
        default=[],
        type=_site_packages,
        metavar="DIR",
        help="examine the packages there, of another image say, instead of this environment's; "
        "nothing of them is run; more than once, in the order of sys.path",
    )
    add(
        "--sm",
        type=_sm,
        metavar="N.M",
        help="judge for this compute capability instead of asking the driver",
    )
    add("--json", action="store_true", help="the report as JSON")
    return parser


def main(
    arguments: Sequence[str] | None = None, environment: Mapping[str, str] | None = None
) -> int:
    """Examine, print, and return the exit status."""
    given = _parser().parse_args(arguments)
    environment = os.environ if environment is None else environment
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
    try:
        facts = (
            gather.of_image(given.site_packages, given.sm)
            if given.site_packages
            else gather.of_this_environment(environment, given.sm)
        )
        caches = _caches(given.autotune_cache, facts, environment)
        scanned = [logs.scan(path) for path in given.log]
        findings = judge(facts, caches, scanned)
        if given.json:
            report = render.as_data(facts, caches, scanned, given.tokens, findings)
            print(json.dumps(report, indent=1))
        else:
            print(render.as_text(facts, caches, scanned, given.tokens, findings))
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    except KeyboardInterrupt:
        print("doctor: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        # Python's own exit status for this would read as a verdict.
        line = error.__traceback__
        while line is not None and line.tb_next is not None:
            line = line.tb_next
        where = f"{line.tb_frame.f_code.co_filename}:{line.tb_lineno}" if line else "?"
        print(f"doctor: a defect of its own: {error!r} at {where}", file=sys.stderr)
        return 2
    return status(findings)


def _caches(
    named: Sequence[Path], facts: Facts, environment: Mapping[str, str]
) -> list[Cache | Missing]:
    if named:
        return [cache for path in named for cache in autotune.read(path)]
    if facts.image is not None:
        return []
    found = [cache for path in folders.cache_folders(environment) for cache in autotune.read(path)]
    # Nobody named these: what is no cache, or a folder of another release, is no finding.
    return [
        cache
        for cache in found
        if not isinstance(cache, Missing) and not is_of_another_release(facts, cache)
    ]
