"""Draws a soak: ``python tests/gpu/plot_soak.py soak-out/soak.json [-o FOLDER]``.

Needs matplotlib alone (``requirements/plot.txt``); no GPU. Writes ``soak.svg`` and ``soak.png``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

#: (title, unit, what of a sample is drawn).
PANELS = (
    ("Wrong results", "so far", lambda s: s["wrong_calls"] + s["wrong_replays"]),
    ("Canary bytes overwritten", "bytes so far", lambda s: s["canary_bytes"]),
    ("Device memory in use", "GiB", lambda s: s["device_bytes"] / 2**30),
    ("Plans cached and held", "plans", lambda s: s["plans_cached"] + s["plans_held"]),
)
STYLES = (("#c0392b", "-"), ("#1f618d", "-"), ("#7d6608", "--"), ("#145a32", ":"))


def draw(result: dict[str, Any], folder: Path) -> list[Path]:
    """One panel a figure, one line a wheel, over the steps. The files written."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "soak"  # the same input gives the same file
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(10, 6.4), sharex=True)
    for axis, (title, unit, value) in zip(axes.flat, PANELS, strict=True):
        for (label, run), (colour, line) in zip(result["runs"].items(), STYLES, strict=False):
            samples = [sample for sample in run["samples"] if "device_bytes" in sample]
            steps = [sample["steps"] for sample in samples]
            axis.plot(steps, [value(s) for s in samples], line, color=colour, label=label)
            if run["figures"].get("died") and steps:
                axis.plot(steps[-1], value(samples[-1]), "x", color=colour, markersize=9)
        axis.set_title(title, fontsize=10)
        axis.set_ylabel(unit)
        axis.grid(alpha=0.3)
        axis.set_ylim(bottom=0)
    for axis in axes[-1]:
        axis.set_xlabel("steps")
    axes.flat[0].legend(fontsize=8)
    facts = next(iter(result["runs"].values()))["facts"]
    figure.suptitle(
        f"Soak, {facts['gpu']}, cuDNN {facts['cudnn']}, seed {result['seed']}, "
        f"{result['date'][:10]} (a cross: the process died)",
        fontsize=10,
    )
    figure.tight_layout()
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for ending, metadata in (("svg", {"Date": None}), ("png", {})):
        path = folder / f"soak.{ending}"
        figure.savefig(path, dpi=110, metadata=metadata)
        written.append(path)
    pyplot.close(figure)
    return written


def main() -> int:
    made = argparse.ArgumentParser(prog="plot_soak")
    made.add_argument("soak", type=Path)
    made.add_argument("-o", "--out", type=Path)
    options = made.parse_args()
    try:
        result = json.loads(options.soak.read_text())
        written = draw(result, options.out or options.soak.parent)
    except (OSError, ValueError, KeyError) as error:
        print(f"plot_soak: {options.soak} is no soak: {error}", file=sys.stderr)
        return 2
    except ImportError as error:
        print(f"plot_soak: {error}: pip install -r requirements/plot.txt", file=sys.stderr)
        return 2
    print(", ".join(map(str, written)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
