"""GEMMs of one FlashInfer, called as engines call them, with what the cases need to see.

Two functions of the release are wrapped, and nothing of its source is changed. The autotuner's
``choose_one``, through which every op goes: it shows the workspace that the op was handed, and can
name the plan to run. The ``execute_cudnn_gemm_*`` functions: they show a plan, and can raise the
number of bytes that it asks for, as a plan of another shape or cuDNN version would. Without a case
that asks for one of these, both only pass on.

The fork's prepared launches pass by both, and know nothing of what the harness changes. So a call
that is looked at, or whose plan is to ask for more, runs under a function mode, which those leave
to the release's own path; and they forget everything when another plan is named for a shape.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import BaseTorchFunctionMode

from .case import Absent

flashinfer: Any = importlib.import_module("flashinfer")
gemm_base: Any = importlib.import_module("flashinfer.gemm.gemm_base")
utils: Any = importlib.import_module("flashinfer.utils")
autotuner: Any = importlib.import_module("flashinfer.autotuner")

MIB = 1 << 20
Shape = tuple[int, int, int, int]

#: (batch, m, n, k) for which cuBLASLt and cuDNN choose split-K kernels on SM90: those use the
#: workspace.
SPLIT_K: list[Shape] = [(1, 64, 512, 65536), (1, 128, 256, 32768), (1, 16, 1024, 16384)]

#: What the release's cache calls the workspace of a lane.
WORKSPACES = {
    "fp8-cudnn": "bmm_fp8_workspace",
    "fp8-cublas": "bmm_fp8_workspace",
    "bf16-cudnn": "mm_bf16_workspace",
    "bf16-cublaslt": "mm_bf16_workspace",
    "fp4-cudnn": "mm_fp4_workspace",
    "fp4-cutlass": "mm_fp4_workspace",
    "mxfp8-cudnn": "mm_mxfp8_workspace",
}


@dataclass(frozen=True)
class Handed:
    """A workspace that an op was handed."""

    address: int
    nbytes: int
    capturing: bool


class _Probed(BaseException):
    """Carries a runner and its inputs out of an op, before anything runs."""

    def __init__(self, runners: list[Any], inputs: list[Any]) -> None:
        super().__init__("probe")
        self.runners, self.inputs = runners, inputs


class _Local(threading.local):
    tactic: object = None
    asked: int = 0
    probing: bool = False
    plans: list[Any] | None = None
    handed: Handed | None = None
    chosen: tuple[str, object] | None = None


local = _Local()


class _Asking:
    """A plan that asks for at least ``nbytes``."""

    def __init__(self, plan: Any, nbytes: int) -> None:
        self._plan, self._nbytes = plan, nbytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plan, name)

    def get_workspace_size(self, *args: Any, **kwargs: Any) -> int:
        return max(int(self._plan.get_workspace_size(*args, **kwargs)), self._nbytes)

    def get_workspace_size_plan_at_index(self, *args: Any, **kwargs: Any) -> int:
        size = self._plan.get_workspace_size_plan_at_index(*args, **kwargs)
        return max(int(size), self._nbytes)


def _seen(workspace: object) -> Handed | None:
    if not isinstance(workspace, torch.Tensor):
        return None
    try:
        address = workspace.data_ptr()
    except RuntimeError:
        return None  # a tensor that is traced has none
    return Handed(address, workspace.numel(), torch.cuda.is_current_stream_capturing())


def _watch_choices() -> None:
    tuner = autotuner.AutoTuner
    original = tuner.choose_one

    @functools.wraps(original)
    def choose_one(
        self: Any, custom_op: str, runners: Any, tuning_config: Any, inputs: Any, **kwargs: Any
    ) -> Any:
        local.handed = _seen(inputs[-1])
        if local.probing:
            raise _Probed(list(runners), list(inputs))
        if local.tactic is not None:
            return runners[0], local.tactic
        runner, tactic = original(self, custom_op, runners, tuning_config, inputs, **kwargs)
        local.chosen = (type(runner).__name__, tactic)
        return runner, tactic

    tuner.choose_one = choose_one


def _watch_executions() -> None:
    for name in [name for name in vars(gemm_base) if name.startswith("execute_cudnn_gemm_")]:
        setattr(gemm_base, name, _watched(getattr(gemm_base, name)))


def _watched(original: Any) -> Any:
    @functools.wraps(original)
    def execute(*args: Any, **kwargs: Any) -> Any:
        plan = args[0] if args else kwargs["graph"]
        if local.plans is not None:
            local.plans.append(plan)
        if local.asked:
            plan = _Asking(plan, local.asked)
            if args:
                args = (plan, *args[1:])
            else:
                kwargs = {**kwargs, "graph": plan}
        return original(*args, **kwargs)

    return execute


_watch_choices()
_watch_executions()

# The plan that was named last, by lane and shapes.
_named: dict[tuple[object, ...], object] = {}


def _in_sight() -> AbstractContextManager[object]:
    """In which a call passes by what is wrapped, if somebody looks there or changes something."""
    watched = local.probing or local.asked or local.plans is not None
    return BaseTorchFunctionMode() if watched else nullcontext()


def _name(plan: object, *signature: object) -> None:
    """Calls of this signature run ``plan`` from now on."""
    if _named.setdefault(signature, plan) != plan:
        _named[signature] = plan
        launches = prepared()
        if launches is not None:
            launches.forget()


@contextmanager
def asking(nbytes: int) -> Iterator[None]:
    """Every cuDNN plan that this thread executes asks for at least ``nbytes``."""
    before, local.asked = local.asked, nbytes
    try:
        yield
    finally:
        local.asked = before


@contextmanager
def no_fallback() -> Iterator[None]:
    """A runner that falls back to another plan raises instead."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*falling back to default.*")
        yield


