"""First use under inference mode, a tracing mode or Dynamo leaves nothing behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from flashinfer.gemm_workspace import (
    _gemm_workspace_at_least,
    cache_buffer,
    lane_workspace,
)
from flashinfer.gemm_workspace.device import CudaDevice
from flashinfer.gemm_workspace.state import State, use_device

from .fake_device import FakeDevice

CPU = torch.device("cpu")
NAME = "bmm_fp8_workspace"


@pytest.fixture(params=[FakeDevice, CudaDevice])
def state(request: pytest.FixtureRequest) -> Any:
    with use_device(request.param()) as state:
        yield state


def test_fake_tensor_first(state: State) -> None:  # B31
    cache: dict[Any, Any] = {}
    with FakeTensorMode():
        fake = lane_workspace(NAME, 64, CPU)
        longer = _gemm_workspace_at_least(fake, 128)
        cached = cache_buffer(cache, "softmax", 64, CPU)
    outside = _gemm_workspace_at_least(fake, 100)
    assert all(isinstance(t, FakeTensor) for t in (fake, longer, cached, outside))
    assert (fake.numel(), longer.numel(), cached.numel(), outside.numel()) == (64, 128, 64, 100)
    assert not cache
    assert not state.lanes
    assert not state.buffers
    assert not state.hot
    real = lane_workspace(NAME, 64, CPU)
    assert type(real) is torch.Tensor
    assert type(cache_buffer(cache, "s", 8, CPU)) is torch.Tensor
    with FakeTensorMode():  # a real lane does not reach a fake call either
        assert isinstance(lane_workspace(NAME, 64, CPU), FakeTensor)
        cache_buffer(cache, NAME, 1000, CPU)
    assert state.floors == {}


def test_inference_mode_first(state: State) -> None:  # B24
    cache: dict[Any, Any] = {}
    with torch.inference_mode():
        view = lane_workspace(NAME, 64, CPU)
        cached = cache_buffer(cache, "row_states", 64, CPU, zero_init=True)
        longer = cache_buffer(cache, "row_states", 65, CPU, zero_init=True)
        within = cache_buffer(cache, "row_states", 66, CPU, zero_init=True)
    for tensor in (view, cached, longer, within):
        assert not tensor.is_inference()
        autograd = torch._C._autograd
        assert autograd._get_creation_meta(tensor) == autograd.CreationMeta.DEFAULT
        tensor.add_(1)
    grown = _gemm_workspace_at_least(view, 50 * 1024 * 1024)
    grown[:8].fill_(1)


def test_functional_mode(state: State) -> None:
    from torch._subclasses.functional_tensor import FunctionalTensorMode

    with FunctionalTensorMode():
        lane_workspace(NAME, 64, CPU)
    assert not state.lanes


def test_dynamo(state: State) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x + lane_workspace(NAME, 4, CPU).numel()

    compiled = torch.compile(f, backend="eager", fullgraph=True)
    assert compiled(torch.zeros(1)).item() == 4
    assert not state.lanes


def test_a_mode_that_sees_real_tensors_is_no_tracing(state: State) -> None:
    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            return func(*args, **(kwargs or {}))

    first = lane_workspace(NAME, 64, CPU)
    with Count():
        assert lane_workspace(NAME, 64, CPU) is first
