"""Drives the GEMM code of the FlashInfer on the path; the last line printed is the result, as JSON.

Run in a process of its own, with the release (or the graft) first on PYTHONPATH::

    python drive.py lanes
    python drive.py refusals CUDNN_VERSION
    python drive.py gate|profile|functions
    python drive.py tune|tuned CACHE_FILE
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import logging
import os
import pickle
import sys
import typing
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from pretend import (
    CUDA,
    Handed,
    Plan,
    PretendDevice,
    World,
    on_cuda,
    pretend_compiler,
    pretend_cuda,
    pretend_cudnn,
    runtime,
)

MIB = 1 << 20
SIZES = (0, 32 * MIB, 32 * MIB + 256, 40 * MIB + 1, 300 * MIB)
M, N, K = 16, 128, 256

WORLD = World()
pretend_cudnn(WORLD)
import flashinfer
import flashinfer.gemm.gemm_base as gemm_base
import flashinfer.grouped_mm.cudnn.core as grouped


def optional(name: str) -> Any:
    """A module of the release, or None where the release does not have it yet."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


bf16_fp4 = optional("flashinfer.gemm.gemm_bf16_fp4_cudnn")  # from 0.6.14 on
svdquant = optional("flashinfer.gemm.gemm_svdquant")  # from 0.6.16 on

pretend_cuda(WORLD)
pretend_compiler(*(module for module in (gemm_base, svdquant) if module))
RUNTIME = runtime()


@contextlib.contextmanager
def machine() -> Iterator[None]:
    """A fresh runtime over the pretended GPU, where there is one; empty caches in any case."""
    forget()
    flashinfer.utils._cache_buf.clear()
    getattr(flashinfer.utils, "_stream_cache_buf", {}).clear()
    if RUNTIME is None:
        yield
        return
    with RUNTIME.use_device(PretendDevice(WORLD)):
        yield


def fp8(*shape: int) -> torch.Tensor:
    return on_cuda(torch.zeros(shape, dtype=torch.float8_e4m3fn))


def u8(*shape: int) -> torch.Tensor:
    return on_cuda(torch.zeros(shape, dtype=torch.uint8))


def bf16(*shape: int) -> torch.Tensor:
    return on_cuda(torch.zeros(shape, dtype=torch.bfloat16))


def f32(*shape: int) -> torch.Tensor:
    return on_cuda(torch.ones(shape, dtype=torch.float32))