@dataclass(frozen=True)
class Plan:
    """A cuDNN plan of one shape: its index, its name, the bytes it asks for.

    ``tactic``: what the autotuner would call it, also for other shapes, and what builds it alone;
    the index where this version's tuner has no better name.
    """

    index: int
    name: str
    nbytes: int
    tactic: object


class Call:
    """One GEMM with operands and an output of its own; ``plan`` names the plan or tactic."""

    def __init__(
        self,
        lane: str,
        shape: Shape,
        seed: int = 0,
        device: torch.device | str = "cuda:0",
        plan: object = None,
    ) -> None:
        self.lane, self.shape, self.plan = lane, shape, plan
        self.op, self.backend = lane.split("-")
        self.device = torch.device(device)
        self._generator = torch.Generator(self.device).manual_seed(1 + seed)
        b, m, n, k = shape
        self.scale = torch.ones(1, device=self.device)
        if self.op == "fp8":
            self.a = self._random(b, m, k).to(torch.float8_e4m3fn)
            self.b = self._random(b, n, k).to(torch.float8_e4m3fn).transpose(-2, -1)
            self.out = torch.zeros(b, m, n, device=self.device, dtype=torch.bfloat16)
        else:
            a = self._random(m, k).to(torch.bfloat16)
            weight = self._random(n, k).to(torch.bfloat16)
            self.out = torch.zeros(m, n, device=self.device, dtype=torch.bfloat16)
            self._product = None if self.op == "bf16" else (a, weight)
            if self.op == "bf16":
                self.a, self.b = a, weight.t()
            elif self.op == "mxfp8":
                quantize = needed(flashinfer, "mxfp8_quantize")
                self.a, self.a_scale = quantize(a, True)
                weight, self.b_scale = quantize(weight, True)
                self.b = weight.t()
            else:
                self._quantize_fp4(a, weight)

    def _random(self, *shape: int) -> torch.Tensor:
        values = torch.randn(*shape, device=self.device, generator=self._generator)
        return values * 0.5

    def _quantize_fp4(self, a: torch.Tensor, weight: torch.Tensor) -> None:
        quantize = needed(flashinfer, "nvfp4_quantize")
        layout = needed(flashinfer, "SfLayout").layout_128x4
        a_global, b_global = ((448 * 6) / each.float().abs().max() for each in (a, weight))
        self.a, self.a_scale = quantize(a, a_global, sfLayout=layout, do_shuffle=False)
        weight, b_scale = quantize(weight, b_global, sfLayout=layout, do_shuffle=False)
        self.b, self.b_scale = weight.T, b_scale.T
        self.alpha = 1.0 / (a_global * b_global)

    def __call__(self) -> None:
        _name(self.plan, self.lane, self.a.shape, self.b.shape)
        before, local.tactic = local.tactic, self.plan
        try:
            self._launch()
        finally:
            local.tactic = before

    def _launch(self) -> None:
        with _in_sight():
            self._call()

    def _call(self) -> None:
        if self.op == "fp8":
            flashinfer.bmm_fp8(
                self.a, self.b, self.scale, self.scale, torch.bfloat16, self.out, self.backend
            )
        elif self.op == "bf16":
            flashinfer.mm_bf16(self.a, self.b, out=self.out, backend=self.backend)
        elif self.op == "mxfp8":
            needed(flashinfer, "mm_mxfp8")(
                self.a,
                self.b,
                self.a_scale,
                self.b_scale,
                out=self.out,
                out_dtype=torch.bfloat16,
                backend=self.backend,
            )
        else:
            flashinfer.mm_fp4(
                self.a,
                self.b,
                self.a_scale,
                self.b_scale,
                self.alpha,
                torch.bfloat16,
                self.out,
                backend=self.backend,
            )

    def exact(self) -> torch.Tensor:
        """The product in float32 (of the values before quantizing, where that is coarse)."""
        a, b = self.a, self.b
        if self.op in ("fp4", "mxfp8"):
            assert self._product is not None
            a, weight = self._product
            b = weight.t()
        return a.float() @ b.float()

    @property
    def tolerance(self) -> float:
        """Relative error up to which a result is right."""
        return {"fp4": 0.3, "mxfp8": 0.1}.get(self.op, 0.02)

    def error(self) -> float:
        """Relative error of ``out`` against :meth:`exact`."""
        exact = self.exact()
        return float((self.out.float() - exact).norm() / exact.norm())

    def eager(self) -> torch.Tensor:
        """Run once; a copy of the result."""
        self()
        torch.cuda.synchronize(self.device)
        return self.out.clone()

    def right(self) -> bool:
        """Run once; whether the result is near the exact one."""
        self.out.zero_()
        self()
        torch.cuda.synchronize(self.device)
        return self.error() < self.tolerance

    def captured(self, times: int = 1, **how: Any) -> torch.cuda.CUDAGraph:
        """A graph of ``times`` calls."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device), torch.cuda.graph(graph, **how):
            for _ in range(times):
                self()
        return graph

    def replayed(self, graph: torch.cuda.CUDAGraph) -> torch.Tensor:
        """``out`` after one replay from a zeroed ``out``."""
        self.out.zero_()
        graph.replay()
        torch.cuda.synchronize(self.device)
        return self.out

    # What the op would run and where. ------------------------------------------------------------

    def probe(self) -> tuple[Any, list[Any]]:
        """The runner that the op would use and its inputs, the workspace last. Nothing runs."""
        local.probing = True
        try:
            self._launch()
        except _Probed as probed:
            return probed.runners[0], probed.inputs
        finally:
            local.probing = False
        raise Absent(f"this version's {self.op} op does not go through the autotuner")

    def workspace(self) -> torch.Tensor:
        """What the op is handed in the current stream and capture."""
        tensor = self.probe()[1][-1]
        assert isinstance(tensor, torch.Tensor)
        return tensor

    def with_workspace(self, workspace: torch.Tensor, tactic: object) -> None:
        """Run one plan with a workspace of the caller's."""
        runner, inputs = self.probe()
        runner.forward([*inputs[:-1], workspace], tactic=tactic)

    def plans(self) -> list[Plan]:
        """Every built plan of this shape that runs; they are built by this."""
        seen: list[Any] = []
        local.plans, before = seen, local.plans
        try:
            # Not on the op's own workspace: that one must not have grown before a case begins.
            self.with_workspace(torch.empty(64 * MIB, dtype=torch.uint8, device=self.device), 0)
        finally:
            local.plans = before
        if not seen:
            raise Absent(f"{self.lane} runs no cuDNN plan")
        plan, found = seen[0], []
        for index in range(int(plan.get_execution_plan_count())):
            try:
                nbytes = int(plan.get_workspace_size_plan_at_index(index))
                name = str(plan.get_plan_name_at_index(index))
            except Exception:
                continue  # not built
            found.append(Plan(index, name, nbytes, _tactic(plan, index)))
        torch.cuda.synchronize(self.device)
        return [each for each in found if self._runs(each)]

    def _runs(self, plan: Plan) -> bool:
        workspace = torch.empty(max(plan.nbytes, 256), dtype=torch.uint8, device=self.device)
        self.out.zero_()
        try:
            with no_fallback():
                self.with_workspace(workspace, plan.index)
            torch.cuda.synchronize(self.device)
        except Exception:
            return False
        return self.error() < self.tolerance

    def tactics(self) -> list[object]:
        """What the runner offers the autotuner (cuBLASLt algorithms are found by index)."""
        runner, inputs = self.probe()
        return list(runner.get_valid_tactics(inputs, None))

    def bytes_written(self, plan: Plan) -> int:
        """How many bytes of its workspace a plan changes."""
        workspace = torch.full((plan.nbytes,), 0x5A, dtype=torch.uint8, device=self.device)
        self.with_workspace(workspace, plan.index)
        torch.cuda.synchronize(self.device)
        return int((workspace != 0x5A).sum())


