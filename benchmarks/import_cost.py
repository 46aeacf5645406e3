"""What ``import flashinfer`` costs: release and graft, alternating, in one run.

Prints JSON: seconds of each import (median and the extremes), and the difference. Run it with an
environment that can import the release (``make test`` makes one)::

    .venv/test/bin/python benchmarks/import_cost.py [BASE] [REPEATS]
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from graft.releases import DEFAULT_BASE  # noqa: E402
from tests.release.trees import write_tree  # noqa: E402

TIMED = """
import time
import torch, numpy  # of the environment, and the same for both
start = time.perf_counter()
import flashinfer
print(time.perf_counter() - start)
"""


def seconds(tree: Path) -> float:
    """One import in a fresh process, torch loaded before."""
    # An installed package has its byte code; without this one the compiler would be timed.
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", TIMED],
        env={**inherited, "PYTHONPATH": str(tree)},
        check=True,
        capture_output=True,
        text=True,
    )
    return float(done.stdout.splitlines()[-1])


def main(base: str = DEFAULT_BASE, repeats: str = "15") -> None:
    """Alternate, so that a slow moment of the machine hits both."""
    with tempfile.TemporaryDirectory() as folder:
        trees = {
            "release": write_tree(base, Path(folder, "release"), grafted=False),
            "graft": write_tree(base, Path(folder, "graft"), grafted=True),
        }
        for tree in trees.values():
            seconds(tree)  # writes the byte code
        times: dict[str, list[float]] = {name: [] for name in trees}
        for _ in range(int(repeats)):
            for name, tree in trees.items():
                times[name].append(seconds(tree))
    medians = {name: statistics.median(values) for name, values in times.items()}
    report = {
        "base": base,
        "python": platform.python_version(),
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "seconds": {
            name: {"median": medians[name], "min": min(values), "max": max(values)}
            for name, values in times.items()
        },
        "graft minus release, median, ms": (medians["graft"] - medians["release"]) * 1e3,
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
