"""The native library's Python side, over a stand-in of the library: nothing is compiled here."""

from __future__ import annotations

import gc
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashinfer.gemm_workspace import native
from flashinfer.gemm_workspace.state import State

from .fake_device import FakeDevice


class Module:
    """Stands for the loaded library."""

    def __init__(self) -> None:
        self.version = native.ABI
        self.refuses: dict[str, str] = {}
        self.made: list[tuple[Any, ...]] = []
        self.forgotten: list[int] = []

    def _step(self, what: str) -> None:
        if what in self.refuses:
            raise RuntimeError(self.refuses[what] + "\nwith more lines")

    def abi(self) -> int:
        return self.version

    def attach(self, major: int) -> None:
        self.major = major
        self._step("attach")

    def attach_cublaslt(self, major: int) -> None:
        self._step("attach_cublaslt")

    def attach_cudnn(self) -> int:
        self._step("attach_cudnn")
        return 91900

    def prepare_cublaslt(self, *given: Any) -> int:
        self._step("prepare_cublaslt")
        self.made.append(given)
        return len(self.made)

    def prepare_cudnn(self, *given: Any) -> int:
        self._step("prepare_cudnn")
        self.made.append(given)
        return len(self.made)

    def uids(self, number: int) -> list[int]:
        return [0, 1, 4]

    def workspace_bytes(self, number: int) -> int:
        return 4096

    def forget(self, number: int) -> bool:
        self.forgotten.append(number)
        return True

    def counts(self) -> list[int]:
        return [len(self.made) - len(self.forgotten), 0, 0]

    launch = call = remember = use_workspace = unlearn = lambda *_: None


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, state: State) -> Module:
    made = Module()
    (tmp_path / "_native.so").touch()
    monkeypatch.setattr(native, "FILE", str(tmp_path / "_native.so"))
    monkeypatch.setattr(native, "_process", native._Process())
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setitem(sys.modules, "tvm_ffi", SimpleNamespace(load_module=lambda path: made))
    return made


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_loaded_once_for_torchs_cuda(module: Module, caplog: pytest.LogCaptureFixture) -> None:
    found = native.library()
    assert found is not None
    assert found is native.library()
    assert module.major == 13
    assert lines(caplog) == []
    report = native.report()
    assert (report["loaded"], report["cublaslt"], report["cudnn"]) == (True, True, True)


def test_a_wheel_without_it_says_nothing(
    module: Module, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "FILE", "not there.so")
    assert native.library() is None
    assert lines(caplog) == []
    assert native.report()["loaded"] is False
    with pytest.raises(native.NativeRefused, match="no native launches of cuBLASLt"):
        native.cublaslt("bmm_fp8", ())


