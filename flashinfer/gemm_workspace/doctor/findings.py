"""A finding, how bad it is, and what that makes of the exit status."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    """How bad a finding is."""

    AFFECTED = "affected"
    UNKNOWN = "could not tell"
    ADVICE = "advice"


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or not known. ``do`` is empty where nothing is to be done."""

    code: str
    level: Level
    what: str
    do: str = ""


def status(findings: Sequence[Finding]) -> int:
    """Exit status: 0 healthy, 1 affected, 2 could not tell."""
    levels = {finding.level for finding in findings}
    if Level.AFFECTED in levels:
        return 1
    return 2 if Level.UNKNOWN in levels else 0
