"""The real device, as far as a machine without a GPU can show it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from flashinfer.gemm_workspace import (
    _gemm_workspace_at_least,
    _retain_cudnn_graph_if_capturing,
    device_locked,
    driver,
    lane_workspace,
    lanes,
    torch_internals,
)
from flashinfer.gemm_workspace import device as device_module
from flashinfer.gemm_workspace.device import CPU, CudaDevice
from flashinfer.gemm_workspace.errors import DriverOutOfMemory, DriverUnavailable
from flashinfer.gemm_workspace.state import use_device

from .fake_device import FakeDevice


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
        assert device.allocate(CPU, 4, False).tolist() == [0, 0, 0, 0]
    assert device.new_range(CPU, 8) is None
    assert device.stream_key(CPU, 0) == 0
    assert device.release_idle(CPU) == 0
    assert device.total_bytes(CPU) == 0
    device.synchronize(CPU)


def test_too_much_for_the_cpu() -> None:
    with pytest.raises(MemoryError):
        CudaDevice().allocate(CPU, 1 << 62, False)


def test_capture_is_asked_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    here = [0]

    @contextmanager
    def switch(index: int) -> Any:
        before, here[0] = here[0], index
        yield
        here[0] = before

    monkeypatch.setattr(device_module, "_here", lambda: here[0])
    monkeypatch.setattr(torch.cuda, "device", switch)
    monkeypatch.setattr(device_module, "_capturing", lambda: here[0] == 1)
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
        CudaDevice().allocate(1, 8, True)
    assert freed == [(1, 0x1000)]


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*args: Any) -> Any:
        raise DriverUnavailable("none")

    made = torch.zeros(8, dtype=torch.uint8)
    monkeypatch.setattr(driver, "allocate", absent)
    monkeypatch.setattr(driver, "stream_id", absent)
    monkeypatch.setattr(CudaDevice, "allocate_torch", lambda self, index, nbytes: made)
    waited: list[int] = []
    stream = SimpleNamespace(synchronize=lambda: waited.append(1))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: stream)
    assert CudaDevice().allocate(0, 8, False) is made
    assert waited == [1]  # clean for every stream, as the driver's memory is
    with pytest.raises(DriverUnavailable):
        CudaDevice().allocate(0, 8, True)
    monkeypatch.setattr(torch_internals, "_current_stream", lambda index: (0x7F00, index, 1))
    assert CudaDevice().stream_key(0, 0x7F00) == 0x7F00  # the handle is all there is


def test_a_stream_of_torchs_is_its_handle_and_a_strangers_is_asked_for_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(driver, "stream_id", lambda stream: asked.append(stream) or len(asked))
    device = CudaDevice()
    for stream_id in (0, 3, 35):
        monkeypatch.setattr(torch_internals, "_current_stream", lambda i, s=stream_id: (s, i, 1))
        assert device.stream_key(0, 4096 + stream_id) == 4096 + stream_id
    assert asked == []
    monkeypatch.setattr(torch_internals, "_current_stream", lambda index: (0x7F00, index, 1))
    assert device.stream_key(0, 0x7F00) == ("id", 1)
    assert device.stream_key(0, 0x7F00) == ("id", 2)


@pytest.mark.parametrize("works", [True, False])
def test_the_range_is_probed_once(monkeypatch: pytest.MonkeyPatch, works: bool) -> None:
    probes: list[int] = []
    monkeypatch.setattr(driver, "can_map", lambda index: probes.append(index) or works)
    monkeypatch.setattr(driver, "granularity", lambda index: 64)
    monkeypatch.setattr(driver, "reserve_addresses", lambda index, nbytes: 0x4000)
    mapped: list[tuple[int, int, int]] = []
    monkeypatch.setattr(driver, "map_memory", lambda *args: mapped.append(args))
    device = CudaDevice()
    got = [device.new_range(1, 100) for _ in range(2)]
    assert probes == [1]
    if not works:
        assert got == [None, None]
        return
    assert got[0] is not None
    assert (got[0].address, got[0].nbytes, got[0].granularity) == (0x4000, 128, 64)
    got[0].map(64, 64)
    assert mapped == [(1, 0x4040, 64)]


def test_a_full_device_does_not_settle_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(index: int) -> bool:
        raise DriverOutOfMemory("cuMemCreate failed: 2")

    monkeypatch.setattr(driver, "can_map", full)
    device = CudaDevice()
    with pytest.raises(DriverOutOfMemory):
        device.new_range(0, 8)
    monkeypatch.setattr(driver, "can_map", lambda index: False)
    assert device.new_range(0, 8) is None


class Machine:
    """What torch's own functions say, for the real device over the fake one's memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.here, self.capturing, self.stream, self.stream_id = 0, False, 0, 0
        self.calls: list[str] = []
        memory = FakeDevice()
        for module in (device_module, lanes):
            monkeypatch.setattr(module, "_here", lambda: self._say("here", self.here))
            monkeypatch.setattr(module, "_capturing", lambda: self._say("query", self.capturing))
            monkeypatch.setattr(module, "_raw_stream", lambda i: self._say("raw", self.stream))
        monkeypatch.setattr(
            torch_internals, "_current_stream", lambda index: (self.stream_id, index, 1)
        )
        monkeypatch.setattr(driver, "stream_id", lambda stream: self.stream_id)
        for name in ("new_range", "total_bytes", "capability", "capture", "pool_of", "tie"):
            monkeypatch.setattr(CudaDevice, name, staticmethod(getattr(memory, name)))
        memory.captures[0, 64] = 1

    def _say(self, call: str, value: Any) -> Any:
        self.calls.append(call)
        return value