def _tactic(plan: Any, index: int) -> object:
    if not hasattr(gemm_base, "_is_cudnn_engine_knob_tactic"):
        return index
    try:
        engine, knobs = plan.get_engine_and_knobs_at_index(index)
    except (AttributeError, RuntimeError):
        return index
    pairs = sorted((int(kind), int(value)) for kind, value in (knobs or {}).items())
    return int(engine), tuple(pairs)


def needed(module: Any, name: str) -> Any:
    """``module.name``. Raises Absent where this version has none."""
    found = getattr(module, name, None)
    if found is None:
        raise Absent(f"this version has no {getattr(module, '__name__', module)}.{name}")
    return found


def small_split_k(lane: str, limit: int = 32 * MIB) -> Call:
    """A call of the plan that writes most of a workspace of at most ``limit`` bytes."""
    shape, plan = small_split_k_plan(lane, limit)
    return Call(lane, shape, plan=plan.index)


def small_split_k_plan(lane: str, limit: int = 32 * MIB) -> tuple[Shape, Plan]:
    """The plan of :func:`small_split_k`, and its shape."""
    for shape in SPLIT_K:
        call = Call(lane, shape)
        written = {
            plan: call.bytes_written(plan) for plan in call.plans() if 0 < plan.nbytes <= limit
        }
        best = max(written, key=lambda plan: written[plan], default=None)
        if best is not None and written[best]:
            return shape, best
    raise Absent(f"no {lane} plan of {SPLIT_K} writes a workspace of at most {limit} bytes")


