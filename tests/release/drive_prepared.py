"""Drives the public GEMM ops with and without prepared launches, and compares what reaches the
libraries; the last line printed is the result, as JSON.

Run in a process of its own, with a graft first on PYTHONPATH::

    python drive_prepared.py changes FOLDER
    python drive_prepared.py sequences FOLDER EXAMPLES
    python drive_prepared.py operators

What reaches the libraries is every launch: which plan or function, which tactic, on which of the
caller's tensors or which workspace, in what length, on which stream, and whether the device's
lock was held.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import importlib
import inspect
import itertools
import json
import os
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import drive
import hypothesis
import hypothesis.strategies as st
import pretend
import torch
from drive import WORLD, K, M, N, bf16, f32, fp8, machine, u8
from pretend import CudaLooking, on_cuda
from torch.utils._python_dispatch import TorchDispatchMode

import flashinfer
import flashinfer.gemm.gemm_base as gemm_base
from flashinfer.autotuner import AutoTuner
from flashinfer.gemm_workspace import prepared, signature
from flashinfer.gemm_workspace import state as state_module

OPS = ("bmm_fp8", "mm_bf16", "bmm_bf16", "mm_fp8", "mm_fp4", "mm_mxfp8", "bmm_mxfp8")
SWITCH = "FLASHINFER_GEMM_WORKSPACE_PREPARED"
ALIGNMENT = 256


# What reaches the libraries. ----------------------------------------------------------------------


class Recorder:
    """Every launch, in names that do not depend on addresses."""

    def __init__(self) -> None:
        self.launches: list[list[Any]] = []
        self.names: dict[int, str] = {}  # of the caller's tensors, by address
        self.kept: list[Any] = []  # those tensors: an address must not be used again
        self.bound: dict[Any, int] = {}  # stream by cuDNN handle
        self.hits_within: int | None = None  # of the calls within a context

    def add(self, what: str, args: Any, **more: Any) -> None:
        # The workspace is in the middle of a launch's operands: look for it by its address.
        self.launches.append([what, self.describe(args), self.describe(more), WORLD.stream])

    def describe(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if isinstance(value, dict):
            return {str(key): self.describe(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.describe(each) for each in value]
        return repr(value)

    def tensor(self, tensor: torch.Tensor) -> list[Any]:
        address = tensor.data_ptr()
        lane = state_module.current.ledger.get(address)
        if lane is not None:
            name = f"workspace of {lane.part}, stream {lane.stream}, captured {lane.captured}"
        else:
            name = self.names.get(address, "new")
        if WORLD.by_address:  # type: ignore[attr-defined]
            return [name]
        return [name, tuple(tensor.shape), tensor.stride(), str(tensor.dtype)]


RECORD = Recorder()


class Anything:
    """Has every attribute and can be called: what a graph is described with."""

    def __getattr__(self, name: str) -> Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: object, **__: object) -> Anything:
        return self


class RecordedPlan(pretend.Plan):
    """A plan with a number and a size of its own, which executing it reports."""

    made = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return ANYTHING

    def __init__(self, world: pretend.World) -> None:
        super().__init__(world)
        RecordedPlan.made += 1
        self.number, self.bytes = RecordedPlan.made, world.workspace

    def get_workspace_size(self, *_: object, **__: object) -> int:
        return self.bytes

    get_workspace_size_plan_at_index = get_workspace_size

    def execute(self, pack: Any, workspace: torch.Tensor, **kwargs: Any) -> None:
        self.execute_plan_at_index(pack, workspace, None, **kwargs)

    def execute_plan_at_index(
        self, pack: Any, workspace: torch.Tensor, index: Any, **kwargs: Any
    ) -> None:
        if getattr(WORLD, "failing", False):
            raise RuntimeError("this plan fails")
        stream = RECORD.bound[kwargs.pop("handle")]
        lock = state_module.current.device_lock(0)
        RECORD.add(
            f"plan {self.number} at {index}",
            pack,
            workspace=workspace,
            bound=stream,
            locked=lock._is_owned(),  # type: ignore[attr-defined]
            **kwargs,
        )


ANYTHING = Anything()


class Handle:
    """A handle as the newer frontends have it."""

    def __init__(self, number: int) -> None:
        self.backend_handle = number


class AddressedPlan(RecordedPlan):
    """A plan of a newer frontend, which can be executed by address."""

    uids: tuple[int, ...] = ()

    def __init__(self, world: pretend.World) -> None:
        super().__init__(world)
        self._planning_done, self._data_bindings, self._plan_index = True, {}, 0
        self._plans = [SimpleNamespace(cpp_index=index) for index in range(world.plans)]
        self._lowered_graph = Lowered(self)

    def _engine_for(self, plan: Any) -> Any:
        return WORLD.engine  # type: ignore[attr-defined]

    def _variant_pack_uids(self) -> list[int]:
        return sorted(self.uids)

    def execute_plan_at_index(
        self, pack: Any, workspace: torch.Tensor, index: Any, **kwargs: Any
    ) -> None:
        self.uids = tuple(pack)
        shown = self._plans[self._plan_index if index is None else index].cpp_index
        super().execute_plan_at_index(pack, workspace, shown, **kwargs)


class Lowered:
    """What executes a plan of a newer frontend."""

    def __init__(self, plan: AddressedPlan) -> None:
        self._plan = weakref.proxy(plan)

    def _execute_with_raw_ptrs(
        self, array: int, count: int, workspace: int, handle: int, index: int
    ) -> None:
        addresses = (ctypes.c_uint64 * count).from_address(array)
        pack = dict(zip(sorted(self._plan.uids), map(Address, addresses), strict=True))
        bound = next(each for each in RECORD.bound if each.backend_handle == handle)
        size = self._plan.bytes
        RecordedPlan.execute_plan_at_index(
            self._plan, pack, Address(workspace), index, handle=bound
        )
        assert size >= 0


class Address(torch.Tensor):
    """A tensor of which only the address is known."""

    @staticmethod
    def __new__(cls, address: int) -> Address:
        made = torch.empty(0).as_subclass(cls)
        made.address = address  # type: ignore[attr-defined]
        return made

    def data_ptr(self) -> int:
        return self.address  # type: ignore[attr-defined,no-any-return]


class RecordedModule:
    """A compiled module whose every launch is recorded."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any) -> Any:
            if "tactic_num" in name or "num_tactics" in name or "algos" in name:
                return 3
            if "tactics" in name:
                return [0, 1, 2]
            if "size_in_bytes" in name:
                return 4096
            RECORD.add(name, args)
            return None

        # Once and for all: what a runner holds is part of the tuner's key.
        self.__dict__[name] = call
        return call


