"""Prepared launches handed over to the native library: an op over stand-ins, driven on the CPU.

Every launch is counted on the side that makes it: ``python`` counts the release's compiled
function, ``native`` the library's own count.
"""

from __future__ import annotations

from test_python import pytestmark, run  # noqa: F401

START = """
import itertools, logging, threading, torch
from types import SimpleNamespace
from typing import Optional
from flashinfer.gemm_workspace import launches, native_calls, prepared
from flashinfer.gemm_workspace.lanes import lane_workspace
from flashinfer.gemm_workspace.notes import watched
from flashinfer.gemm_workspace.state import use_device
from tests.unit.runtime.fake_device import FakeDevice

HANDLE = 1 << 20
launches._blas = lambda: HANDLE
native_calls.torch_internals.raw_stream = lambda index: 0
python = []

class AutoTuner:
    _instance = None
    @classmethod
    def get(cls):
        return cls._instance
    def choose_one(self):
        pass

AutoTuner._instance = tuner = SimpleNamespace(
    profiling_cache={}, _file_configs={}, is_tuning_mode=False, _lock=threading.RLock(),
    _get_override_stack=list,
)
module = SimpleNamespace(bmm_fp8=lambda *operands: python.append(operands[0].data_ptr()))

def bmm_fp8(A: torch.Tensor, B: torch.Tensor, A_scale: torch.Tensor, B_scale: torch.Tensor,
            dtype: torch.dtype, out: Optional[torch.Tensor] = None, backend: str = "cublas"):
    if out is None:
        out = torch.empty(A.shape[0], A.shape[1], B.shape[2], dtype=dtype)
    space = lane_workspace("bmm_fp8_workspace", 4096, A.device)
    watched(module).bmm_fp8(A, B, out, A_scale, B_scale, space, HANDLE)
    return out

op = prepared.prepared_launches(bmm_fp8)

def aligned(tensor, by=0):
    room = torch.zeros(tensor.numel() * tensor.element_size() + 1024, dtype=torch.uint8)
    start = -room.data_ptr() % 256 + by
    made = room[start : start + tensor.numel() * tensor.element_size()].view(tensor.dtype)
    return made.as_strided(tensor.shape, tensor.stride())

A, B, OUT, SA, SB = map(aligned, (A, B, OUT, SA, SB))
bf16 = torch.bfloat16

def native_launches():
    return prepared.report()["native"]["launches"]

def step(call):
    "Which side launched."
    before = len(python), native_launches()
    result = call()
    return result, (len(python) - before[0], native_launches() - before[1])

PYTHON, NATIVE = (1, 0), (0, 1)

def warm(call):
    "Until the signature is handed over and its workspace is given."
    for _ in range(native_calls.AFTER + 3):
        call()
    state = prepared._current_memory().state
    for lane in state.lanes.values():
        view = lane.views[4096]
        state.hot[lane.part, 4096, view.device] = (0, {0: view}, True)
    call()
"""

LIBRARIES = ("cudart", "cublaslt", "cudnn")


def drive(program: str) -> str:
    body = "".join(f"    {line}\n" for line in program.strip("\n").splitlines())
    return run(f"{START}\nwith use_device(FakeDevice()) as state:\n{body}", *LIBRARIES)


def test_a_signature_that_comes_often_is_launched_natively() -> None:
    drive(
        """
given = lambda: op(A, B, SA, SB, bf16, OUT)
made = lambda: op(A, B, SA, SB, bf16)
assert step(given) == (OUT, PYTHON)
for i in range(native_calls.AFTER + 3):
    assert step(given) == (OUT, PYTHON)  # nobody has given it a workspace
warm(given)
assert step(given) == (OUT, NATIVE)
assert step(lambda: op(A, B, SA, SB, dtype=bf16, out=OUT)) == (OUT, PYTHON)  # another way
warm(made)
results = [step(made) for _ in range(3)]
assert all(side == NATIVE for _, side in results)
assert len({result.data_ptr() for result, _ in results}) == 3
result = results[0][0]
assert type(result) is torch.Tensor and result.dtype is bf16
assert (tuple(result.shape), result.stride()) == (tuple(OUT.shape), OUT.stride())
"""
    )


