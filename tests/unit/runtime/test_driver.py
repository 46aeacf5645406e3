"""The driver calls, over a recording stand-in for cuda-python of either major version."""

from __future__ import annotations

import ctypes
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from flashinfer.gemm_workspace import driver
from flashinfer.gemm_workspace.errors import (
    CudnnCaptureUnsafeError,
    DriverError,
    DriverOutOfMemory,
    DriverUnavailable,
)
from flashinfer.gemm_workspace.semaphores import _libc

RELAXED = 2


class Bindings(ModuleType):
    """Records each call; ``fails`` maps a name to its status."""

    class CUstreamCaptureMode:
        CU_STREAM_CAPTURE_MODE_RELAXED = RELAXED

    class CUstream_flags:
        CU_STREAM_NON_BLOCKING = 1

    class CUuserObject_flags:
        CU_USER_OBJECT_NO_DESTRUCTOR_SYNC = 1

    class CUuserObjectRetain_flags:
        CU_GRAPH_USER_OBJECT_MOVE = 1

    class CUmemAllocationType:
        CU_MEM_ALLOCATION_TYPE_PINNED = 1

    class CUmemLocationType:
        CU_MEM_LOCATION_TYPE_DEVICE = 1

    class CUmemAllocationGranularity_flags:
        CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0

    class CUmemAccess_flags:
        CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3

    class CUmemAllocationProp:
        def __init__(self) -> None:
            self.location = SimpleNamespace()

    CUmemAccessDesc = SimpleNamespace
    CUstream = CUgraph = CUhostFn = int

    def __init__(self) -> None:
        super().__init__("bindings")
        self.calls: list[tuple[Any, ...]] = []
        self.fails: dict[str, int] = {}
        self.mode = 0
        self.info: tuple[Any, ...] = (1, 42, 77, [], 0)
        self.reads = bytes([0, 0x5A])  # what a probe finds
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
                "cuMemAddressReserve": (0x4000,),
                "cuMemCreate": ("handle",),
                "cuMemGetAllocationGranularity": (64,),
                "cuUserObjectCreate": ("object",),
                "cuStreamGetId": (12,),
            }
            if name == "cuMemcpyDtoHAsync":
                ctypes.memmove(args[0], self.reads[:1], 1)
                self.reads = self.reads[1:]
            assert name == "cuStreamGetId" or self.mode == RELAXED
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
    driver._found.cache_clear()
    driver._capture_query.cache_clear()
    yield made
    driver._found.cache_clear()
    driver._capture_query.cache_clear()


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("cuda", "cuda.bindings", "cuda.bindings.driver", "cuda.cuda"):
        monkeypatch.setitem(sys.modules, name, None)
    driver._found.cache_clear()
    yield
    driver._found.cache_clear()


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


def test_capture_info(bindings: Bindings) -> None:
    assert driver.capture_info(3) == (42, 77)
    bindings.info = (1, 43, 78, [], [], 0)  # major 13 adds a field
    assert driver.capture_info(3) == (43, 78)


def test_capture_info_that_fails(bindings: Bindings) -> None:
    bindings.fails["cuStreamGetCaptureInfo"] = 400
    with pytest.raises(DriverError, match="cuStreamGetCaptureInfo failed: 400"):
        driver.capture_info(3)


def test_stream_id(bindings: Bindings) -> None:
    assert driver.stream_id(3) == 12


@pytest.mark.parametrize("name", ["cuStreamGetCaptureInfo_v2", "cuStreamGetCaptureInfo_v3"])
def test_capture_info_under_its_other_names(bindings: Bindings, name: str) -> None:
    bindings.info_name = name
    assert driver.capture_info(3) == (42, 77)


def test_capture_info_of_an_invalid_capture(bindings: Bindings) -> None:
    bindings.info = (2, 0, None)
    with pytest.raises(CudnnCaptureUnsafeError, match=r"status 2, wanted active.*capture again"):
        driver.capture_info(3)


def test_without_a_driver(absent: None) -> None:
    ran = False
    with driver.relaxed():
        ran = True
    assert ran
    for call in (
        lambda: driver.capture_info(3),
        lambda: driver.allocate(0, 8),
        lambda: driver.tie(3),
        lambda: driver.stream_id(3),
    ):
        with pytest.raises(DriverUnavailable, match="neither"):
            call()
    assert not driver.can_map(0)


def test_without_libcuda(bindings: Bindings) -> None:
    def raises(*args: Any) -> Any:
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    bindings.cuThreadExchangeStreamCaptureMode = raises
    with driver.relaxed():
        pass
    with pytest.raises(DriverUnavailable, match="libcuda"):
        driver.allocate(0, 8)


