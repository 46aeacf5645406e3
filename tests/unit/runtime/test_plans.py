"""Plan builds and handles: refused under capture, locked and relaxed otherwise."""

from __future__ import annotations

import functools
import logging
from typing import Any

import pytest
import torch

from flashinfer.gemm_workspace import (
    CudnnCaptureUnsafeError,
    CudnnPlanBuildInCaptureError,
    _check_cudnn_plan_build_not_capturing,
    create_cudnn_handle,
    guard_plan_build,
    stats,
)
from flashinfer.gemm_workspace.settings import ALLOW
from flashinfer.gemm_workspace.state import State

from .fake_device import FakeDevice

CUDA = torch.device("cuda:0")


@pytest.fixture
def builds() -> list[int]:
    return []


@pytest.fixture
def build(device: FakeDevice, builds: list[int]) -> Any:
    @functools.lru_cache(maxsize=8)
    @guard_plan_build
    def build_cudnn_gemm_fp8_graph(a_shape, b_shape, device, cache_m=8192, tactic=-1):  # type: ignore[no-untyped-def]
        """The builder's own."""
        _check_cudnn_plan_build_not_capturing("GEMM")
        builds.append(fake.relaxed_depth)
        return object()

    fake = device
    return build_cudnn_gemm_fp8_graph


def test_the_message(device: FakeDevice, build: Any, builds: list[int]) -> None:
    with device.capturing(), pytest.raises(CudnnPlanBuildInCaptureError) as caught:
        build((1, 16, 32), (1, 32, 64), CUDA)
    text = str(caught.value)
    for part in (
        "plan for gemm_fp8 (a_shape=(1, 16, 32), b_shape=(1, 32, 64), cache_m=8192)",
        "current stream of cuda:0",
        "Call this shape once outside the capture first",
        "tensor-parallel group",
        f"{ALLOW}=1",
    ):
        assert part in text
    assert "tactic" not in text
    assert isinstance(caught.value, CudnnCaptureUnsafeError)
    assert builds == []
    assert stats()["builds_refused"] == 1


def test_ends_nothing_and_the_next_build_works(
    device: FakeDevice, build: Any, builds: list[int]
) -> None:
    with device.capturing(), pytest.raises(CudnnPlanBuildInCaptureError):
        build((1,), (2,), CUDA)
    plan = build((1,), (2,), CUDA)
    with device.capturing():
        assert build((1,), (2,), CUDA) is plan  # a hit asks nothing
    assert builds == [1]
    assert device.relaxed_depth == 0


def test_relaxed_and_lock_end_with_a_failed_build(device: FakeDevice, state: State) -> None:
    @guard_plan_build
    def build_broken(device: torch.device) -> None:
        assert state.device_lock(0)._is_owned()  # type: ignore[attr-defined]
        raise ValueError("unsupported")

    with pytest.raises(ValueError, match="unsupported"):
        build_broken(CUDA)
    assert device.relaxed_depth == 0
    assert not state.device_lock(0)._is_owned()  # type: ignore[attr-defined]
    with device.capturing(), pytest.raises(CudnnPlanBuildInCaptureError):
        _check_cudnn_plan_build_not_capturing("GEMM")


def test_keeps_the_builders_name_and_docstring(build: Any) -> None:
    assert build.__name__ == "build_cudnn_gemm_fp8_graph"
    assert build.__doc__ == "The builder's own."
    assert build.cache_info().misses == 0


def test_the_device_is_the_arguments(device: FakeDevice, build: Any) -> None:
    device.current = 1
    with device.capturing(index=1):
        build((1,), (1,), device=CUDA)  # device 0 does not capture: the inner check agrees
    with device.capturing(index=0), pytest.raises(CudnnPlanBuildInCaptureError, match="cuda:0"):
        build((2,), (2,), device=CUDA)


def test_the_device_of_a_handle(device: FakeDevice) -> None:
    @guard_plan_build
    def _build_cudnn_moe_grouped_gemm_graph(handle: int, token_shape: tuple[int, ...]) -> int:
        return 1

    on_one = create_cudnn_handle(lambda: 4711, torch.device("cuda:1"))
    with device.capturing(index=1):
        with pytest.raises(CudnnPlanBuildInCaptureError, match="moe_grouped_gemm"):
            _build_cudnn_moe_grouped_gemm_graph(on_one, (1, 2))
        assert _build_cudnn_moe_grouped_gemm_graph(99, (1, 2)) == 1  # unknown: current device


def test_the_switch_makes_it_one_warning_per_op(
    device: FakeDevice,
    build: Any,
    builds: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with device.capturing():
        monkeypatch.setenv(ALLOW, "1")
        with caplog.at_level(logging.WARNING):
            build((1,), (1,), CUDA)
            build((2,), (2,), CUDA)
        monkeypatch.setenv(ALLOW, "0")  # read at each refusal
        with pytest.raises(CudnnPlanBuildInCaptureError):
            build((3,), (3,), CUDA)
    assert builds == [1, 1]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "gemm_fp8" in caplog.text
    assert stats()["builds_refused"] == 1


def test_a_wrong_call_gets_the_builders_own_error(build: Any) -> None:
    with pytest.raises(TypeError, match="a_shape"):
        build()


def test_handles(device: FakeDevice, state: State) -> None:
    def create() -> int:
        assert device.current == 1
        assert device.relaxed_depth == 1
        assert state.device_lock(1)._is_owned()  # type: ignore[attr-defined]
        return 5

    with (
        device.capturing(index=1),
        pytest.raises(CudnnPlanBuildInCaptureError, match="cuDNN handle is to be made") as caught,
    ):
        create_cudnn_handle(create, 1)
    assert "cuda:1" in str(caught.value)
    assert state.handles == {}
    assert create_cudnn_handle(create, 1) == 5
    assert create_cudnn_handle(create, torch.device("cuda:1")) == 5
    assert state.handles == {5: 1}
    assert device.current == 0


def test_the_check_alone(device: FakeDevice) -> None:
    _check_cudnn_plan_build_not_capturing("GEMM")
    with device.capturing(), pytest.raises(CudnnPlanBuildInCaptureError, match="plan for GEMM"):
        _check_cudnn_plan_build_not_capturing("GEMM")


def test_a_handle_on_the_real_cpu() -> None:
    assert create_cudnn_handle(lambda: 3, torch.device("cpu")) == 3
