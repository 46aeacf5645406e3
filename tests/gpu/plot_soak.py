"""Draws a soak: ``python tests/gpu/plot_soak.py soak-out/soak.json [-o FOLDER]``.

Needs matplotlib alone (``requirements/plot.txt``); no GPU. Writes ``soak.svg`` and ``soak.png``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import plots

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
    pyplot = plots.pyplot("soak")
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
    return plots.save(figure, folder, "soak")


if __name__ == "__main__":
    sys.exit(plots.command("plot_soak", "a soak.json", draw))
