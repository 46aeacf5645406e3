"""The machine finds the defect of every old policy, and nothing in the one that has none.

Each run expects the world's own :class:`Violation`, with the words for that defect: any other
error, or none, fails the test.
"""

from __future__ import annotations

import pytest
from hypothesis.stateful import run_state_machine_as_test

from .conftest import fixed
from .machine import Machine
from .memory import Violation
from .old_policies import Dropped, Kept, PerPool, Resized, Single, Unheld


def machine_over(policy: type[Kept]) -> type[Machine]:
    return type(f"{policy.__name__}Machine", (Machine,), {"policy_over": policy})


@pytest.mark.parametrize(
    ("policy", "defect"),
    [
        pytest.param(Resized, r"\(freed\)", id="resize_"),
        pytest.param(Dropped, r"\(freed\)", id="drop-on-growth"),
        pytest.param(Unheld, r"a replay runs plan .*unloaded", id="LRU-without-holds"),
        pytest.param(PerPool, r"may run at once and share", id="lane-per-pool"),
        pytest.param(Single, r"may run at once and share", id="one-workspace"),
    ],
)
def test_the_defect_is_found(policy: type[Kept], defect: str) -> None:
    # As many examples as Hypothesis takes when nobody says how many.
    with pytest.raises(Violation, match=defect):
        run_state_machine_as_test(machine_over(policy), settings=fixed(100, shrink=False))


def test_a_wasteful_policy_passes() -> None:
    run_state_machine_as_test(machine_over(Kept), settings=fixed(100))
