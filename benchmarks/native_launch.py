"""What a native launch costs on the host, beside the ways to launch the same GEMM in Python.

On a CUDA machine, with a graft whose ``flashinfer/gemm_workspace`` has ``_native.so``, from the
root of this repository::

    PYTHONPATH=GRAFT_FOLDER python benchmarks/native_launch.py [OUT.json]

Prints JSON: microseconds a call, median and 99th percentile of 4,000 calls that are timed one by
one, 200 between two synchronisations; whether each native result has the bits of the release's;
and what making a launcher took, in milliseconds and bytes of device memory. The first run
compiles the release's cuBLASLt module, which takes most of a minute.

The ways: ``torch``: ``torch._scaled_mm``. ``op``: the public op, prepared or
native as it is installed. ``execute``: cudnn-frontend's
``graph.execute`` alone. ``module``: the release's compiled cuBLASLt function alone. ``launch``: the
native library, by number, addresses and stream, as integers. ``call``: the native library, by
tensors: it reads the signature, finds launch and workspace, and for ``call, made`` makes the
output. With cuDNN, ``launch`` and ``call`` are timed with the lock and the stream of its handle.
``vendor``: the same launches from C++, timed there: what cuBLASLt or cuDNN and the driver take, and
what no caller can save.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "gpu"))

import native_parts as parts
from gemms import DEVICE, Gemm

from flashinfer.gemm_workspace import native
from flashinfer.gemm_workspace import state as _state

CALLS, BETWEEN = 4_000, 200
SIZES = [(1, m, 512, 512) for m in (1, 16, 512)] + [(1, m, 4096, 4096) for m in (1, 16)]


def timed(call: Callable[[], object]) -> dict[str, float]:
    """Microseconds a call."""
    for _ in range(50):
        call()
    clock, took = time.perf_counter_ns, []
    for _ in range(CALLS // BETWEEN):
        torch.cuda.synchronize()
        for _ in range(BETWEEN):
            start = clock()
            call()
            took.append(clock() - start)
    torch.cuda.synchronize()
    took.sort()
    at = {"median": statistics.median(took), "p99": took[len(took) * 99 // 100]}
    return {name: round(value / 1e3, 2) for name, value in at.items()}


def vendor(*launch: int) -> dict[str, float]:
    """Microseconds a launch, made and timed in C++."""
    library, took = native.library(), list[int]()
    assert library is not None
    for _ in range(CALLS // BETWEEN):
        torch.cuda.synchronize()
        took += library.timed(BETWEEN, *launch)
    torch.cuda.synchronize()
    took.sort()
    at = {"median": statistics.median(took), "p99": took[len(took) * 99 // 100]}
    return {name: round(value / 1e3, 2) for name, value in at.items()}


def equal(gemm: Gemm, want: torch.Tensor, call: Callable[[], object]) -> bool:
    """Whether ``call`` writes ``want`` into the output, bit for bit."""
    gemm.out.zero_()
    call()
    torch.cuda.synchronize()
    return torch.equal(gemm.out.view(torch.int16), want.view(torch.int16))


def made(make: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """What making a launcher gives, and costs."""
    torch.cuda.synchronize()
    before, start = torch.cuda.mem_get_info()[0], time.perf_counter()
    result = make()
    took = time.perf_counter() - start
    torch.cuda.synchronize()
    taken = before - torch.cuda.mem_get_info()[0]
    return result, {"ms": round(took * 1e3, 2), "bytes": taken}


def remembered(
    launcher: native.Launcher, operands: tuple[int, ...], gemm: Gemm, variant: int
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """``call`` into the output that is given (place 4), and into one that is made."""
    found = native.library()
    assert found is not None
    space, stream = parts.lane(), torch.cuda.current_stream().cuda_stream
    found.use_workspace(launcher.number, stream, space.data_ptr(), space.numel())
    a, b, scale, out, call = gemm.a, gemm.b, gemm.scale, gemm.out, found.call
    given = (a, b, scale, scale, out)
    found.remember(launcher.number, variant, operands, None, None, *given)
    at = tuple(-1 if place == 4 else place for place in operands)
    shape = tuple(out.shape)
    found.remember(launcher.number, variant + 1, at, shape, out.dtype, a, b, scale, scale)
    other = variant + 1
    return (
        lambda: call(variant, a, b, scale, scale, out),
        lambda: call(other, a, b, scale, scale),
    )


def cudnn(gemm: Gemm, variant: int) -> dict[str, Any]:
    """All of cuDNN's ways."""
    import cudnn as frontend

    execution = parts.execution(gemm)
    want = gemm.eager()
    found: dict[str, Any] = {"us": {"op": timed(gemm)}}
    pack, space, handle = execution.pack, execution.workspace, execution.handle
    found["us"]["execute"] = timed(
        lambda: (
            execution.graph.execute(pack, space, handle=handle)
            if execution.index is None
            else execution.graph.execute_plan_at_index(pack, space, execution.index, handle=handle)
        )
    )
    plan, found["made"] = made(lambda: parts.plan(execution))
    library, state = native.library(), _state.current
    assert library is not None
    lane, lock = parts.lane(), state.device_lock(DEVICE.index)
    number, launch, set_stream = plan.launcher.number, library.launch, frontend.set_stream
    raw = torch._C._cuda_getCurrentRawStream
    address, length = lane.data_ptr(), lane.numel()
    at = parts.addresses(execution, plan)
    found["workspace_bytes"] = plan.launcher.workspace_bytes

    def locked() -> None:
        stream = raw(0)
        with lock:
            set_stream(handle, stream)
            launch(number, stream, address, length, *at)

    found["equal"] = equal(gemm, want, locked)
    found["us"]["launch"] = timed(locked)
    found["us"]["launch, no lock, no stream"] = timed(
        lambda: launch(number, 0, address, length, *at)
    )
    found["us"]["vendor"] = vendor(number, 0, address, length, *at)
    # Places among (a, b, scale, scale, out), by identity and, of the two scales, by order.
    scales = iter((2, 3))
    place = {gemm.a.data_ptr(): 0, gemm.b.data_ptr(): 1, gemm.out.data_ptr(): 4}
    operands = tuple(
        place[pointer] if pointer in place else next(scales)
        for pointer in (execution.pack[uid].data_ptr() for uid in plan.uids)
    )
    given, new = remembered(plan.launcher, operands, gemm, variant)

    def call_locked(call: Callable[[], Any]) -> Callable[[], Any]:
        def locked() -> Any:
            with lock:
                set_stream(handle, raw(0))
                return call()

        return locked

    found["equal, call"] = equal(gemm, want, call_locked(given))
    found["us"]["call"] = timed(call_locked(given))
    result = call_locked(new)()
    torch.cuda.synchronize()
    found["equal, made"] = torch.equal(result.view(torch.int16), want.view(torch.int16))
    found["us"]["call, made"] = timed(call_locked(new))
    return found


