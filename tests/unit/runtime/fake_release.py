"""An op of a made-up release: a tuner, runners, a library, and a public function over them."""

from __future__ import annotations

import functools
import math
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from flashinfer.gemm_workspace import lane_workspace, noted_runner, prepared_launches, watched

MIB = 1 << 20
HANDLE = 0xB1A5 << 16


class AutoTuner:
    """Answers with the tactic that its caches have for an op, else -1."""

    _instance: AutoTuner | None = None

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.profiling_cache: dict[str, Any] = {}
        self._file_configs: dict[str, Any] = {}
        self.is_tuning_mode = False
        self._local = threading.local()

    @classmethod
    def get(cls) -> AutoTuner:
        if cls._instance is None:
            cls._instance = cls()
        return cls._instance

    def _stack(self, name: str) -> list[Any]:
        if not hasattr(self._local, name):
            setattr(self._local, name, [])
        return getattr(self._local, name)  # type: ignore[no-any-return]

    def _get_override_stack(self) -> list[Any]:
        return self._stack("buckets")

    def _get_skip_ops_stack(self) -> list[Any]:
        return self._stack("skipped")

    def choose_one(self, op: str, runners: list[Any]) -> tuple[Any, Any]:
        if self._get_skip_ops_stack():
            return runners[0], -2
        for cache in (self.profiling_cache, self._file_configs):
            if op in cache:
                return runners[0], cache[op]
        return runners[0], -1 if not self._get_override_stack() else -3


class Library:
    """What is launched: (name, operands, tactic, stream that the handle is bound to)."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.bound: dict[Any, int] = {}
        self.fails = False

    def matmul(self, *operands: Any) -> None:
        if self.fails:
            raise RuntimeError("the library fails")
        self.launched.append(("matmul", *operands))


class Plan:
    """A plan that is executed with a pack and a workspace."""

    def __init__(self, library: Library) -> None:
        self.library = library

    def execute(self, pack: Any, workspace: Any, handle: Any = None, **more: Any) -> None:
        if self.library.fails:
            raise RuntimeError("the library fails")
        self.library.launched.append(
            ("plan", *pack.values(), workspace, self.library.bound.get(handle), *more.values())
        )


class Runner:
    """A runner of the release's; what it does is what its name says."""

    def __init__(self, release: Release, kind: str) -> None:
        self.release, self.kind = release, kind

    @noted_runner
    def __call__(self, inputs: Any, **kwargs: Any) -> Any:
        return self.forward(inputs, **kwargs)

    def forward(self, inputs: Any, tactic: Any = -1) -> Any:
        a, b, scale, out, workspace = inputs
        release, library = self.release, self.release.library
        if self.kind == "plan":
            plan = release.plan(a.shape, tactic)
            try:
                release.execute(plan, a, b, scale, out, workspace)
            except RuntimeError:
                release.execute(release.plan(a.shape, "default"), a, b, scale, out, workspace)
        elif self.kind == "function":
            watched(library).matmul(a, b.transpose(-2, -1), scale, out, workspace, HANDLE, tactic)
        elif self.kind == "two":
            watched(library).matmul(a, out)
            watched(library).matmul(b, out)
        elif self.kind == "copy":
            watched(library).matmul(a.clone(), b, out)
        else:  # nothing that is watched
            library.matmul(a, b, scale, out, workspace, tactic)
        return out


class Release:
    """``op(a, b, scale, dtype, out, backend)``, prepared; ``plain`` is the release's function."""

    def __init__(self) -> None:
        self.library = Library()
        self.calls = 0
        AutoTuner._instance = None
        self.tuner = AutoTuner
        self.plan = functools.lru_cache(maxsize=4)(lambda shape, tactic: Plan(self.library))
        self.changes: list[Any] = []  # called in the middle of a call
        release = self

        def op(
            a: torch.Tensor,
            b: torch.Tensor,
            scale: torch.Tensor | None = None,
            dtype: torch.dtype = torch.bfloat16,
            out: torch.Tensor | None = None,
            backend: str = "plan",
        ) -> torch.Tensor:
            """Multiplies."""
            if out is None:
                out = torch.empty((a.shape[0], b.shape[1]), dtype=dtype, device=a.device)
            workspace = lane_workspace("mm_bf16_workspace", 32 * MIB, a.device)
            runner, tactic = AutoTuner.get().choose_one("op", [Runner(release, backend)])
            inputs = [a, b, scale, out, workspace]
            if backend == "twice":
                runner(inputs, tactic=tactic)
            runner(inputs=inputs, tactic=tactic)
            for change in release.changes:
                change()
            return out

        @functools.wraps(op)
        def plain(*args: Any, **kwargs: Any) -> Any:
            release.calls += 1
            kwargs.pop("skip_check", None)
            plain.last = release.calls  # type: ignore[attr-defined]
            return op(*args, **kwargs)

        plain.last = 0  # type: ignore[attr-defined]
        self.plain: Any = plain
        self.op: Any = prepared_launches(plain)

    def execute(self, plan: Plan, a: Any, b: Any, scale: Any, out: Any, workspace: Any) -> None:
        set_stream = sys.modules["cudnn"].set_stream
        from flashinfer.gemm_workspace import state

        current = state.current.device
        set_stream("handle", current.raw_stream(current.current_index()))
        pack = {0: a, 1: b, 8: out} if scale is None else {0: a, 1: b, 5: scale, 8: out}
        watched(plan).execute(pack, workspace, handle="handle")


@contextmanager
def installed() -> Iterator[Release]:
    """A fresh release, with the modules and functions that the runtime asks for."""
    release = Release()
    before = sys.modules.get("cudnn")
    cudnn: Any = SimpleNamespace(set_stream=release.library.bound.__setitem__)
    sys.modules["cudnn"] = cudnn
    try:
        with mock.patch.object(torch.cuda, "current_blas_handle", return_value=HANDLE):
            yield release
    finally:
        # Not mock.patch.dict: that would also forget what was imported meanwhile.
        del sys.modules["cudnn"]
        if before is not None:
            sys.modules["cudnn"] = before


def aligned(*shape: int, dtype: torch.dtype = torch.float32, off: int = 0) -> torch.Tensor:
    """Zeros at an address that is ``off`` bytes off a multiple of 256, as a GPU's are at 0."""
    nbytes = math.prod(shape) * dtype.itemsize
    room = torch.zeros(nbytes + 512, dtype=torch.uint8)
    start = -room.data_ptr() % 256 + off
    return room[start : start + nbytes].view(dtype).view(shape)


def operands(m: int = 4, k: int = 8, n: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """(m, k) and (k, n), the second by columns."""
    return aligned(m, k), aligned(n, k).t()