def giant(lane: str, limit: int = 32 * MIB) -> Call:
    """A call of a plan that asks for more than ``limit`` bytes."""
    for shape in [(1, 512, 5120, 5120), (1, 16, 1024, 16384), (1, 2048, 4096, 4096)]:
        call = Call(lane, shape)
        for plan in call.plans():
            if plan.nbytes > limit:
                return Call(lane, shape, plan=plan.index)
    raise Absent(f"no {lane} plan asks for more than {limit} bytes here")


def cudnn_sibling(lane: str) -> str:
    """The cuDNN lane that uses the same workspace."""
    return {"fp8-cublas": "fp8-cudnn", "bf16-cublaslt": "bf16-cudnn"}.get(lane, lane)


def user(lane: str) -> Call:
    """A split-K call that uses the workspace without outgrowing 32 MiB; warmed.

    For cuDNN a named plan is built and has run on a workspace of its own.
    """
    if lane.endswith("cudnn"):
        return small_split_k(lane)
    return Call(lane, (1, 16, 1024, 16384))


def builders() -> list[Any]:
    """The release's caches of cuDNN plans."""
    return [
        value
        for name, value in vars(gemm_base).items()
        if name.startswith("build_cudnn_gemm_") and hasattr(value, "cache_clear")
    ]


def clear_plan_caches() -> None:
    """What ``clear_cudnn_graph_cache`` of the release clears, without the autotuner's."""
    for builder in builders():
        builder.cache_clear()


def forget_workspaces() -> None:
    """Empty the release's caches of workspaces, as engines that sleep do."""
    for name in ("_cache_buf", "_stream_cache_buf"):
        getattr(utils, name, {}).clear()


def is_typed(error: BaseException) -> bool:
    """Whether an error is one of the capture errors that upstream and the fork name."""
    return any(kind.__name__ == "CudnnCaptureUnsafeError" for kind in type(error).__mro__)


def described(error: BaseException, limit: int = 160) -> str:
    """Type and first line of an error."""
    first = str(error).strip().splitlines()
    return f"{type(error).__name__}: {first[0][:limit] if first else ''}"


def runtime() -> Any | None:
    """The fork's runtime, ``None`` on a release."""
    try:
        return importlib.import_module("flashinfer.gemm_workspace")
    except ImportError:
        return None


def prepared() -> Any | None:
    """The fork's prepared launches, ``None`` on a release."""
    return sys.modules.get("flashinfer.gemm_workspace.prepared")
