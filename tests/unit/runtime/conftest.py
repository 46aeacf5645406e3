from __future__ import annotations

from collections.abc import Iterator

import pytest

from flashinfer.gemm_workspace.state import State, use_device

from .fake_device import FakeDevice


@pytest.fixture
def state() -> Iterator[State]:
    with use_device(FakeDevice()) as state:
        yield state


@pytest.fixture
def device(state: State) -> FakeDevice:
    assert isinstance(state.device, FakeDevice)
    return state.device
