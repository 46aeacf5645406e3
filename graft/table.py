"""``make releases``: build and verify every known release, print the table.

Sites left is what the verifier counts in the finished wheel; a build with one left fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from .errors import GraftError
from .fetch import fetch
from .releases import RELEASES
from .verify import SITES_LEFT


def measured_build(version: str, folder: Path) -> tuple[float, float, dict[str, Any]]:
    """Seconds, peak MiB and the report of one build in a process of its own, download aside."""
    command = [sys.executable, "-m", "graft", "build", version, "-o", str(folder), "--json"]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=out, stderr=err)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        out.seek(0)
        err.seek(0)
        if status:
            raise GraftError(f"{version}: {err.read().decode().strip()}")
        return seconds, usage.ru_maxrss / 1024, json.loads(out.read())


def main() -> int:
    """Print a row a release; return the exit status."""
    print(
        f"{'release':13} {'sites':>6} {'edited':>6} {'left':>4} {'seconds':>7} {'MiB':>5}  sha256"
    )
    try:
        with tempfile.TemporaryDirectory(prefix="graft-releases-") as folder:
            for version, release in RELEASES.items():
                fetch(version)
                seconds, peak, built = measured_build(version, Path(folder))
                found = sum(sum(files.values()) for files in release.family.counts.values())
                edited = sum(sum(files.values()) for files in built["sites"].values())
                (left,) = [p["count"] for p in built["proofs"] if p["what"] == SITES_LEFT]
                print(
                    f"{version:13} {found:6} {edited:6} {left:4} {seconds:7.2f} {peak:5.0f}  "
                    f"{built['sha256']}",
                    flush=True,
                )
                Path(built["wheel"]).unlink()
    except GraftError as error:
        print(f"graft: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