def cublas(gemm: Gemm, variant: int) -> dict[str, Any]:
    """All of cuBLASLt's ways."""
    space = parts.lane()
    module = parts.gemm_module()
    arguments = parts.operands(gemm, space)
    found: dict[str, Any] = {"us": {"op": timed(gemm)}}
    found["us"]["module"] = timed(lambda: module.bmm_fp8(*arguments))
    buffer, count = parts.algorithms(gemm, space)
    found["algorithms"] = count
    found["us"]["module, run_with_algo"] = timed(
        lambda: module.bmm_fp8_run_with_algo(*arguments, buffer, 0)
    )
    library = native.library()
    assert library is not None
    stream = torch.cuda.current_stream().cuda_stream

    def native_of(name: str, *chosen: Any) -> tuple[native.Matmul, tuple[int, ...]]:
        matmul = native.cublaslt(name, (*arguments, *chosen))
        return matmul, tuple(arguments[place].data_ptr() for place in matmul.operands)

    right = 0
    for index in range(count):
        module.bmm_fp8_run_with_algo(*arguments, buffer, index)
        torch.cuda.synchronize()
        want = gemm.out.clone()
        matmul, at = native_of("bmm_fp8_run_with_algo", buffer, index)
        launcher = matmul.launcher
        right += equal(gemm, want, lambda: parts.launch(launcher, at, space, stream))  # noqa: B023
    found["equal"] = f"{right} of {count} algorithms"
    module.bmm_fp8(*arguments)
    torch.cuda.synchronize()
    want = gemm.out.clone()
    (matmul, at), found["made"] = made(lambda: native_of("bmm_fp8"))
    number, launch = matmul.launcher.number, library.launch
    address, length = space.data_ptr(), space.numel()
    raw = torch._C._cuda_getCurrentRawStream
    found["equal, heuristic"] = equal(
        gemm, want, lambda: launch(number, raw(0), address, length, *at)
    )
    found["us"]["launch"] = timed(lambda: launch(number, raw(0), address, length, *at))
    found["us"]["vendor"] = vendor(number, raw(0), address, length, *at)
    # The arguments are (a, b, out, scale, scale), the call's (a, b, scale, scale, out).
    operands = tuple((0, 1, 4, 2, 3)[place] for place in matmul.operands)
    given, new = remembered(matmul.launcher, operands, gemm, variant)
    found["equal, call"] = equal(gemm, want, given)
    found["us"]["call"] = timed(given)
    result = new()
    torch.cuda.synchronize()
    found["equal, made"] = torch.equal(result.view(torch.int16), want.view(torch.int16))
    found["us"]["call, made"] = timed(new)
    return found


