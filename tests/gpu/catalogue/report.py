"""What came out: a Markdown table, and whether every fork is fine."""

from __future__ import annotations

from collections import Counter
from typing import Any

FINE = frozenset({"pass", "not applicable"})
#: Cases whose figures decide what is done on hardware that nobody has measured.
SENT = ("B10", "B12", "B20")
_MARKS = {
    "pass": "pass",
    "fail": "**fail**",
    "hang": "**hang**",
    "crash": "**crash**",
    "error": "**error**",
    "not applicable": "n/a",
}


def failures(run: dict[str, Any], forks_only: bool = True) -> list[str]:
    """``wheel case: verdict`` of everything that is not fine, of forks or of all wheels."""
    return [
        f"{label} {key}: {result['verdict']} {result['note']}".rstrip()
        for label, wheel in run["wheels"].items()
        if not forks_only or wheel["facts"]["fork"]
        for key, result in wheel["results"].items()
        if result["verdict"] not in FINE
    ]


def markdown(run: dict[str, Any]) -> str:
    """The whole report."""
    labels = list(run["wheels"])
    parts = [_head(run), _counts(run), _table(run, labels)]
    parts += [_absent(run), _unseen(run), _details(run)]
    return "\n\n".join(part for part in parts if part) + "\n"


def to_send(run: dict[str, Any]) -> str:
    """What somebody with other hardware should send us: of the first fork, else the last wheel."""
    wheels = run["wheels"]
    label = next((name for name, wheel in wheels.items() if wheel["facts"]["fork"]), [*wheels][-1])
    facts = wheels[label]["facts"]
    lines = [
        f"{facts['gpu']} SM{_sm(facts)}, driver {facts['driver']}, torch {facts['torch']}, "
        f"cuDNN {facts['cudnn']}, cudnn-frontend {facts['cudnn_frontend']}, "
        f"flashinfer-python {facts['distribution']}"
    ]
    for key, result in wheels[label]["results"].items():
        if key.partition(".")[0] in SENT:
            figures = "; ".join(f"{name}: {value}" for name, value in result["figures"].items())
            said = figures or result["note"]
            lines.append(f"{key} {result['verdict']}. {said}")
    return "\n".join(lines)


def _cell(text: object) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def _rows(header: list[str], rows: list[list[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _head(run: dict[str, Any]) -> str:
    facts = next(iter(run["wheels"].values()))["facts"]
    lines = [
        f"- Date: {run['date']}",
        f"- Machine: {facts['gpus']} x {facts['gpu']} (SM{_sm(facts)}), driver {facts['driver']}",
        f"- Software: Python {facts['python']}, torch {facts['torch']}, cuDNN {facts['cudnn']}, "
        f"cudnn-frontend {facts['cudnn_frontend']}, cuda-bindings {facts['cuda_bindings']}",
        f"- Command: `{run['command']}`, {run['seconds']:.0f} s",
        *(
            f"- {label}: {wheel['facts']['distribution']}, "
            f"{'the fork' if wheel['facts']['fork'] else 'a release'}, "
            f"{wheel['launcher']}, sha256 {wheel['sha256'] or 'of a folder: none'}"
            for label, wheel in run["wheels"].items()
        ),
    ]
    return "# The hazard catalogue\n\n" + "\n".join(lines)


def _sm(facts: dict[str, Any]) -> int:
    major, minor = facts["capability"]
    return int(major) * 10 + int(minor)


def _counts(run: dict[str, Any]) -> str:
    verdicts = list(_MARKS)
    rows: list[list[object]] = []
    for label, wheel in run["wheels"].items():
        seen = Counter(result["verdict"] for result in wheel["results"].values())
        rows.append([label, *(seen.get(verdict, 0) for verdict in verdicts)])
    return _rows(["wheel", *verdicts], rows)


def _table(run: dict[str, Any], labels: list[str]) -> str:
    rows: list[list[object]] = []
    for key, case in run["cases"].items():
        results = [run["wheels"][label]["results"].get(key) for label in labels]
        if all(result is None or result["verdict"] == "not applicable" for result in results):
            continue
        cells = ["" if result is None else _short(result) for result in results]
        rows.append([case["id"], case["lane"], case["title"], *cells])
    return "## Cases\n\n" + _rows(["case", "lane", "what happens", *labels], rows)


def _short(result: dict[str, Any]) -> str:
    mark = _MARKS[result["verdict"]]
    if result["verdict"] in ("fail", "crash", "hang", "error"):
        figure = next((f"{name} {value}" for name, value in result["figures"].items()), "")
        said = result["note"] or figure
        return f"{mark}: {said[:110]}" if said else mark
    return mark


def _absent(run: dict[str, Any]) -> str:
    reasons: dict[tuple[str, str], list[str]] = {}
    for label, wheel in run["wheels"].items():
        for key, result in wheel["results"].items():
            if result["verdict"] == "not applicable":
                reasons.setdefault((label, result["note"]), []).append(key)
    if not reasons:
        return ""
    rows: list[list[object]] = [
        [label, reason, ", ".join(keys)] for (label, reason), keys in reasons.items()
    ]
    return "## Not applicable\n\n" + _rows(["wheel", "reason", "cases"], rows)


def _unseen(run: dict[str, Any]) -> str:
    """Defects that a release is known to have and that this run did not show."""
    lines = []
    for label, wheel in run["wheels"].items():
        keys = [key for key in wheel["known"] if wheel["results"][key]["verdict"] == "pass"]
        if keys:
            lines.append(f"- {label}: {', '.join(keys)}")
    if not lines:
        return ""
    return "## Known there, and not reproduced in this run\n\n" + "\n".join(lines)


def _details(run: dict[str, Any]) -> str:
    parts = ["## Figures"]
    for key, case in run["cases"].items():
        lines = []
        for label, wheel in run["wheels"].items():
            result = wheel["results"].get(key)
            if result is None or result["verdict"] == "not applicable":
                continue
            figures = "; ".join(f"{name}: {value}" for name, value in result["figures"].items())
            note = f" ({result['note']})" if result["note"] else ""
            lines.append(
                f"- {label}: {result['verdict']}{note}, {result['seconds']} s. {figures}".rstrip()
            )
        if lines:
            hazards = ", ".join(case["hazards"])
            parts.append(f"### {key}: {case['title']} ({hazards})\n\n" + "\n".join(lines))
    return "\n\n".join(parts)
