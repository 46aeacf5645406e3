"""The driver calls, over a recording stand-in for cuda-python of either major version."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from flashinfer.gemm_workspace import driver
from flashinfer.gemm_workspace.errors import (
    CudnnCaptureUnsafeError,
    DriverError,
    DriverUnavailable,
)

RELAXED = 2


class Bindings(ModuleType):
    """Records each call; ``fails`` maps a name to its status."""

    class CUstreamCaptureMode:
        CU_STREAM_CAPTURE_MODE_RELAXED = RELAXED

    class CUstream_flags:
        CU_STREAM_NON_BLOCKING = 1

    CUstream = int

    def __init__(self) -> None:
        super().__init__("bindings")
        self.calls: list[tuple[Any, ...]] = []
        self.fails: dict[str, int] = {}
        self.mode = 0
        self.info: tuple[Any, ...] = (1, 42, "graph", [], 0)
        self.info_name = "cuStreamGetCaptureInfo"

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu") or name == "cuda":
            raise AttributeError(name)
        if name.startswith("cuStreamGetCaptureInfo") and name != self.info_name:
            raise AttributeError(name)

        def call(*args: Any) -> tuple[Any, ...]:
            self.calls.append((name, *args))
            if status := self.fails.get(name):
                return (status, None)
            if name == "cuThreadExchangeStreamCaptureMode":
                before, self.mode = self.mode, args[0]
                return (0, before)
            if name == self.info_name:
                return (0, *self.info)
            results = {
                "cuDeviceGet": ("dev",),
                "cuDevicePrimaryCtxRetain": ("ctx",),
                "cuMemAlloc": (0x1000,),
                "cuStreamCreate": ("side",),
                "cuCtxPopCurrent": ("ctx",),
            }
            assert name == "cuThreadExchangeStreamCaptureMode" or self.mode == RELAXED
            return (0, *results.get(name, ()))

        return call

    @property
    def names(self) -> list[str]:
        return [call[0] for call in self.calls]


@pytest.fixture(params=["cuda.bindings.driver", "cuda.cuda"])
def bindings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Bindings()
    for name in ("cuda", "cuda.bindings", "cuda.bindings.driver", "cuda.cuda"):
        monkeypatch.setitem(sys.modules, name, None)
    parent = request.param
    while "." in parent:
        parent = parent.rpartition(".")[0]
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    monkeypatch.setitem(sys.modules, request.param, made)
    driver._bindings.cache_clear()
    yield made
    driver._bindings.cache_clear()


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("cuda", "cuda.bindings", "cuda.bindings.driver", "cuda.cuda"):
        monkeypatch.setitem(sys.modules, name, None)
    driver._bindings.cache_clear()
    yield
    driver._bindings.cache_clear()


def test_allocate_in_order_and_restored(bindings: Bindings) -> None:
    assert driver.allocate(1, 100) == 0x1000
    assert bindings.calls == [
        ("cuThreadExchangeStreamCaptureMode", RELAXED),
        ("cuDeviceGet", 1),
        ("cuDevicePrimaryCtxRetain", "dev"),
        ("cuCtxPushCurrent", "ctx"),
        ("cuMemAlloc", 100),
        ("cuStreamCreate", 1),
        ("cuMemsetD8Async", 0x1000, 0, 100, "side"),
        ("cuStreamSynchronize", "side"),
        ("cuStreamDestroy", "side"),
        ("cuCtxPopCurrent",),
        ("cuDevicePrimaryCtxRelease", "dev"),
        ("cuThreadExchangeStreamCaptureMode", 0),
    ]


@pytest.mark.parametrize(
    "step",
    [
        "cuDeviceGet",
        "cuDevicePrimaryCtxRetain",
        "cuCtxPushCurrent",
        "cuMemAlloc",
        "cuStreamCreate",
        "cuMemsetD8Async",
        "cuStreamSynchronize",
    ],
)
def test_a_failure_at_any_step_leaves_nothing(bindings: Bindings, step: str) -> None:
    bindings.fails[step] = 2
    with pytest.raises(DriverError, match=f"{step} failed: 2"):
        driver.allocate(0, 100)
    names = bindings.names

    def done(name: str) -> bool:
        return name in names and name != step

    assert names.count("cuMemFree") == done("cuMemAlloc")
    assert names.count("cuStreamDestroy") == done("cuStreamCreate")
    assert names.count("cuCtxPopCurrent") == done("cuCtxPushCurrent")
    assert names.count("cuDevicePrimaryCtxRelease") == done("cuDevicePrimaryCtxRetain")
    assert bindings.mode == 0


def test_relaxed_restores_after_an_error(bindings: Bindings) -> None:
    seen = []

    def body() -> None:
        with driver.relaxed():
            seen.append(bindings.mode)
            raise KeyError

    with pytest.raises(KeyError):
        body()
    assert seen == [RELAXED]
    assert bindings.mode == 0


def test_capture_id(bindings: Bindings) -> None:
    assert driver.capture_id(3) == 42
    bindings.info = (1, 43, "graph", [], [], 0)  # major 13 adds a field
    assert driver.capture_id(3) == 43


@pytest.mark.parametrize("name", ["cuStreamGetCaptureInfo_v2", "cuStreamGetCaptureInfo_v3"])
def test_capture_id_under_its_other_names(bindings: Bindings, name: str) -> None:
    bindings.info_name = name
    assert driver.capture_id(3) == 42


def test_capture_id_of_an_invalid_capture(bindings: Bindings) -> None:
    bindings.info = (2, 0, None)
    with pytest.raises(CudnnCaptureUnsafeError, match=r"status 2, wanted active.*capture again"):
        driver.capture_id(3)


def test_without_a_driver(absent: None) -> None:
    ran = False
    with driver.relaxed():
        ran = True
    assert ran
    for call in (lambda: driver.capture_id(3), lambda: driver.allocate(0, 8)):
        with pytest.raises(DriverUnavailable, match="neither"):
            call()


def test_without_libcuda(bindings: Bindings) -> None:
    def raises(*args: Any) -> Any:
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    bindings.cuThreadExchangeStreamCaptureMode = raises
    with driver.relaxed():
        pass
    with pytest.raises(DriverUnavailable, match="libcuda"):
        driver.allocate(0, 8)
