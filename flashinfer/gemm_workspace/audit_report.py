"""What an audit found, for people, for programs, and as an exit status."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from .audit_findings import Finding, Findings
from .audit_owners import Verdict

#: What no audit sees. It stands in every report, so that none reads as "clean".
NEVER_INSPECTED = (
    "pointers kept in device memory (arrays of pointers, structures) are not followed",
    "memory of the host is not judged",
)

# What an operator wants to see first; the rest on demand.
_SHOWN = (Verdict.STALE, Verdict.SUSPECT, Verdict.NOT_INSPECTED, Verdict.UNKNOWN)

# Attribute of a report whose findings are made when asked for.
_FOUND = "_found"


@dataclass(frozen=True)
class Report:
    """The audit of one graph."""

    nodes: int
    findings: tuple[Finding, ...]
    # What limits this audit, beside :data:`NEVER_INSPECTED`.
    limits: tuple[str, ...] = ()

    @classmethod
    def over(cls, nodes: int, found: Findings, limits: tuple[str, ...]) -> Report:
        """A report that makes its ``findings`` when they are asked for: most are live, and nobody
        looks at those."""
        report = cls(nodes, (), limits)
        vars(report).pop("findings")
        vars(report)[_FOUND] = found
        return report

    if not TYPE_CHECKING:  # for which the attribute is there at any time

        def __getattr__(self, name: str) -> Any:
            found = vars(self).get(_FOUND) if name == "findings" else None
            if found is None:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            findings = vars(self)["findings"] = tuple(found.of())
            return findings

    @property
    def _unmade(self) -> Findings | None:
        """What ``findings`` can be made of, while they are not."""
        return None if "findings" in vars(self) else vars(self)[_FOUND]

    @property
    def counts(self) -> dict[str, int]:
        """How many findings of each verdict; all verdicts are there."""
        unmade = self._unmade
        if unmade is None:
            counted = Counter(finding.verdict for finding in self.findings)
        else:
            counted = unmade.counts()
        return {str(verdict): counted[verdict] for verdict in Verdict}

    def of(self, *verdicts: Verdict | str) -> list[Finding]:
        """The findings of these verdicts."""
        return list(self._of({Verdict(verdict) for verdict in verdicts}))

    def _of(self, verdicts: Collection[Verdict]) -> Iterator[Finding]:
        unmade = self._unmade
        if unmade is not None:
            return unmade.of(verdicts)
        return (finding for finding in self.findings if finding.verdict in verdicts)

    @property
    def exit_status(self) -> int:
        """1: something is stale or suspect. 2: nothing is, but something was not inspected.
        0: neither, within :data:`NEVER_INSPECTED`."""
        counts = self.counts
        if counts[Verdict.STALE] or counts[Verdict.SUSPECT]:
            return 1
        return 2 if counts[Verdict.NOT_INSPECTED] else 0

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "nodes": self.nodes,
            "counts": self.counts,
            "exit_status": self.exit_status,
            "findings": [finding.as_dict() for finding in self._of(tuple(Verdict))],
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
        counted = self.counts
        counts = ", ".join(f"{count} {verdict}" for verdict, count in counted.items())
        yield f"graph audit: {self.nodes} nodes: {counts}"
        shown = self._of(tuple(Verdict) if everything else _SHOWN)
        for node, findings in groupby(shown, key=lambda each: (each.node, each.kind, each.name)):
            yield f"node {' '.join(part for part in node if part)}"
            for finding in findings:
                yield f"  {_line(finding)}"
        if not counted[Verdict.STALE] and not counted[Verdict.SUSPECT]:
            yield "nothing that was inspected is stale or suspect"
        for limit in (*self.limits, *NEVER_INSPECTED):
            yield f"limit: {limit}"


def _line(finding: Finding) -> str:
    place = finding.where if finding.offset is None else f"{finding.where}+{finding.offset}"
    address = "" if finding.address is None else f" {finding.address:#x}"
    said = ": ".join(part for part in (finding.owner, finding.why) if part)
    return f"{finding.verdict:<13} {place}{address}  {said}"