CUDA0 = torch.device("cuda:0")


def test_a_hit_costs_one_capture_query_and_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    with use_device(CudaDevice()):
        first = lane_workspace("bmm_fp8_workspace", 64, CUDA0)
        machine.calls.clear()
        assert lane_workspace("bmm_fp8_workspace", 64, CUDA0) is first
        assert machine.calls == ["here", "query", "raw"]
        longer = _gemm_workspace_at_least(first, 128)
        machine.calls.clear()
        assert _gemm_workspace_at_least(first, 128) is longer
        assert machine.calls == ["here", "query", "raw"]
        machine.calls.clear()
        assert _gemm_workspace_at_least(first, 64) is first
        assert machine.calls == ["here", "query"]
        machine.stream, machine.stream_id, machine.capturing = 64, 33, True
        captured = lane_workspace("bmm_fp8_workspace", 64, CUDA0)
        machine.calls.clear()
        assert lane_workspace("bmm_fp8_workspace", 64, CUDA0) is captured
        assert machine.calls == ["here", "query", "raw"]
        machine.calls.clear()
        assert lane_workspace("mm_fp4_workspace", 64, CUDA0) is captured  # never asked eagerly
        assert machine.calls == ["here", "query", "raw"]


def test_the_only_device_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    for devices, calls in ((1, ["query", "raw"]), (2, ["here", "query", "raw"])):
        monkeypatch.setattr(torch.cuda, "device_count", lambda devices=devices: devices)
        with use_device(CudaDevice()):
            first = lane_workspace("bmm_fp8_workspace", 64, CUDA0)
            longer = _gemm_workspace_at_least(first, 128)
            machine.calls.clear()
            assert lane_workspace("bmm_fp8_workspace", 64, CUDA0) is first
            assert machine.calls == calls
            machine.calls.clear()
            assert _gemm_workspace_at_least(first, 128) is longer
            assert machine.calls == calls
            machine.calls.clear()
            assert _gemm_workspace_at_least(first, 64) is first
            assert machine.calls == calls[:-1]


def test_a_blas_handle_is_made_once_a_thread_and_relaxed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, bool]] = []
    inside: list[bool] = []

    @contextmanager
    def relaxed() -> Iterator[None]:
        inside.append(True)
        yield
        inside.pop()

    device = CudaDevice()
    monkeypatch.setattr(device, "relaxed", relaxed)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(
        torch.cuda,
        "current_blas_handle",
        lambda: made.append((threading.current_thread().name, bool(inside))),
    )
    device.make_blas_handle(CPU)
    device.make_blas_handle(0)
    device.make_blas_handle(0)
    worker = threading.Thread(target=device.make_blas_handle, args=(0,), name="worker")
    worker.start()
    worker.join()
    assert made == [("MainThread", True), ("worker", True)]

    def broken() -> None:
        raise RuntimeError("CUBLAS_STATUS_NOT_INITIALIZED")

    monkeypatch.setattr(torch.cuda, "current_blas_handle", broken)
    device.make_blas_handle(1)


