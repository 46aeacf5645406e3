"""``stats()`` as text in the Prometheus exposition format, version 0.0.4.

Base units (bytes), ``_total`` on what only grows, no time stamps. A lane's stream and graph pool
are no labels: they come and go with captures, and a scraper would keep a series for each. What is
alike in all labels is summed, and ``_lanes`` says how many there are.

Format: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

PREFIX = "flashinfer_gemm_workspace_"

#: What to send as Content-Type with this text.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = tuple[tuple[str, str], ...]


@dataclass
class _Family:
    """One metric with its series."""

    name: str
    kind: str  # gauge or counter
    help: str
    series: dict[Labels, int] = field(default_factory=dict)

    def add(self, value: int, **labels: object) -> None:
        key = tuple((name, str(each)) for name, each in labels.items())
        self.series[key] = self.series.get(key, 0) + value

    def lines(self) -> Iterable[str]:
        name = PREFIX + self.name
        yield f"# HELP {name} {_escaped(self.help, quote=False)}"
        yield f"# TYPE {name} {self.kind}"
        for labels, value in sorted(self.series.items()):
            listed = ",".join(f'{label}="{_escaped(each)}"' for label, each in labels)
            yield f"{name}{f'{{{listed}}}' if listed else ''} {value}"


def _escaped(text: str, quote: bool = True) -> str:
    """
    >>> _escaped('a"b')
    'a\\\\"b'
    """
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quote else text


def text(stats: Mapping[str, Any]) -> str:
    """The dict of ``stats()`` as exposition text, with a newline at its end."""
    size = _Family("bytes", "gauge", "Memory that workspaces in use have.")
    lanes = _Family("lanes", "gauge", "Workspaces in use.")
    kept = _Family(
        "kept_bytes", "gauge", "Outgrown blocks of workspaces, kept for captured graphs."
    )
    for lane in stats["lanes"]:
        labels = {
            "device": lane["device"],
            "lane": lane["name"],
            "kind": lane["kind"],
            "storage": lane["storage"],
        }
        size.add(lane["bytes"], **labels)
        lanes.add(1, **labels)
        kept.add(lane["kept_bytes"], **labels)
    spare = _Family("spare_bytes", "gauge", "Memory mapped ahead or given back, and unused.")
    for each in stats["spare"]:
        spare.add(each["bytes"], device=each["device"], dirty=str(each["dirty"]).lower())
    buffers = _Family("buffer_bytes", "gauge", "Buffers of the release's cache.")
    buffers_kept = _Family("buffer_kept_bytes", "gauge", "Outgrown buffers of the release's cache.")
    for each in stats["buffers"]:
        labels = {"device": each["device"], "buffer": each["name"]}
        buffers.add(each["bytes"], **labels)
        buffers_kept.add(each["kept_bytes"], **labels)
    sharing = _Family("shared", "gauge", "1: the ops of a stream share one workspace.")
    for device, shares in stats["sharing"].items():
        sharing.add(int(shares), device=device)
    families = [size, lanes, kept, spare, buffers, buffers_kept, sharing]
    for source, plain in ((stats, _PLAIN), (stats["prepared"], _PREPARED)):
        for name, kind, key, words in plain:
            family = _Family(name, kind, words)
            family.add(int(source[key]))
            families.append(family)
    return "".join(f"{line}\n" for family in families for line in family.lines())


#: Metrics that are one number: name, kind, key in ``stats()``, help.
_PLAIN = (
    ("sealed", "gauge", "sealed", "1: mapping more memory is an error, or a line in the log."),
    ("graphs", "gauge", "graphs_alive", "Captured graphs that hold workspaces or plans."),
    ("graphs_untied", "gauge", "graphs_untied", "Of those, the ones held for the process."),
    ("plans_held", "gauge", "plans_held", "cuDNN plans that captured graphs hold."),
    (
        "plans_kept_for_process",
        "gauge",
        "plans_kept_for_process",
        "cuDNN plans that could not be tied to a graph.",
    ),
    (
        "builds_refused_total",
        "counter",
        "builds_refused",
        "cuDNN plans and handles refused under capture.",
    ),
    ("growths_total", "counter", "growths_total", "Times that memory was mapped or a block made."),
)
#: The same of ``stats()["prepared"]``.
_PREPARED = (
    ("prepared_signatures", "gauge", "remembered", "Signatures of calls that are remembered."),
    ("prepared_calls_total", "counter", "hits", "Calls launched from memory, in Python."),
    ("prepared_learnt_total", "counter", "misses", "Calls that were watched to be remembered."),
    ("prepared_failures_total", "counter", "failures", "Launches from memory that failed."),
)
