"""How the machines are run: the same sequences each time, or fresh ones for minutes (soak)."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

SOAK = os.environ.get("HYPOTHESIS_PROFILE") == "soak"


def fixed(examples: int, steps: int = 50, shrink: bool = True) -> settings:
    """The same ``examples`` sequences on every machine; a slow one is no failure."""
    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]
    return settings(
        phases=phases,
        max_examples=examples,
        stateful_step_count=steps,
        derandomize=True,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )


def fresh(examples: int) -> settings:
    """Sequences that nobody has seen, from the seed that the machine carries."""
    return settings(fixed(examples, steps=80), derandomize=False, print_blob=False)
