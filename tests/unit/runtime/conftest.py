from __future__ import annotations

from collections.abc import Iterator

import pytest

from flashinfer.gemm_workspace.state import State, log, use_device

from .fake_device import FakeDevice


@pytest.fixture
def state() -> Iterator[State]:
    level = log.level
    with use_device(FakeDevice()) as state:
        yield state
    log.setLevel(level)


@pytest.fixture
def device(state: State) -> FakeDevice:
    assert isinstance(state.device, FakeDevice)
    return state.device
