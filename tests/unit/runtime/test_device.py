"""The real device, as far as a machine without a GPU can show it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch

from flashinfer.gemm_workspace import driver, torch_internals
from flashinfer.gemm_workspace.device import CPU, CudaDevice


def test_the_cpu_needs_no_cuda() -> None:
    device = CudaDevice()
    assert device.index_of(torch.device("cpu")) == CPU
    assert device.index_of(torch.device("meta")) is None
    assert device.index_of(torch.device("cuda:3")) == 3
    assert not device.is_capturing(CPU)
    assert device.raw_stream(CPU) == 0
    assert device.free_bytes(CPU) is None
    assert device.idle_bytes(CPU) == 0
    assert device.capability(CPU) == (0, 0)
    with device.device_guard(CPU), device.relaxed():
        assert device.allocate_eager(CPU, 4).tolist() == [0, 0, 0, 0]


def test_too_much_for_the_cpu() -> None:
    with pytest.raises(MemoryError):
        CudaDevice().allocate_eager(CPU, 1 << 62)


def test_capture_is_asked_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    here = [0]

    @contextmanager
    def switch(index: int) -> Any:
        before, here[0] = here[0], index
        yield
        here[0] = before

    monkeypatch.setattr(torch_internals, "current_device", lambda: here[0])
    monkeypatch.setattr(torch.cuda, "device", switch)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: here[0] == 1)
    assert CudaDevice().is_capturing(1)
    assert not CudaDevice().is_capturing(0)
    here[0] = 1
    assert CudaDevice().is_capturing(1)
    assert not CudaDevice().is_capturing(0)


def test_memory_that_torch_cannot_wrap_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[tuple[int, int]] = []
    monkeypatch.setattr(driver, "allocate", lambda index, nbytes: 0x1000)
    monkeypatch.setattr(driver, "free", lambda index, address: freed.append((index, address)))

    def as_tensor(memory: Any, device: str) -> None:
        assert memory.__cuda_array_interface__["data"] == (0x1000, False)
        assert memory.__cuda_array_interface__["shape"] == (8,)
        assert device == "cuda:1"
        raise RuntimeError("no such device")

    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    with pytest.raises(RuntimeError, match="no such device"):
        CudaDevice().allocate_in_capture(1, 8)
    assert freed == [(1, 0x1000)]