def test_whatever_differs_goes_the_python_way() -> None:
    drive(
        """
warm(lambda: op(A, B, SA, SB, bf16, OUT, "cublas"))
class Sub(torch.Tensor):
    pass
changes = {
    "shape": (A[:, :8], B, SA, SB, bf16, OUT[:, :8], "cublas"),
    "fewer batches": (A[:2], B[:2], SA, SB, bf16, OUT[:2], "cublas"),
    "strides": (A, aligned(B.contiguous()), SA, SB, bf16, OUT, "cublas"),
    "dtype of an operand": (A.view(torch.float8_e5m2), B, SA, SB, bf16, OUT, "cublas"),
    "alignment": (aligned(A, 16), B, SA, SB, bf16, OUT, "cublas"),
    "dtype asked for": (A, B, SA, SB, torch.float16, OUT, "cublas"),
    "backend": (A, B, SA, SB, bf16, OUT, "auto"),
    "no output": (A, B, SA, SB, bf16, None, "cublas"),
    "subclass": (A.as_subclass(Sub), B, SA, SB, bf16, OUT, "cublas"),
}
for what, arguments in changes.items():
    result, side = step(lambda: op(*arguments))
    assert side == PYTHON, (what, side)
    assert step(lambda: op(A, B, SA, SB, bf16, OUT, "cublas")) == (OUT, NATIVE), what
other = aligned(A)
assert step(lambda: op(other, B, SB, SA, bf16, OUT, "cublas")) == (OUT, NATIVE)
parameter = torch.nn.Parameter(A, requires_grad=False)
assert step(lambda: op(parameter, B, SA, SB, bf16, OUT, "cublas")) == (OUT, NATIVE)
"""
    )


def test_captures_devices_modes_and_the_tuner() -> None:
    drive(
        """
given = lambda: op(A, B, SA, SB, bf16, OUT)
warm(given)
cudart = loaded["cudart"]
cudart.fake_capturing(ctypes.c_void_p(0))
assert step(given) == (OUT, PYTHON)
cudart.fake_capturing(ctypes.c_void_p(-1))
cudart.fake_device(1)
assert step(given) == (OUT, PYTHON)
cudart.fake_device(0)
assert step(given) == (OUT, NATIVE)
tuner.is_tuning_mode = True
assert step(given) == (OUT, PYTHON)
tuner.is_tuning_mode = False  # everything was forgotten meanwhile
for change in (
    lambda: tuner.profiling_cache.update(a=1),
    lambda: setattr(tuner, "profiling_cache", {}),
    prepared.forget,
):
    assert step(given) == (OUT, PYTHON)
    warm(given)
    assert step(given) == (OUT, NATIVE)
    change()
    assert step(given) == (OUT, PYTHON)
from torch.overrides import TorchFunctionMode
class Mode(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))
warm(given)
with Mode():
    assert step(given) == (OUT, PYTHON)
assert step(given) == (OUT, NATIVE)
"""
    )


def test_a_launch_that_fails_is_made_the_python_way() -> None:
    drive(
        """
given = lambda: op(A, B, SA, SB, bf16, OUT)
warm(given)
loaded["cublaslt"].fake_cublas_status(13)
assert step(given) == (OUT, PYTHON)
loaded["cublaslt"].fake_cublas_status(0)
assert prepared.report()["failures"] == 1
assert step(given) == (OUT, PYTHON)
"""
    )


def test_nothing_of_the_caller_is_kept() -> None:
    drive(
        """
import gc, weakref
a = aligned(A)
out = aligned(OUT)
warm(lambda: op(a, B, SA, SB, bf16, out))
assert step(lambda: op(a, B, SA, SB, bf16, out))[1] == NATIVE
gone = [weakref.ref(a), weakref.ref(out)]
del a, out
gc.collect()
assert [ref() for ref in gone] == [None, None]
assert native.report()["launchers"] == 1
prepared.forget()
gc.collect()
native.collect(state)
assert native.report()["launchers"] == native.report()["signatures"] == 0
"""
    )


def test_a_signature_that_is_forgotten_while_it_is_handed_over() -> None:
    """As when a capture on another thread takes hold of its plan meanwhile."""
    drive(
        """
given = lambda: op(A, B, SA, SB, bf16, OUT)
memory, real = prepared._current_memory(), native_calls.hand_over
def meanwhile(*arguments):
    made = real(*arguments)
    made.use(0)
    (key,) = memory.table
    memory._let_go(key)
    return made
native_calls.hand_over = meanwhile
given()
(lane,) = state.lanes.values()
view = lane.views[4096]
state.hot[lane.part, 4096, view.device] = (0, {0: view}, True)
for _ in range(native_calls.AFTER):
    given()
assert memory.table == {}
native_calls.hand_over = real
assert step(given) == (OUT, PYTHON)  # learnt anew
warm(given)
assert step(given) == (OUT, NATIVE)
"""
    )