def pretend_more() -> None:
    """Beyond ``pretend``: launches are recorded, streams change, a handle is a large number."""
    torch.set_num_threads(1)
    cudnn: Any = sys.modules["cudnn"]
    cudnn.set_stream = lambda handle, stream: RECORD.bound.__setitem__(handle, stream)
    create = cudnn.create_handle.side_effect
    cudnn.create_handle.side_effect = lambda: (
        Handle(create()) if WORLD.by_address else create()  # type: ignore[attr-defined]
    )
    made = lambda: (AddressedPlan if WORLD.by_address else RecordedPlan)(WORLD)  # noqa: E731
    cudnn.graph.side_effect = lambda *_: contextlib.nullcontext((made(), None))
    cudnn.pygraph.side_effect = lambda *_, **__: made()
    torch.cuda.current_stream = lambda *_: SimpleNamespace(cuda_stream=WORLD.stream)
    torch.cuda.current_blas_handle = lambda: 0xB1A5 << 16
    module = SimpleNamespace(
        build_and_load=RecordedModule,
        get_library_path=lambda: "",
        get_library_paths=lambda: [],
    )
    low_latency = importlib.import_module("flashinfer.trtllm_low_latency_gemm")
    low_latency.setup_cubin_loader = lambda _: None
    for each in (gemm_base, low_latency):
        for name in [name for name in vars(each) if name.startswith("gen_")]:
            setattr(each, name, lambda *_, **__: module)
    # The tuner makes random operands, a workspace among them: seconds for each op.
    torch.rand = NoNumbers
    # Not installed here; "auto" asks for it and goes on without.
    gemm_base._check_cute_dsl_availability = lambda: None
    utils = ModuleType("flashinfer.cute_dsl.utils")
    utils.is_cute_dsl_available = lambda: False  # type: ignore[attr-defined]
    sys.modules["flashinfer.cute_dsl"] = ModuleType("flashinfer.cute_dsl")
    sys.modules["flashinfer.cute_dsl.utils"] = utils
    signature.TENSORS.add(CudaLooking)
    AutoTuner._profile_single_kernel = _profile


