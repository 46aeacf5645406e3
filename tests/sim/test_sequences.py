"""Sequences that the machine once found, kept as they were shrunk."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .engine import OPS
from .machine import Machine
from .test_machine import Arenas, Blocks, NoDriver


@pytest.fixture(params=[Arenas, Blocks, NoDriver])
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    machine = request.param()
    try:
        yield machine
        machine.check()
    finally:
        machine.teardown()


OP = OPS[0]


def test_a_plan_that_was_never_captured_is_dropped_during_a_capture(machine: Machine) -> None:
    machine.call(OP, 16, place=1)
    machine.begin(pool=0, mode="global", place=0)
    machine.clear_plans("now")


def test_a_plan_built_during_a_capture_is_evicted_during_it(machine: Machine) -> None:
    machine.begin(pool=0, mode="global", place=0)
    machine.overflow(place=1)
    machine.overflow(place=4)


def test_a_cycle_is_collected_during_a_capture(machine: Machine) -> None:
    machine.call(OP, 16, place=1)
    machine.clear_plans("into cycles")
    machine.begin(pool=0, mode="global", place=0)
    machine.clear_plans("cycles only")


def test_failed_first_growths_lose_no_addresses(machine: Machine) -> None:
    machine.overflow(place=0)
    machine.begin(pool=0, mode="global", place=1)  # so that nothing idle can be given back
    machine.sit_on_memory()
    for _ in range(3):
        machine.call(OP, 80, place=0)


def test_a_stream_is_replaced_while_a_capture_runs_that_nobody_saw_begin(
    machine: Machine,
) -> None:
    machine.call(OP, 16, place=0)
    machine.begin_unseen("global", place=1)
    machine.replace_stream(place=0)
    machine.call(OP, 16, place=0)


def test_a_spare_workspace_goes_to_another_stream(machine: Machine) -> None:
    machine.autotune(OP, 16, place=0)
    machine.reserve(16, lanes=1, place=0)
    machine.call(OP, 16, place=1)
