"""What the scripts that draw have in common: files that are the same for the same input, and a
command that says in one line what is wrong."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from catalogue.command import exit_status, output_folder
from catalogue.wheels import BadInput


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
    return exit_status(prog, lambda: _draw(options.report, options.out, what, draw))


def _draw(
    report: Path, out: Path | None, what: str, draw: Callable[[Any, Path], list[Path]]
) -> int:
    folder = out or report.parent
    output_folder(folder)
    try:
        written = draw(json.loads(report.read_text()), folder)
    except ImportError as error:
        raise BadInput(f"{error}: pip install -r requirements/plot.txt") from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise BadInput(f"{report} is not {what}: {error!r}") from None
    print(", ".join(map(str, written)))
    return 0
