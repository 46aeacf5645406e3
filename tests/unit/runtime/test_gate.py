"""The SM12x gate of ``bmm_fp8``."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashinfer.gemm_workspace import gate_sm12x_cudnn

from .fake_device import FakeDevice

ALL = ["cutlass", "cublas", "cudnn"]


def _raises() -> int:
    raise RuntimeError("no backend library")


def _install(monkeypatch: pytest.MonkeyPatch, version: Any) -> None:
    if version is None:
        monkeypatch.delitem(sys.modules, "cudnn", raising=False)
        return
    call = version if callable(version) else lambda: version
    monkeypatch.setitem(sys.modules, "cudnn", SimpleNamespace(backend_version=call))


@pytest.mark.parametrize("sm", [(12, 0), (12, 1)])
@pytest.mark.parametrize("version", [92000, 92300, None, _raises])
def test_removes_cudnn(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch, sm: tuple[int, int], version: Any
) -> None:
    device.sm = sm
    _install(monkeypatch, version)
    names = list(ALL)
    assert gate_sm12x_cudnn(names, torch.empty(1)) == ["cutlass", "cublas"]
    assert names == ALL


@pytest.mark.parametrize(
    ("sm", "version", "names"),
    [
        ((12, 0), 92301, ALL),
        ((9, 0), 92000, ALL),
        ((10, 3), 92000, ALL),
        ((12, 0), 92000, ["cudnn"]),
        ((12, 0), 92000, ["cutlass"]),
        ((12, 0), 92000, []),
    ],
)
def test_leaves_the_same_list(
    device: FakeDevice,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    sm: tuple[int, int],
    version: int,
    names: list[str],
) -> None:
    device.sm = sm
    _install(monkeypatch, version)
    assert gate_sm12x_cudnn(names, torch.empty(1)) is names
    assert caplog.text == ""


def test_one_line_and_one_query(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device.sm = (12, 0)
    _install(monkeypatch, 92000)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            gate_sm12x_cudnn(ALL, torch.empty(1))
    (record,) = caplog.records
    text = record.getMessage()
    assert record.levelname == "WARNING"
    assert text.startswith("Skipping cuDNN in bmm_fp8 auto candidates on SM12x")
    assert "92000" in text
    assert "92301" in text
    assert "update cuDNN" in text
    assert device.capability_queries == 1


def test_the_real_cpu_is_not_gated() -> None:
    assert gate_sm12x_cudnn(ALL, torch.empty(1)) is ALL