def operands(function: str) -> dict[str, Any]:
    """Arguments of an execute function, by name, that its own shape checks accept."""
    if "bf16_fp4" in function:
        return {"a": bf16(M, K), "b": u8(N, K // 2), "b_descale": u8(N, K // 16), "alpha": f32(1),
                "out": bf16(M, N)}  # fmt: skip
    if "bf16" in function:
        return {"a": bf16(1, M, K), "b": bf16(1, N, K).transpose(-2, -1), "bias": None,
                "c_final": bf16(1, M, N)}  # fmt: skip
    if "mxfp8" in function:
        return {"a": fp8(1, M, K), "b": fp8(1, N, K).transpose(-2, -1),
                "a_descale": u8(128 * K // 32), "b_descale": u8(N * K // 32),
                "c_final": bf16(1, M, N)}  # fmt: skip
    if "fp4" in function:
        return {"a": u8(1, M, K // 2), "b": u8(1, N, K // 2).transpose(-2, -1),
                "a_descale": u8(128, K // 16), "b_descale": u8(N, K // 16).t(), "alpha": f32(1),
                "c_final": bf16(1, M, N)}  # fmt: skip
    return {"a": fp8(1, M, K), "b": fp8(1, N, K).transpose(-2, -1), "a_scale": f32(1),
            "b_scale": f32(1), "c_final": bf16(1, M, N)}  # fmt: skip


def dense_functions() -> dict[str, Callable[..., Any]]:
    """Every execute function of the dense lanes, by name."""
    return {
        name: value
        for module in (gemm_base, bf16_fp4)
        for name, value in (vars(module).items() if module else ())
        if name.startswith("execute_cudnn_") and inspect.isfunction(value)
    }


def workspace_name(function: str) -> str:
    """The workspace that the op of an execute function takes."""
    for mark, name in {
        "bf16_fp4": "mm_bf16_fp4_workspace",
        "bf16": "mm_bf16_workspace",
        "mxfp8": "mm_mxfp8_workspace",
        "fp4": "mm_fp4_workspace",
    }.items():
        if mark in function:
            return name
    return "bmm_fp8_workspace"


def fetch_workspace(name: str) -> torch.Tensor:
    """What the op would pass on: from a lane of the fork, else from the release's cache."""
    if RUNTIME is not None:
        return RUNTIME.lane_workspace(name, gemm_base.DEFAULT_WORKSPACE_SIZE, CUDA)
    return flashinfer.utils._get_cache_buf(name, gemm_base.DEFAULT_WORKSPACE_SIZE, CUDA)


def run_dense(name: str, function: Callable[..., Any]) -> list[str]:
    """Grow through every size; say what went wrong."""
    parameters = inspect.signature(function).parameters
    slot = "workspace" if "workspace" in parameters else "workspace_buffer"
    wrong = []
    users: list[Handed] = []
    for size in SIZES:
        WORLD.workspace = size
        workspace = fetch_workspace(workspace_name(name))
        users.append(Handed(workspace))
        function(**{"graph": Plan(WORLD), **operands(name), slot: workspace})
        users.append(WORLD.executions.pop())
        if users[-1].nbytes < size:
            wrong.append(f"{size} bytes asked, {users[-1].nbytes} given")
        del workspace
        wrong += _moved(users, size)
    return wrong


def _moved(users: list[Handed], size: int) -> list[str]:
    gone = [user for user in users if user.nbytes and not user.still_there()]
    return [f"after a plan for {size} bytes {len(gone)} earlier users have lost theirs"] * bool(
        gone
    )


def grouped_functions() -> dict[str, Callable[[], Any]]:
    """grouped_mm's runs, with operands bound."""
    offsets = on_cuda(torch.tensor([0, M, 2 * M], dtype=torch.int32))
    plain = {"a": bf16(2 * M, K), "b": bf16(2, N, K), "m_indptr": offsets}
    mxfp8 = {"a": fp8(2 * M, K), "b": fp8(2, N, K), "a_descale": u8(128, K // 32),
             "b_descale": u8(2, N, K // 32), "m_indptr": offsets}  # fmt: skip
    fp4 = {"a": u8(2 * M, K // 2), "b": u8(2, N, K // 2), "a_descale": u8(128, K // 16),
           "b_descale": u8(2, N, K // 16), "m_indptr": offsets}  # fmt: skip
    given = {
        "_run_cudnn_moe_grouped_gemm": plain,
        "_run_cudnn_moe_block_scale_grouped_gemm_mxfp8": mxfp8,
        "_run_cudnn_moe_block_scale_grouped_gemm_fp4": fp4,
    }
    return {
        name: (lambda name=name, kwargs=kwargs: getattr(grouped, name)(**kwargs))
        for name, kwargs in given.items()
    }


def forget() -> None:
    """Empty every cache: of plans (a plan's size is remembered with it) and of the GPU's facts."""
    for module in (gemm_base, bf16_fp4, grouped, flashinfer.utils):
        for value in vars(module).values() if module else ():
            if hasattr(value, "cache_clear"):
                value.cache_clear()
    getattr(gemm_base, "_cudnn_override_all_plans", {}).clear()


def run_grouped(run: Callable[[], Any]) -> list[str]:
    wrong = []
    users: list[Handed] = []
    for size in SIZES:
        WORLD.workspace = size
        forget()
        run()
        users.append(WORLD.executions.pop())
        if users[-1].nbytes < size:
            wrong.append(f"{size} bytes asked, {users[-1].nbytes} given")
        wrong += _moved(users, size)
    return wrong


def drive_lanes() -> dict[str, Any]:
    """Every execute function, with plans that ask for more and more."""
    results = {}
    for name, function in dense_functions().items():
        with machine():
            results[name] = run_dense(name, function)
    for name, run in grouped_functions().items():
        with machine():
            results[name] = run_grouped(run)
    return results


def outcome(run: Callable[[], Any]) -> str:
    """Name of the error that reaches the caller, or "ran"."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            run()
        except Exception as error:
            return type(error).__name__
    return "ran"


def with_tactic(call: Callable[[], Any], tactic: Any) -> Callable[[], Any]:
    """The op with its tuner answering ``tactic`` of the first runner."""

    def run() -> Any:
        from flashinfer.autotuner import AutoTuner

        def answer(_: Any, custom_op: str, runners: list[Any], *__: Any, **___: Any) -> Any:
            return runners[0], tactic

        with mock.patch.object(AutoTuner, "choose_one", answer):
            return call()

    return run


def tactics() -> tuple[Any, ...]:
    """The default, and one of the kind that this release's cuDNN runners use."""
    return -1, (101, ((1, 1),)) if hasattr(gemm_base, "_is_cudnn_engine_knob_tactic") else 1


def drive_refusals(backend_version: str) -> dict[str, Any]:
    """Plan builds and handles under a pretended capture, straight and through the retries."""
    WORLD.backend_version = int(backend_version)
    calls = {name: call for name, call in tuned_ops().items() if name.endswith("cudnn")}
    cold, eager, warm, other = {}, {}, {}, {}
    with machine():
        WORLD.capturing = True
        for name, call in calls.items():
            for tactic in tactics():
                forget()
                cold[f"{name} {tactic}"] = outcome(with_tactic(call, tactic))
        for name, run in grouped_functions().items():
            forget()
            cold[name] = outcome(run)
        handle = outcome(lambda: gemm_base._get_cudnn_handle(CUDA, torch.cuda.current_stream()))
        made = WORLD.handles + WORLD.builds
        # B8: the process stays usable; once warm, the captured call finds its plan.
        for name, call in calls.items():
            default, tuned = (with_tactic(call, tactic) for tactic in tactics())
            forget()
            WORLD.capturing = False
            eager[name] = outcome(default)
            WORLD.capturing = True
            warm[name] = outcome(default)
            # B9: another plan is cached, the one asked for is not.
            other[name] = outcome(tuned)
    return {"cold": cold, "handle": handle, "made": made, "eager": eager, "warm": warm,
            "other": other}  # fmt: skip


def drive_gate() -> dict[str, Any]:
    """Which fp8 runners remain, by SM and cuDNN version."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logging.getLogger("flashinfer").addHandler(Keep())
    kept: dict[str, Any] = {}
    chosen: list[list[str]] = []

    class Tuner:
        def choose_one(self, _op: str, names: list[Any], *_: object, **__: object) -> Any:
            chosen.append([getattr(r, "name", type(r).__name__) for r in names])
            return (lambda **_: None), -1

    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

    def factory(name: str) -> Callable[[], Any]:
        made = SimpleNamespace(**{f"{name}_fp8_gemm_runner": lambda: Named(name)})
        return lambda: made

    gemm_base.get_gemm_module = factory("cublas")
    gemm_base.get_gemm_sm100_module_cutlass_fp8 = factory("cutlass")
    gemm_base.get_gemm_sm120_module_cutlass_fp8 = factory("cutlass")
    gemm_base._cudnn_gemm_fp8_runner = lambda: Named("cudnn")
    gemm_base.AutoTuner = type("Pretended", (), {"get": staticmethod(lambda: Tuner())})
    ops = operands("fp8")
    tensors = (ops["a"], ops["b"], ops["a_scale"], ops["b_scale"])
    logged: dict[str, list[str]] = {}
    for capability in ((9, 0), (10, 0), (12, 0), (12, 1)):
        sm = f"{capability[0]}.{capability[1]}"
        WORLD.capability = capability
        lines.clear()
        with machine():
            for version in (0, 92000, 92300, 92301):
                WORLD.backend_version = version
                for names in (["cublas", "cudnn"], ["cudnn"]):
                    case = f"{sm} cudnn {version} {'+'.join(names)}"
                    kept[f"heuristic {case}"] = gemm_base._heuristic_func_bmm_fp8(
                        names, *tensors, torch.bfloat16
                    )
                    chosen.clear()
                    gemm_base.fp8_gemm_sm100(*tensors, ops["c_final"], u8(16), list(names))
                    kept[f"dispatch {case}"] = chosen[0]
        logged[sm] = [line for line in lines if "SM12x" in line]
    return {"kept": kept, "logged": logged}


def tuned_ops() -> dict[str, Callable[[], Any]]:
    """Every tuned dense op that takes a workspace, on the backends that this release has."""
    e4m3, a, b = operands("fp8"), bf16(M, K), bf16(N, K).t()
    a8, b8 = fp8(M, K), fp8(N, K).t()
    a_scale, b_scale = u8(128 * K // 32), u8(N * K // 32)
    bmm = (bf16(2, M, K), bf16(2, N, K).transpose(-2, -1))
    a4, b4, a4_scale, b4_scale = u8(M, K // 2), u8(N, K // 2), u8(128, K // 16), u8(N, K // 16)
    rank = 32
    out = torch.bfloat16
    given: dict[tuple[str, str], tuple[Any, ...]] = {
        ("bmm_fp8", "cudnn"): (e4m3["a"], e4m3["b"], f32(1), f32(1), out),
        ("bmm_fp8", "cublas"): (e4m3["a"], e4m3["b"], f32(1), f32(1), out),
        ("mm_bf16", "cudnn"): (a, b),
        ("mm_bf16", "cutlass"): (a, b),
        ("bmm_bf16", "cudnn"): bmm,
        ("bmm_bf16", "cutlass"): bmm,
        ("mm_fp4", "cudnn"): (a4, b4.t(), a4_scale, b4_scale.t(), f32(1), out),
        ("mm_fp4", "cutlass"): (a4, b4.t(), a4_scale, b4_scale.t(), f32(1), out),
        ("mm_mxfp8", "cudnn"): (a8, b8, a_scale, b_scale),
        ("mm_mxfp8", "cutlass"): (a8, b8, a_scale, b_scale),
        ("bmm_mxfp8", "cudnn"): (e4m3["a"], e4m3["b"], a_scale, b_scale, out),
        ("mm_bf16_fp4", "cudnn"): (a, b4, b4_scale, f32(1)),
        ("mm_nvfp4_svdquant", "cutlass"): (
            a4, b4, a4_scale, b4_scale, f32(1), bf16(M, rank), bf16(N, rank)
        ),
    }  # fmt: skip
    return {
        f"{op} {backend}": functools.partial(getattr(flashinfer, op), *args, backend=backend)
        for (op, backend), args in given.items()
        if backend in backends(op)
    }


def backends(op: str) -> set[str]:
    """Backends of an op in this release; none where it has no such op."""
    function = getattr(flashinfer, op, None)
    if function is None:
        return set()
    parameter = inspect.signature(function).parameters["backend"]
    return set(typing.get_args(parameter.annotation)) or {parameter.annotation}


def patched_tuner(chosen: dict[str, Any], op: list[str]) -> Any:
    """The release's own tuner, with a clock of ours and a note of every choice."""
    from flashinfer.autotuner import AutoTuner

    real = AutoTuner.choose_one

    def choose_one(self: Any, *args: Any, **kwargs: Any) -> Any:
        runner, tactic = real(self, *args, **kwargs)
        chosen[op[0]] = [type(runner).__name__, repr(tactic)]
        return runner, tactic

    seen = iter(range(10**9))
    AutoTuner.choose_one = choose_one
    # The second tactic profiled is the fastest: neither the default nor the first.
    AutoTuner._profile_single_kernel = lambda *_, **__: {1: 0.5}.get(next(seen) % 3, 1.0)
    return AutoTuner.get()


def call_all(chosen: dict[str, Any], op: list[str]) -> dict[str, Any]:
    chosen.clear()
    errors = {}
    for name, call in tuned_ops().items():
        op[0] = name
        try:
            call()
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"
    return {"chosen": dict(chosen), "errors": errors}


def drive_tune(path: str) -> dict[str, Any]:
    """Tune every op and write the cache file."""
    chosen: dict[str, Any] = {}
    op = [""]
    with machine():
        patched_tuner(chosen, op)
        with flashinfer.autotune(True, cache=path):
            return call_all(chosen, op)


def drive_tuned(path: str) -> dict[str, Any]:
    """Load the cache file; call every op before and after its lane has grown to 300 MiB."""
    chosen: dict[str, Any] = {}
    op = [""]
    with machine():
        patched_tuner(chosen, op)
        with flashinfer.autotune(False, cache=path):
            before = call_all(chosen, op)
            WORLD.workspace = 300 * MIB
            forget()
            grown = call_all(chosen, op)
            WORLD.workspace = 0
            after = call_all(chosen, op)
    return {"before": before, "growing": grown, "after": after}


def drive_profile() -> dict[str, Any]:
    """Tune ``mm_bf16`` with the release's own profiler, which captures every candidate.

    All plans ask for 256 bytes more than the op's own length. Each graph dies before the next.
    """
    WORLD.workspace, WORLD.own_pools = 32 * MIB + 256, True
    captures = [0]

    @contextlib.contextmanager
    def graph(*_: object, **__: object) -> Iterator[None]:
        captures[0] += 1
        WORLD.dead_graphs.add(WORLD.capture)
        WORLD.capture += 1
        WORLD.capturing = True
        try:
            yield
        finally:
            WORLD.capturing = False

    with contextlib.ExitStack() as patches:
        for name, stand_in in {
            "CUDAGraph": mock.MagicMock,
            "graph": graph,
            "Event": lambda **_: SimpleNamespace(
                record=lambda *_: None, elapsed_time=lambda _: 1.0, synchronize=lambda: None
            ),
            "stream": lambda _: contextlib.nullcontext(),
        }.items():
            patches.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        tuner = importlib.import_module("flashinfer.autotuner")
        tuner = getattr(tuner, "autotuner", tuner)  # a package from 0.6.15 on
        patches.enter_context(mock.patch.object(tuner, "delay_kernel"))
        patches.enter_context(machine())
        patches.enter_context(flashinfer.autotune(True))
        flashinfer.mm_bf16(bf16(8192, K), bf16(N, K).t(), backend="cudnn")
    return {"captures": captures[0], "allocated": WORLD.allocated}


def drive_functions() -> dict[str, Any]:
    """What can be seen of each public op, on the package and where it is defined."""
    ops = ("bmm_fp8", "mm_bf16", "bmm_bf16", "mm_fp8", "mm_fp4", "mm_mxfp8", "bmm_mxfp8")
    return {
        op: {
            "same": function is getattr(gemm_base, op),
            "signature": str(inspect.signature(function)),
            "parameters": [repr(p) for p in inspect.signature(function).parameters.values()],
            "names": [function.__name__, function.__qualname__, function.__module__],
            "doc": function.__doc__,
            "annotations": repr(function.__annotations__),
            "attributes": sorted(vars(function)),
            "original": inspect.unwrap(function).__code__.co_filename.rpartition("/flashinfer/")[2],
            "pickled": pickle.loads(pickle.dumps(function)) is function,
            "callable": callable(function) and inspect.isfunction(function),
        }
        for op in ops
        if (function := getattr(flashinfer, op))
    }


DRIVES: dict[str, Callable[..., dict[str, Any]]] = {
    "lanes": drive_lanes,
    "refusals": drive_refusals,
    "gate": drive_gate,
    "tune": drive_tune,
    "tuned": drive_tuned,
    "profile": drive_profile,
    "functions": drive_functions,
}

if __name__ == "__main__":
    # On a line of its own: releases print when they make a handle.
    print("\n" + json.dumps(DRIVES[sys.argv[1]](*sys.argv[2:])))
    sys.stdout.flush()
    os._exit(0)