class NoNumbers:
    """What ``torch.rand`` gives the tuner, which scales it and converts it: zeros in the end."""

    def __init__(self, shape: Any, dtype: torch.dtype = torch.float32, **_: Any) -> None:
        self.shape, self.dtype = shape, dtype

    def __mul__(self, _: object) -> NoNumbers:
        return self

    __sub__ = __mul__

    def to(self, dtype: torch.dtype) -> torch.Tensor:
        return _zeros(tuple(self.shape), dtype)


@functools.cache
def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return on_cuda(torch.zeros(shape, dtype=dtype))


def _profile(*_: Any, **__: Any) -> float:
    """The tactic that is profiled second is the fastest: neither the default nor the first."""
    _profile.calls += 1  # type: ignore[attr-defined]
    return 0.5 if _profile.calls % 3 == 2 else 1.0  # type: ignore[attr-defined]


# The calls. ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of an op, in a form that can be made again with other tensors."""

    op: str
    backend: str
    m: int = M
    out: bool = False
    turned: bool = False  # the output has other strides
    keywords: bool = True
    one_scale: bool = False  # both scales are one tensor
    shifted: int = 0  # bytes by which the first operand is off its alignment
    half: bool = False  # out is float16
    e5m2: bool = False  # the first operand has the other kind of float8
    more: tuple[tuple[str, Any], ...] = ()

    def arguments(self) -> dict[str, Any]:
        """Fresh tensors, by parameter; each is known to the recorder by name."""
        given = {name: self._placed(name, value) for name, value in self._operands().items()}
        if self.one_scale and self.op == "bmm_fp8":
            given["B_scale"] = given["A_scale"]
        dtype = torch.float16 if self.half else torch.bfloat16
        kind = "dtype" if "dtype" in parameters(self.op) else "out_dtype"
        given[kind] = dtype
        if self.out:
            shape = (1, self.m, N) if self.op.startswith("bmm") else (self.m, N)
            out = on_cuda(torch.zeros(shape, dtype=dtype))
            if self.turned:
                out = on_cuda(torch.zeros((*shape[:-2], N, self.m), dtype=dtype))
                out = out.transpose(-2, -1)
            given["out"] = self._placed("out", out)
        given.update(self.more)
        given["backend"] = self.backend
        for name, value in given.items():
            if isinstance(value, torch.Tensor):
                RECORD.names.setdefault(value.data_ptr(), name)
                RECORD.kept.append(value)
        return given

    def _placed(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Aligned, but for the first operand of a call that is shifted."""
        shift = self.shifted if name in ("a", "A") else 0
        room = torch.zeros(value.numel() * value.element_size() + 2 * ALIGNMENT, dtype=torch.uint8)
        start = -room.data_ptr() % ALIGNMENT + shift
        dense = room[start : start + value.numel() * value.element_size()].view(value.dtype)
        return on_cuda(dense.as_strided(value.shape, value.stride()))

    def _operands(self) -> dict[str, torch.Tensor]:
        m = self.m
        if self.op == "bmm_fp8":
            a = fp8(1, m, K).view(torch.float8_e5m2) if self.e5m2 else fp8(1, m, K)
            return {"A": a, "B": fp8(1, N, K).transpose(-2, -1), "A_scale": f32(1),
                    "B_scale": f32(1)}  # fmt: skip
        if self.op == "mm_bf16":
            return {"a": bf16(m, K), "b": bf16(N, K).t()}
        if self.op == "bmm_bf16":
            return {"A": bf16(1, m, K), "B": bf16(1, N, K).transpose(-2, -1)}
        if self.op == "mm_fp8":
            return {"a": fp8(m, K), "b": fp8(K // 128, N, 128), "alpha": f32(1)}
        if self.op == "mm_fp4":
            return {"a": u8(m, K // 2), "b": u8(N, K // 2).t(), "a_descale": u8(128, K // 16),
                    "b_descale": u8(N, K // 16).t(), "alpha": f32(1)}  # fmt: skip
        scales = [u8(128 * K // 32), u8(N * K // 32)]
        if self.op == "mm_mxfp8":
            return {"a": fp8(m, K), "b": fp8(N, K).t(), "a_descale": scales[0],
                    "b_descale": scales[1]}  # fmt: skip
        return {"A": fp8(1, m, K), "B": fp8(1, N, K).transpose(-2, -1), "A_scale": scales[0],
                "B_scale": scales[1]}  # fmt: skip

    def __call__(self) -> Any:
        given = self.arguments()
        function = getattr(flashinfer, self.op)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                if self.keywords:
                    result = function(**given)
                else:
                    names = list(parameters(self.op))
                    last = max(names.index(name) for name in given)
                    defaults = parameters(self.op)
                    result = function(
                        *(given.get(name, defaults[name].default) for name in names[: last + 1])
                    )
            except Exception as error:
                RECORD.add("error", [type(error).__name__])
                return None
        RECORD.kept.append(result)
        RECORD.add("returned", [result, result is given.get("out")])
        return result


@functools.cache
def parameters(op: str) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(getattr(flashinfer, op)).parameters)


def calls() -> list[Call]:
    """Every op with every backend that can be driven here."""
    wanted = {
        "bmm_fp8": ("cudnn", "cublas", "cutlass", "auto"),
        # "auto" of these two asks for the CuTe DSL itself.
        "mm_bf16": ("cudnn", "cutlass", "cublaslt"),
        "bmm_bf16": ("cudnn", "cutlass"),
        "mm_fp8": ("trtllm_low_latency",),
        "mm_fp4": ("cudnn", "cutlass", "auto"),
        "mm_mxfp8": ("cudnn", "cutlass", "auto"),
        "bmm_mxfp8": ("cudnn", "auto"),
    }
    return [
        Call(op, backend)
        for op, backends in wanted.items()
        for backend in backends
        if backend in drive.backends(op)
    ]


# Comparing. ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def fresh(
    switch: str,
    backend_version: int = 92000,
    by_address: bool = False,
    capability: tuple[int, int] = (10, 0),
) -> Iterator[None]:
    """A machine and a tuner that nobody has used, prepared launches on or off."""
    global RECORD
    WORLD.backend_version, WORLD.stream, WORLD.capturing, WORLD.workspace = (
        backend_version,
        7,
        False,
        0,
    )
    WORLD.capability = capability
    WORLD.failing, WORLD.by_address, WORLD.engine = False, by_address, None  # type: ignore[attr-defined]
    AutoTuner._instance = None
    _profile.calls = 0  # type: ignore[attr-defined]
    RecordedPlan.made = 0
    gemm_base._cudnn_handles.clear()
    WORLD.handles = 0
    RECORD = Recorder()
    os.environ[SWITCH] = switch
    with machine():
        yield


Sequence = Callable[[], None]

#: Ways to execute plans: by the public call, with shapes given at each, and by address.
HOW: tuple[dict[str, Any], ...] = ({}, {"backend_version": 92301}, {"by_address": True})


def both(sequence: Sequence, **how: Any) -> dict[str, Any]:
    """What a sequence of calls launches without and with prepared launches."""
    found = {}
    for name, switch in (("slow", "0"), ("fast", "1")):
        with fresh(switch, **how):
            sequence()
            found[name] = RECORD.launches
            report = {**prepared.report(), "hits within": RECORD.hits_within}
    return {"same": found["slow"] == found["fast"], "report": report,
            "slow": found["slow"], "fast": found["fast"]}  # fmt: skip


def evict() -> None:
    """Drop every plan. Not runners: the tuner's keys have their addresses."""
    for name, value in vars(gemm_base).items():
        if name.startswith("build_cudnn_") and hasattr(value, "cache_clear"):
            value.cache_clear()


# What can change between two calls of a signature. ------------------------------------------------


def tuned(call: Call) -> None:
    with flashinfer.autotune(True):
        call()


def file(folder: str, call: Call, name: str) -> str:
    """Path of a cache file: one belongs to one version of cuDNN."""
    return str(Path(folder) / f"{call.op}-{call.backend}-{WORLD.backend_version}-{name}.json")


def write_files(folder: str) -> None:
    """Two cache files for each call, in which other tactics are the fastest."""
    for call, version in itertools.product(calls(), (92000, 92301)):
        for name, skipped in (("one", 0), ("two", 1)):
            with fresh("0", backend_version=version):
                _profile.calls = skipped  # type: ignore[attr-defined]
                with flashinfer.autotune(True, cache=file(folder, call, name)):
                    call()


def bundled(paths: list[str]) -> None:
    """The configs of ``paths`` as the ones that the release comes with, for the pretended GPU."""
    tuner = sys.modules[AutoTuner.__module__]
    with fresh("0"):
        name = tuner.get_config_path(is_module=True)
    module: Any = ModuleType(name)
    module.best_configs = {
        key: (0, tuner._json_to_tactic(value[1]))
        for path in paths
        for key, value in json.loads(Path(path).read_text()).items()
        if key != "_metadata"
    }
    sys.modules[name] = module


def drive_changes(folder: str) -> dict[str, Any]:
    """Each change between calls, for every op and backend: the same launches, and hits where
    nothing changed."""
    write_files(folder)
    bundled([str(path) for path in Path(folder).glob("*-one.json")])

    def nothing(call: Call) -> None:
        for _ in range(4):
            call()

    def with_change(change: Callable[[Call], Any]) -> Callable[[Call], None]:
        def sequence(call: Call) -> None:
            call(), call(), call()
            change(call)
            call(), call(), call()

        return sequence

    def within(context: Callable[[Call], Any]) -> Callable[[Call], None]:
        def sequence(call: Call) -> None:
            call(), call(), call()
            with context(call):
                before = prepared.report()["hits"]
                call(), call(), call()
                RECORD.hits_within = prepared.report()["hits"] - before
            call(), call(), call()

        return sequence

    @contextlib.contextmanager
    def capturing(_: Call) -> Iterator[None]:
        WORLD.capturing = True
        yield
        WORLD.capturing = False

    def captured(call: Call) -> None:
        with capturing(call):
            call()

    def captured_again(call: Call) -> None:
        call(), call(), call()
        captured(call)
        evict()
        call(), call()
        captured(call)
        call(), call()

    @contextlib.contextmanager
    def on_stream(_: Call) -> Iterator[None]:
        WORLD.stream = 8
        yield
        WORLD.stream = 7

    @contextlib.contextmanager
    def variable(name: str, value: str) -> Iterator[None]:
        os.environ[name] = value
        yield
        del os.environ[name]

    @contextlib.contextmanager
    def failing(_: Call) -> Iterator[None]:
        WORLD.failing = True  # type: ignore[attr-defined]
        yield
        WORLD.failing = False  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def on_thread(_: Call) -> Iterator[None]:
        with flashinfer.autotune(False, round_up=True):
            yield

    def replaced_result(_: Call) -> None:
        winners = AutoTuner.get().profiling_cache
        for key, (*runner, _, profile) in list(winners.items()):
            winners[key] = (*runner, -1, profile)

    def new_dicts(_: Call) -> None:
        tuner = AutoTuner.get()
        tuner.profiling_cache, tuner._file_configs = {}, {}

    tuner = AutoTuner.get
    changes: dict[str, Callable[[Call], None]] = {
        "nothing": nothing,
        "tuned": with_change(tuned),
        "tuned, cleared": with_change(lambda c: (tuned(c), c(), c(), tuner().clear_cache())),
        "tuned, result replaced": with_change(lambda c: (tuned(c), c(), c(), replaced_result(c))),
        "tuned, dicts replaced": with_change(lambda c: (tuned(c), c(), c(), new_dicts(c))),
        "tuned, tuner replaced": with_change(
            lambda c: (tuned(c), c(), c(), setattr(AutoTuner, "_instance", None))
        ),
        "file loaded": with_change(lambda c: tuner().load_configs(file(folder, c, "one"))),
        "another file loaded": with_change(
            lambda c: (
                tuner().load_configs(file(folder, c, "one")), c(), c(),
                tuner().load_configs(file(folder, c, "two")),
            )
        ),
        "context with a file": within(
            lambda c: flashinfer.autotune(False, cache=file(folder, c, "one"))
        ),
        "context with no file": with_change(
            lambda c: (
                tuner().load_configs(file(folder, c, "one")), c(), c(),
                flashinfer.autotune(False, cache="/none.json").__enter__(),
            )
        ),
        "tuning": within(lambda c: flashinfer.autotune(True)),
        "buckets": within(lambda c: flashinfer.autotune(False, tuning_buckets=(1, 2, 512))),
        "rounded up": within(on_thread),
        "capture": within(capturing),
        "stream": within(on_stream),
        "plans evicted": with_change(lambda c: evict()),
        # What a live graph holds lives on, so that only the release's own cache can tell: a shape
        # that was just called must be one that can be captured.
        "captured, evicted, captured": captured_again,
        "plan cache cleared": with_change(lambda c: gemm_base.clear_cudnn_graph_cache())
        if hasattr(gemm_base, "clear_cudnn_graph_cache")
        else nothing,
        "launch fails": within(failing),
        "trace": within(lambda c: variable("FLASHINFER_TRACE_DUMP", "1")),
        "log level": within(lambda c: variable("FLASHINFER_LOGLEVEL", "1")),
        "bundled configs": within(lambda c: variable("FLASHINFER_AUTOTUNER_LOAD_FROM_FILE", "1")),
        "larger workspace": with_change(
            lambda c: (evict(), setattr(WORLD, "workspace", 64 << 20))
        ),
        "rows": with_change(lambda c: [dataclasses.replace(c, m=2 * M)() for _ in range(3)]),
        **{
            f"and {name}": lambda c, other=other: [
                dataclasses.replace(c, **given)()
                for given in ({"out": True}, other, {"out": True}, other, {}, other, {})
            ]
            for name, other in {
                "turned": {"out": True, "turned": True},
                "half": {"half": True},
                "e5m2": {"e5m2": True},
                "half given": {"out": True, "half": True},
                "keywords": {"out": True, "keywords": False},
            }.items()
        },
        "one scale": lambda c: [
            dataclasses.replace(c, one_scale=one)() for one in (True, True, False, False, True)
        ] and None,  # type: ignore[func-returns-value]
        "alignment": with_change(
            lambda c: [dataclasses.replace(c, shifted=each)() for each in (16, 16, 32, 8)]
        ),
    }  # fmt: skip
    if "skip_ops" in inspect.signature(flashinfer.autotune).parameters:
        names = {"bf16_gemm", "fp8_gemm", "fp4_gemm", "mxfp8_gemm"}
        changes["skipped"] = lambda c: (
            tuned(c),
            within(lambda _: flashinfer.autotune(False, skip_ops=names))(c),
        )[1]
    found: dict[str, Any] = {}
    for change, sequence in changes.items():
        for how in HOW:
            for call in calls():
                if how != HOW[0] and call.backend != "cudnn":
                    continue
                result = both(functools.partial(sequence, call), **how)
                case = f"{change}: {call.op} {call.backend} {sorted(how)}"
                slow = [json.dumps(launch[:3]) for launch in result["slow"]]
                found[case] = {
                    "same": result["same"],
                    "report": result["report"],
                    # How many different ones of the caller's first operand, not of the tuner's:
                    # a change that changes nothing tests nothing.
                    "kinds": len({each for each in slow if '["a"' in each.lower()}),
                }
                if not result["same"]:
                    pairs = zip(result["slow"], result["fast"], strict=False)
                    found[case]["first difference"] = next(
                        (pair for pair in pairs if pair[0] != pair[1]), "length"
                    )
    return found


# Random sequences. --------------------------------------------------------------------------------


def _calls() -> st.SearchStrategy[Call]:
    which = st.sampled_from(
        [
            *(("bmm_fp8", backend) for backend in ("cudnn", "cublas", "auto")),
            *(("mm_bf16", backend) for backend in ("cudnn", "cublaslt", "cutlass")),
            *(("mm_fp4", backend) for backend in ("cudnn", "cutlass")),
        ]
    )
    return st.builds(
        lambda which, m, **more: Call(*which, m=m, **more),
        which,
        st.sampled_from([M, 2 * M]),
        out=st.booleans(),
        turned=st.sampled_from([False, False, True]),
        keywords=st.booleans(),
        one_scale=st.booleans(),
        shifted=st.sampled_from([0, 0, 0, 16]),
        half=st.sampled_from([False, False, True]),
    )


@st.composite
def _steps(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    """Steps over one to three signatures, so that each is launched again and again."""
    call = st.sampled_from(draw(st.lists(_calls(), min_size=1, max_size=3)))
    again = st.tuples(st.just("call"), call, st.integers(1, 3))
    environment = ["FLASHINFER_TRACE_DUMP", "FLASHINFER_AUTOTUNER_LOAD_FROM_FILE"]
    step = st.one_of(
        again,
        st.tuples(st.just("tune"), call),
        again,
        st.tuples(st.just("within"), st.sampled_from(["buckets", "round up", "tuning"]), call),
        st.tuples(st.just("load"), st.sampled_from(["one", "two"])),
        again,
        st.tuples(st.just("clear"), st.sampled_from(["tuner", "plans", "both", "winners"])),
        st.tuples(st.just("capture"), call),
        again,
        st.tuples(st.just("stream"), st.sampled_from([7, 8])),
        st.tuples(st.just("environment"), st.sampled_from(environment), call),
        again,
        st.tuples(st.just("fail"), call),
        st.tuples(st.just("bytes"), st.sampled_from([0, 48 << 20])),
    )
    return draw(st.lists(step, min_size=8, max_size=20))


def _do(step: tuple[Any, ...], folder: str) -> None:
    match step:
        case ("call", call, times):
            for _ in range(times):
                call()
        case ("tune", call):
            tuned(call)
        case ("within", how, call):
            context = {
                "buckets": {"tuning_buckets": (1, 2, 512)},
                "round up": {"round_up": True},
                "tuning": {"tune_mode": True},
            }[how]
            with flashinfer.autotune(**{"tune_mode": False, **context}):
                call(), call()
        case ("load", name):
            AutoTuner.get().load_configs(f"{folder}/all-{name}-{WORLD.backend_version}.json")
        case ("clear", what):
            if what in ("plans", "both"):
                evict()
            if what in ("tuner", "both"):
                AutoTuner.get().clear_cache()
            if what == "winners":
                winners = AutoTuner.get().profiling_cache
                for key in list(winners):
                    del winners[key]
        case ("capture", call):
            WORLD.capturing = True
            call()
            WORLD.capturing = False
        case ("stream", handle):
            WORLD.stream = handle
        case ("environment", name, call):
            os.environ[name] = "1"
            call(), call()
            del os.environ[name]
        case ("fail", call):
            WORLD.failing = True  # type: ignore[attr-defined]
            call()
            WORLD.failing = False  # type: ignore[attr-defined]
        case ("bytes", size):
            # Of plans that are built from now on.
            WORLD.workspace = size


def drive_sequences(folder: str, examples: str) -> dict[str, Any]:
    """Random sequences: the same launches, whatever comes between the calls."""
    for version, (name, skipped) in itertools.product((92000, 92301), (("one", 0), ("two", 1))):
        with fresh("0", backend_version=version):
            _profile.calls = skipped  # type: ignore[attr-defined]
            with flashinfer.autotune(True, cache=f"{folder}/all-{name}-{version}.json"):
                for call in calls():
                    call()
    bundled([f"{folder}/all-one-92000.json"])
    total: Counter[str] = Counter()

    @hypothesis.settings(
        max_examples=int(examples),
        deadline=None,
        database=None,
        derandomize=os.environ.get("HYPOTHESIS_PROFILE") != "soak",
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(_steps(), st.sampled_from(HOW))
    def same(steps: list[tuple[Any, ...]], how: dict[str, Any]) -> None:
        def sequence() -> None:
            for step in steps:
                _do(step, folder)

        found = both(sequence, **how)
        for slow, fast in itertools.zip_longest(found["slow"], found["fast"]):
            assert slow == fast
        total.update({key: found["report"][key] for key in ("hits", "misses", "failures")})

    same()
    return dict(total)


class _Operators(TorchDispatchMode):
    """Notes the names of torch's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def drive_operators() -> dict[str, list[str]]:
    """torch's operators on the release's own path of each op, once everything is warm.

    A prepared launch leaves out whatever is not the launch, the output and the workspace: there
    must be nothing else that writes.
    """
    found: dict[str, list[str]] = {}
    for how in HOW:
        for call in calls():
            with fresh("0", **how):
                given = call.arguments()
                function = getattr(flashinfer, call.op)
                function(**given)
                with _Operators() as operators:
                    function(**given)
            found[f"{call.op} {call.backend} {sorted(how)}"] = sorted(set(operators.seen))
    return found


DRIVES: dict[str, Callable[..., Any]] = {
    "changes": drive_changes,
    "sequences": drive_sequences,
    "operators": drive_operators,
}

if __name__ == "__main__":
    pretend_more()
    print("\n" + json.dumps(DRIVES[sys.argv[1]](*sys.argv[2:])))
    sys.stdout.flush()
    os._exit(0)