def test_map_in_order(bindings: Bindings) -> None:
    driver.map_memory(1, 0x4000, 64)
    calls = bindings.calls
    assert bindings.names[4:12] == [
        "cuMemCreate",
        "cuMemMap",
        "cuMemSetAccess",
        "cuStreamCreate",
        "cuMemsetD8Async",
        "cuStreamSynchronize",
        "cuStreamDestroy",
        "cuMemRelease",
    ]
    properties = calls[4][2]
    assert (properties.type, properties.location.type, properties.location.id) == (1, 1, 1)
    assert calls[5] == ("cuMemMap", 0x4000, 64, 0, "handle", 0)
    access = calls[6][3][0]
    assert (access.location, access.flags) == (properties.location, 3)
    assert calls[8] == ("cuMemsetD8Async", 0x4000, 0, 64, "side")
    assert bindings.mode == 0


@pytest.mark.parametrize(
    "step",
    [
        "cuMemCreate",
        "cuMemMap",
        "cuMemSetAccess",
        "cuStreamCreate",
        "cuMemsetD8Async",
        "cuStreamSynchronize",
    ],
)
@pytest.mark.parametrize(("status", "kind"), [(2, DriverOutOfMemory), (719, DriverError)])
def test_a_failed_mapping_is_undone(
    bindings: Bindings, step: str, status: int, kind: type[Exception]
) -> None:
    bindings.fails[step] = status
    with pytest.raises(DriverError, match=f"{step} failed") as caught:
        driver.map_memory(0, 0x4000, 64)
    assert type(caught.value) is kind
    names = bindings.names
    assert names.count("cuMemUnmap") == (step not in ("cuMemCreate", "cuMemMap"))
    assert names.count("cuMemRelease") == (step != "cuMemCreate")
    assert names.count("cuCtxPopCurrent") == names.count("cuCtxPushCurrent") == 1
    assert bindings.mode == 0


def test_the_probe_works_for_real_and_leaves_nothing(bindings: Bindings) -> None:
    assert driver.can_map(0)
    names = bindings.names
    assert names.count("cuMemcpyDtoHAsync") == 2
    for done, undone in (
        ("cuMemAddressReserve", "cuMemAddressFree"),
        ("cuMemMap", "cuMemUnmap"),
        ("cuMemCreate", "cuMemRelease"),
        ("cuStreamCreate", "cuStreamDestroy"),
    ):
        assert names.count(done) == names.count(undone) > 0
    assert names.index("cuMemUnmap") < names.index("cuMemAddressFree")


@pytest.mark.parametrize("reads", [bytes([7, 0x5A]), bytes([0, 7])])
def test_memory_that_reads_back_wrong_is_not_used(bindings: Bindings, reads: bytes) -> None:
    bindings.reads = reads
    assert not driver.can_map(0)


@pytest.mark.parametrize(
    "step", ["cuMemAddressReserve", "cuMemCreate", "cuMemSetAccess", "cuMemcpyDtoHAsync"]
)
def test_a_probe_that_fails(bindings: Bindings, step: str) -> None:
    bindings.fails[step] = 801  # not supported
    assert not driver.can_map(0)
    reserved = step != "cuMemAddressReserve"
    assert bindings.names.count("cuMemAddressFree") == reserved
    bindings.fails[step] = 2
    with pytest.raises(DriverOutOfMemory):
        driver.can_map(0)


def test_a_tie_is_released_by_its_destructor(bindings: Bindings) -> None:
    token = driver.tie(77)
    create = next(call for call in bindings.calls if call[0] == "cuUserObjectCreate")
    retain = next(call for call in bindings.calls if call[0] == "cuGraphRetainUserObject")
    assert retain == ("cuGraphRetainUserObject", 77, "object", 1, 1)
    assert not token.released()
    address = create[1]
    ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(create[2])(address)  # as the driver does
    assert token.released()
    assert token.released()
    # The next one starts at zero, wherever it lives.
    again = driver.tie(78)
    assert again.semaphore is not None
    assert again.semaphore.address == address
    assert not again.released()


def test_a_tie_that_fails(bindings: Bindings) -> None:
    bindings.fails["cuUserObjectCreate"] = 801
    with pytest.raises(DriverError):
        driver.tie(77)
    bindings.fails = {"cuGraphRetainUserObject": 801}
    with pytest.raises(DriverError):
        driver.tie(77)
    assert bindings.names.count("cuUserObjectRelease") == 1
    assert bindings.mode == 0
    # The object that was made may post to its semaphore yet: no later tie gets that one.
    bindings.fails = {}
    failed = [call[1] for call in bindings.calls if call[0] == "cuUserObjectCreate"][-1]
    later = driver.tie(78)
    assert later.semaphore is not None
    assert later.semaphore.address != failed


def test_semaphores_are_of_libc() -> None:
    assert _libc() is not None
