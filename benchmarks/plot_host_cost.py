"""Draws a run of host_cost: ``python benchmarks/plot_host_cost.py host_cost.json [-o FOLDER]``.

Needs matplotlib alone (``requirements/plot.txt``); no GPU. Writes ``host-cost.svg`` and
``host-cost.png``: a line a case, a mark for each variant and number of rows, microseconds on a
logarithmic axis; torch's own function of the same rows is the black one.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "gpu"))

import plots

MARKS = (("#c0392b", "o"), ("#7d6608", "D"), ("#1f618d", "s"), ("#145a32", "^"), ("#6c3483", "v"))
TORCH = ("#000000", "|")


def points(report: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """By case without its rows, by variant (``torch`` is one), the medians in microseconds."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in report["ratios"]:
        case, _, rows = row["case"].rpartition(" ")
        reference = report["us"]["torch"][f"{row['over']} {rows}"]["median"]
        of = found.setdefault(case, {})
        of.setdefault(row["variant"], []).append(
            report["us"][row["variant"]][row["case"]]["median"]
        )
        if reference not in of.setdefault("torch", []):
            of["torch"].append(reference)
    return found


def draw(report: dict[str, Any], folder: Path) -> list[Path]:
    """The files written."""
    pyplot = plots.pyplot("host-cost")
    found = points(report)
    cases = sorted(found, reverse=True)
    variants = [name for name in report["us"] if name != "torch"]
    figure, axis = pyplot.subplots(figsize=(10, 0.42 * len(cases) + 1.6))
    styles = {**dict(zip(variants, MARKS, strict=False)), "torch": TORCH}
    for name, (colour, mark) in styles.items():
        places = [
            (taken, at) for at, case in enumerate(cases) for taken in found[case].get(name, [])
        ]
        if places:
            axis.scatter(
                *zip(*places, strict=True), c=colour, marker=mark, s=42, alpha=0.8, label=name
            )
    axis.set_yticks(range(len(cases)), cases)
    axis.set_xscale("log")
    ticks = [5, 10, 20, 50, 100, 200, 500]
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.set_xlabel("microseconds of one eager call on the host, median; M = 1, 16, 512")
    axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=6, fontsize=9, frameon=False)
    return plots.save(figure, folder, "host-cost")


if __name__ == "__main__":
    sys.exit(plots.command("plot_host_cost", "a run of host_cost", draw))
