"""The shipped policy over the simulated device, in every form of device that it knows."""

from __future__ import annotations

import os
import random
import time
from functools import partial

import pytest
from hypothesis.stateful import run_state_machine_as_test

from .conftest import SOAK, fixed, fresh
from .machine import Machine
from .shipped import Shipped


class Arenas(Machine):
    policy_over = Shipped


class Apart(Machine):
    """Ops do not share."""

    policy_over = partial(Shipped, shares=False)


class OnePool(Machine):
    """An engine that promised never to replay two graphs at once."""

    policy_over = partial(Shipped, one_pool=True)


class Blocks(Machine):
    """Addresses cannot be reserved."""

    policy_over = partial(Shipped, ranges=False)


class NoDriver(Machine):
    """No cuda-python."""

    policy_over = partial(Shipped, ranges=False, driver=False)


# At least 2,000 sequences in all.
MACHINES = {Arenas: 1000, Apart: 400, OnePool: 300, Blocks: 400, NoDriver: 200}


@pytest.mark.skipif(SOAK, reason="soaking")
@pytest.mark.parametrize(("machine", "examples"), MACHINES.items())
def test_the_shipped_policy(machine: type[Machine], examples: int) -> None:
    run_state_machine_as_test(machine, settings=fixed(examples))


@pytest.mark.skipif(not SOAK, reason="HYPOTHESIS_PROFILE=soak asks for it")
def test_soak(capsys: pytest.CaptureFixture[str]) -> None:
    """Fresh sequences for SOAK_MINUTES; SOAK_SEED repeats the round that it was printed for."""
    ends = time.monotonic() + 60 * float(os.environ.get("SOAK_MINUTES", "5"))
    given = os.environ.get("SOAK_SEED")
    while True:
        number = int(given) if given else random.SystemRandom().getrandbits(64)
        with capsys.disabled():
            print(f"\nSOAK_SEED={number}", flush=True)
        for machine in MACHINES:
            machine._hypothesis_internal_use_seed = number
            run_state_machine_as_test(machine, settings=fresh(500))
        if given or time.monotonic() > ends:
            break