def floor(gemm: Gemm) -> dict[str, Any]:
    """What the parts of a call cost, without a launch."""
    library = native.library()
    assert library is not None
    a, b, scale, out, call = gemm.a, gemm.b, gemm.scale, gemm.out, library.call
    lock, raw = _state.current.device_lock(DEVICE.index), torch._C._cuda_getCurrentRawStream

    def locked() -> None:
        with lock:
            pass

    return {
        "empty call": timed(lambda: None),
        "call of five tensors that is not known": timed(lambda: call(-1, a, b, scale, scale, out)),
        "call of two tensors that is not known": timed(lambda: call(-1, a, b)),
        "lock": timed(locked),
        "raw stream": timed(lambda: raw(0)),
        "torch.empty": timed(lambda: torch.empty(out.shape, dtype=out.dtype, device=out.device)),
    }


def versions() -> dict[str, Any]:
    """Of all that takes part."""
    import cudnn as frontend
    import tvm_ffi

    return {
        "gpu": torch.cuda.get_device_name(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cudnn": frontend.backend_version(),
        "frontend": frontend.__version__,
        "tvm_ffi": tvm_ffi.__version__,
        "native": native.report(),
    }


def attempt(what: Callable[..., Any], *arguments: Any) -> Any:
    """The result, or the traceback: one way that fails must not cost a run."""
    try:
        return what(*arguments)
    except Exception:
        return {"failed": traceback.format_exc().splitlines()}


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("native_launch: needs a CUDA device")
    if native.library() is None:
        sys.exit("native_launch: the native library is not loaded; see the line in the log above")
    report: dict[str, Any] = {"versions": versions(), "shapes": {}}
    for i, shape in enumerate(SIZES):
        gemm = Gemm(shape, "cudnn")
        a, b, scale = gemm.a[0], gemm.b[0], gemm.scale
        out = gemm.out[0]
        row: dict[str, Any] = {
            "torch": timed(lambda: torch._scaled_mm(a, b, scale, scale, out_dtype=out.dtype))  # noqa: B023
        }
        row["torch, out"] = timed(
            lambda: torch._scaled_mm(a, b, scale, scale, out_dtype=out.dtype, out=out)  # noqa: B023
        )
        if i == 0:
            report["floor"] = attempt(floor, gemm)
        row["cudnn"] = attempt(cudnn, gemm, 100 * i)
        row["cublas"] = attempt(cublas, Gemm(shape, "cublas"), 100 * i + 50)
        report["shapes"]["x".join(map(str, shape))] = row
    report["native"] = native.report()
    text = json.dumps(report, indent=1)
    print(text)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
