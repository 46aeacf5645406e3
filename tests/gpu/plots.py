"""What the scripts that draw have in common: files that are the same for the same input, and a
command that says in one line what is wrong."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def pyplot(salt: str) -> Any:
    """matplotlib's, without a display; ``salt`` makes the ids in an SVG the same each time."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = salt
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, folder: Path, name: str) -> list[Path]:
    """Write ``name.svg`` and ``name.png`` into ``folder``; the files written."""
    figure.tight_layout()
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for ending, metadata in (("svg", {"Date": None}), ("png", {})):
        path = folder / f"{name}.{ending}"
        figure.savefig(path, dpi=110, metadata=metadata)
        written.append(path)
    pyplot(name).close(figure)
    return written


def command(prog: str, what: str, draw: Callable[[Any, Path], list[Path]]) -> int:
    """Draw the JSON file that the command line names; ``what`` it should be. The exit status."""
    made = argparse.ArgumentParser(prog=prog)
    made.add_argument("report", type=Path, help=what)
    made.add_argument("-o", "--out", type=Path, help="folder, that of the report unless given")
    options = made.parse_args()
    try:
        report = json.loads(options.report.read_text())
        written = draw(report, options.out or options.report.parent)
    except ImportError as error:
        print(f"{prog}: {error}: pip install -r requirements/plot.txt", file=sys.stderr)
        return 2
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        print(f"{prog}: {options.report} is not {what}: {error!r}", file=sys.stderr)
        return 2
    print(", ".join(map(str, written)))
    return 0
