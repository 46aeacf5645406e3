"""The environment variables."""

from __future__ import annotations

import re

import pytest

from flashinfer.gemm_workspace import settings as module
from flashinfer.gemm_workspace.settings import Settings, plan_build_allowed
from flashinfer.gemm_workspace.state import State

from .fake_device import FakeDevice

PREFIX = "FLASHINFER_GEMM_WORKSPACE_"
NAMES = ("SHARE", "SINGLE_CAPTURE_LANE", "SEAL_POLICY", "LOG", "ZERO")


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, Settings()),
        ({"SHARE": ""}, Settings(share=None)),
        ({"SHARE": "1"}, Settings(share=True)),
        ({"SHARE": " 0 "}, Settings(share=False)),
        ({"SINGLE_CAPTURE_LANE": "1"}, Settings(single_capture_lane=True)),
        ({"SINGLE_CAPTURE_LANE": "0"}, Settings()),
        ({"SEAL_POLICY": "warn"}, Settings(seal_is_error=False)),
        ({"SEAL_POLICY": "ERROR"}, Settings()),
        ({"LOG": "1"}, Settings(log_growths=True)),
        ({"LOG": "0", "ZERO": "0"}, Settings()),
        ({"ZERO": "1"}, Settings(zero=True)),
    ],
)
def test_values(environment: dict[str, str], wanted: Settings) -> None:
    assert Settings.read({PREFIX + key: value for key, value in environment.items()}) == wanted


@pytest.mark.parametrize("name", NAMES)
def test_a_value_without_a_meaning(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{PREFIX}{name} is 'perhaps', wanted one of"):
        Settings.read({PREFIX + name: "perhaps"})


def test_read_once_at_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    state = State(FakeDevice())
    monkeypatch.setenv(PREFIX + "SHARE", "0")
    assert not state.shares(0)
    monkeypatch.setenv(PREFIX + "SHARE", "1")
    assert not state.shares(0)
    assert not state.shares(1)


def test_every_variable_is_documented() -> None:
    text = re.sub(r"\s", "", module.__doc__ or "")
    for name in NAMES:
        assert name in text
    assert module.ALLOW == "FLASHINFER_ALLOW_CUDNN_PLAN_BUILD_IN_CAPTURE"


def test_the_plan_build_switch_is_read_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not plan_build_allowed()
    monkeypatch.setenv(module.ALLOW, "1")
    assert plan_build_allowed()
