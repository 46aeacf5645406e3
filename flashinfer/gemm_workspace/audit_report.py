"""What an audit found, for people, for programs, and as an exit status."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from .audit_owners import Verdict

#: What no audit sees. It stands in every report, so that none reads as "clean".
NEVER_INSPECTED = (
    "pointers kept in device memory (arrays of pointers, structures) are not followed",
    "memory of the host is not judged",
)

# What an operator wants to see first; the rest on demand.
_SHOWN = (Verdict.STALE, Verdict.SUSPECT, Verdict.NOT_INSPECTED, Verdict.UNKNOWN)


@dataclass(frozen=True)
class Finding:
    """One device address of one node, or one thing that could not be read."""

    node: str  # its number; 4.0 is node 0 of the child graph that is node 4
    kind: str  # of the node: kernel, memcpy, memset, ...
    name: str  # of the kernel
    where: str  # parameter, extra, source, destination, ...
    offset: int | None  # bytes from the start of the parameter
    address: int | None
    owner: str
    verdict: Verdict
    why: str

    def as_dict(self) -> dict[str, Any]:
        """Plain data; the address as a number, and in hexadecimal for people."""
        hexadecimal = None if self.address is None else f"{self.address:#x}"
        return {**vars(self), "verdict": str(self.verdict), "address_hex": hexadecimal}


@dataclass(frozen=True)
class Report:
    """The audit of one graph."""

    nodes: int
    findings: tuple[Finding, ...]
    # What limits this audit, beside :data:`NEVER_INSPECTED`.
    limits: tuple[str, ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        """How many findings of each verdict; all verdicts are there."""
        counted = Counter(finding.verdict for finding in self.findings)
        return {str(verdict): counted[verdict] for verdict in Verdict}

    def of(self, *verdicts: Verdict | str) -> list[Finding]:
        """The findings of these verdicts."""
        wanted = {Verdict(verdict) for verdict in verdicts}
        return [finding for finding in self.findings if finding.verdict in wanted]

    @property
    def exit_status(self) -> int:
        """1: something is stale or suspect. 2: nothing is, but something was not inspected.
        0: neither, within :data:`NEVER_INSPECTED`."""
        if self.of(Verdict.STALE, Verdict.SUSPECT):
            return 1
        return 2 if self.of(Verdict.NOT_INSPECTED) else 0

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "nodes": self.nodes,
            "counts": self.counts,
            "exit_status": self.exit_status,
            "findings": [finding.as_dict() for finding in self.findings],
            "limits": list(self.limits),
            "never_inspected": list(NEVER_INSPECTED),
        }

    def json(self) -> str:
        """:meth:`as_dict` as JSON."""
        return json.dumps(self.as_dict(), indent=1)

    def text(self, everything: bool = False) -> str:
        """For people: the counts, then node by node what needs a look, or everything."""
        return "\n".join(self._lines(everything))

    def _lines(self, everything: bool) -> Iterator[str]:
        counts = ", ".join(f"{count} {verdict}" for verdict, count in self.counts.items())
        yield f"graph audit: {self.nodes} nodes: {counts}"
        shown = [each for each in self.findings if everything or each.verdict in _SHOWN]
        for node, findings in groupby(shown, key=lambda each: (each.node, each.kind, each.name)):
            yield f"node {' '.join(part for part in node if part)}"
            for finding in findings:
                yield f"  {_line(finding)}"
        if not self.of(Verdict.STALE, Verdict.SUSPECT):
            yield "nothing that was inspected is stale or suspect"
        for limit in (*self.limits, *NEVER_INSPECTED):
            yield f"limit: {limit}"


def _line(finding: Finding) -> str:
    place = finding.where if finding.offset is None else f"{finding.where}+{finding.offset}"
    address = "" if finding.address is None else f" {finding.address:#x}"
    said = ": ".join(part for part in (finding.owner, finding.why) if part)
    return f"{finding.verdict:<13} {place}{address}  {said}"