def test_switched_off(
    module: Module, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FLASHINFER_GEMM_WORKSPACE_NATIVE", "0")
    assert native.library() is None
    assert lines(caplog) == []


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("abi", f"_native.so has ABI 99, wanted {native.ABI}"),
        ("attach", "libcudart.so.13 is not loaded"),
        ("cuda", "torch is built without CUDA"),
        ("tvm_ffi", "No module named 'tvm_ffi'"),
    ],
)
def test_one_line_for_what_does_not_fit(
    what: str,
    line: str,
    module: Module,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if what == "abi":
        module.version = 99
    elif what == "attach":
        module.refuses["attach"] = "libcudart.so.13 is not loaded"
    elif what == "cuda":
        monkeypatch.setattr(torch.version, "cuda", None)
    else:
        monkeypatch.delitem(sys.modules, "tvm_ffi")
        monkeypatch.setattr(
            native.importlib,
            "import_module",
            lambda name: exec("raise ImportError(text)", {"text": line}),
        )
    for _ in range(3):
        assert native.library() is None
    (found,) = lines(caplog)
    assert found.startswith("No native launches, Python's serve: ")
    assert line in found
    assert "more lines" not in found


def test_one_kind_of_launch_without_the_other(
    module: Module, caplog: pytest.LogCaptureFixture
) -> None:
    module.refuses["attach_cudnn"] = "cuDNN 92000 is loaded, wanted a 9.19"
    found = native.library()
    assert found is not None
    assert (found.has_cublaslt, found.has_cudnn) == (True, False)
    assert lines(caplog) == [
        "No native launches of cuDNN, Python's serve: cuDNN 92000 is loaded, wanted a 9.19."
    ]
    with pytest.raises(native.NativeRefused, match="no native launches of cuDNN"):
        native.cudnn(State(FakeDevice()), 0, None, None, None)


# cuBLASLt. ----------------------------------------------------------------------------------------


def arguments() -> tuple[Any, ...]:
    return (
        torch.zeros(3, 16, 32, dtype=torch.float8_e4m3fn),
        torch.zeros(3, 32, 48, dtype=torch.float8_e5m2),
        torch.zeros(3, 16, 48, dtype=torch.bfloat16),
        torch.ones(1),
        torch.ones(1),
        torch.zeros(4096, dtype=torch.uint8),
        0x1234,
    )


def test_row_major_operands_are_exchanged(module: Module) -> None:
    given = arguments()
    matmul = native.cublaslt("bmm_fp8", given)
    assert matmul.operands == (1, 0, 2, 4, 3)
    assert module.made == [
        (
            *(0x1234, torch.float8_e5m2, torch.float8_e4m3fn, torch.bfloat16),
            *(3, 48, 16, 32),
            *(given[4].data_ptr(), given[3].data_ptr()),
            *(4096, b""),
        )
    ]


def test_an_unknown_function_and_a_refusal(module: Module) -> None:
    with pytest.raises(native.NativeRefused, match="bmm_fp9 is not known here"):
        native.cublaslt("bmm_fp9", arguments())
    module.refuses["prepare_cublaslt"] = "the heuristic names no algorithm."
    with pytest.raises(native.NativeRefused, match=r"^the heuristic names no algorithm$"):
        native.cublaslt("bmm_fp8", arguments())


# cuDNN. -------------------------------------------------------------------------------------------


class Lowered:
    """The C++ side of a graph: selected is what it serializes."""

    def __init__(self) -> None:
        self.selected = 5
        self.fails = False

    def build_plan_at_index(self, index: int) -> None:
        self.selected = index

    def serialize(self, as_bytes: bool) -> bytes:
        assert as_bytes
        if self.fails:
            raise RuntimeError("not supported")
        return f"plan {self.selected}".encode()

    def get_plan_name_at_index(self, index: int) -> str:
        return f"eng{index}"


def graph() -> Any:
    plans = [SimpleNamespace(cpp_index=index) for index in (5, 6, None)]
    return SimpleNamespace(
        _lowered_graph=Lowered(), _plans=plans, _plan_index=0, _engine_for=lambda plan: None
    )


@pytest.mark.parametrize(("index", "place"), [(None, 5), (0, 5), (1, 6)])
def test_the_plan_that_ran_is_rebuilt(
    index: int | None, place: int, module: Module, state: State
) -> None:
    made = graph()
    plan = native.cudnn(state, 0, made, index, SimpleNamespace(backend_handle=77))
    assert module.made == [(77, f"plan {place}".encode(), f"eng{place}")]
    assert plan.uids == (0, 1, 4)
    assert made._lowered_graph.selected == 5  # as it was


def test_a_plan_that_cannot_be_serialized(module: Module, state: State) -> None:
    made = graph()
    made._lowered_graph.fails = True
    with pytest.raises(native.NativeRefused, match="not supported"):
        native.cudnn(state, 0, made, 1, 77)
    assert made._lowered_graph.selected == 5
    for broken in (SimpleNamespace(), SimpleNamespace(_lowered_graph=None)):
        with pytest.raises(native.NativeRefused):
            native.cudnn(state, 0, broken, None, 77)
    with pytest.raises(native.NativeRefused, match="a plan that cuDNN has not"):
        native.cudnn(state, 0, graph(), 2, 77)
    assert module.made == []


def test_no_plan_is_rebuilt_under_capture(module: Module, state: State, device: FakeDevice) -> None:
    device.captures[0, 0] = 1
    with pytest.raises(native.NativeRefused, match="captures"):
        native.cudnn(state, 0, graph(), None, 77)
    assert module.made == []


def test_rebuilt_plans_have_a_budget(
    module: Module, state: State, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = iter([1000, 400, 400, 350, 1000, 990])
    monkeypatch.setattr(device, "free_bytes", lambda index: next(free), raising=False)
    monkeypatch.setattr(native, "PLAN_BYTES", 601)
    plans = [native.cudnn(state, 0, graph(), None, 77) for _ in range(2)]
    assert native.report()["plan_bytes"] == 650
    with pytest.raises(native.NativeRefused, match="650 bytes"):
        native.cudnn(state, 0, graph(), None, 77)
    plans.pop(0)
    gc.collect()
    native.cudnn(state, 0, graph(), None, 77)  # there is room again
    assert module.forgotten == [1]


# Ends. --------------------------------------------------------------------------------------------


def test_launchers_end_outside_captures(module: Module, state: State, device: FakeDevice) -> None:
    matmul = native.cublaslt("bmm_fp8", arguments())
    device.running = 1
    del matmul
    gc.collect()
    native.collect(state)
    assert module.forgotten == []
    device.running = 0
    native.collect(state)
    assert module.forgotten == [1]
    native.collect(state)
    assert module.forgotten == [1]


def test_launchers_are_bounded(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "LAUNCHERS", 2)
    kept = [native.cublaslt("bmm_fp8", arguments()) for _ in range(2)]
    with pytest.raises(native.NativeRefused, match="there are 2 launchers"):
        native.cublaslt("bmm_fp8", arguments())
    kept.pop()
    gc.collect()
    native.cublaslt("bmm_fp8", arguments())


@pytest.mark.parametrize(
    ("name", "count"),
    [("bmm_fp8", 6), ("bmm_fp8_run_with_algo", 8), ("mm_bf16_cublaslt_run_with_algo", 8)],
)
def test_a_function_of_another_release_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, count: int
) -> None:
    """0.7.x passes no handle, and a bias; taken for what 0.6.x passes they would be launched wrong,
    or the call that learns them would fail after its launch."""
    monkeypatch.setattr(native, "_usable", lambda what: None)
    with pytest.raises(native.NativeRefused, match=f"of {count} arguments, wanted"):
        native.cublaslt(name, (torch.zeros(1, 1, 1),) * count)