def test_the_cpu_is_never_the_only_device(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    device = CudaDevice()
    device.stream_key(CPU, 0)
    machine.capturing = True
    assert not device.alone(CPU)
    assert not device.is_capturing(CPU)


def test_an_execution_asks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    operand = type("Operand", (), {"device": CUDA0})()

    @device_locked
    def execute(a: object, workspace: torch.Tensor) -> torch.Tensor:
        _retain_cudnn_graph_if_capturing(execute)
        return _gemm_workspace_at_least(_gemm_workspace_at_least(workspace, 64), 128)

    with use_device(CudaDevice()) as state:
        first = lane_workspace("bmm_fp8_workspace", 64, CUDA0)
        execute(operand, first)
        machine.calls.clear()
        execute(operand, first)
        assert machine.calls == ["here", "query", "raw"]
        machine.stream, machine.stream_id, machine.capturing = 64, 33, True
        memory = state.device.capture.__self__  # type: ignore[attr-defined]
        execute(operand, first)
        asked = memory.captures_asked
        captured = execute(operand, first)
        assert memory.captures_asked == asked + 1
        assert captured.data_ptr() == lane_workspace("bmm_fp8_workspace", 64, CUDA0).data_ptr()
        assert memory.captures_asked == asked + 2  # outside an execution each asks for itself
        machine.stream, machine.stream_id, machine.capturing = 0, 0, False
        assert execute(operand, first).data_ptr() == first.data_ptr()


def test_the_hot_path_knows_the_request_and_sees_a_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch)
    with use_device(CudaDevice()) as state:
        real = lane_workspace("bmm_fp8_workspace", 64, CUDA0)
        assert state.hot == {("bmm_fp8_workspace", 64, CUDA0): (0, {0: real}, False)}
        with FakeTensorMode():
            assert isinstance(lane_workspace("bmm_fp8_workspace", 64, CUDA0), FakeTensor)
        assert lane_workspace("bmm_fp8_workspace", 64, CUDA0) is real


def test_the_hot_path_follows_stream_capture_and_state(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)

    def ask() -> int:
        views = {lane_workspace("bmm_fp8_workspace", 64, CUDA0).data_ptr() for _ in range(2)}
        assert len(views) == 1
        return views.pop()

    with use_device(CudaDevice()) as state:
        default = ask()
        machine.stream, machine.stream_id = 64, 33  # one of torch's
        other = ask()
        machine.capturing = True
        captured = ask()
        machine.capturing = False
        assert (ask(), len({default, other, captured})) == (other, 3)
        machine.stream, machine.stream_id = 128, 128  # a stranger's, then another at its handle
        stranger = ask()
        machine.stream_id = 256
        monkeypatch.setattr(CudaDevice, "synchronize", lambda self, index: None)
        ask()
        # Its storage may be the same after the synchronisation; its lane is another.
        assert [lane.key for lane in state.lanes.values() if lane.stream == 128] == [
            (0, ("id", 256))
        ]
        assert stranger not in {default, other, captured}
        machine.stream, machine.stream_id = 0, 0
        assert ask() == default
    with use_device(CudaDevice()):
        assert ask() != default


def test_the_hot_path_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch)
    monkeypatch.setattr(lanes, "HOT", 8)
    with use_device(CudaDevice()) as state:
        for nbytes in range(1, 100):
            lane_workspace("bmm_fp8_workspace", nbytes, CUDA0)
        assert len(state.hot) <= 8


def test_a_device_without_an_index_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)  # A32
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: machine.here)
    with use_device(CudaDevice()):
        first = lane_workspace("bmm_fp8_workspace", 64, cuda)
        machine.here = 1
        second = lane_workspace("bmm_fp8_workspace", 64, cuda)
        machine.here = 0
        assert lane_workspace("bmm_fp8_workspace", 64, cuda) is first
        assert second.data_ptr() != first.data_ptr()
