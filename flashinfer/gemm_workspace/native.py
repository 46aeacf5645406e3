"""The native launch: loads its shared library, and makes launchers of what a call resolved.

The library is optional: a wheel may lack it, and what it needs may differ from what is loaded. It
is looked for at the first use, and where it cannot serve one line in the log says why; the Python
path serves then. It speaks the C ABI of tvm-ffi, which FlashInfer depends on, so that one binary
serves every Python.

A launcher repeats one launch for other addresses: a matmul of cuBLASLt with a settled algorithm,
or a cuDNN plan that was rebuilt, with the engine and the knobs of the one that ran. Rebuilding
takes as long as building took and costs its memory once more, so callers ask for it only for
signatures that come often; never under capture.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import state as _state
from .errors import DriverError, DriverUnavailable
from .state import State, log

# What the library exports is counted; this is the count that is known here.
ABI = 1

FILE = "_native.so"

# Memory of the device that rebuilt plans may take in all, as the driver's free memory shows it
# before and after each. Bytes.
PLAN_BYTES = 256 << 20

# Launchers at a time. One of cuBLASLt is some hundred bytes of the host's memory.
LAUNCHERS = 4096

_ALGORITHM_BYTES = 64  # of cublasLtMatmulAlgo_t


class NativeRefused(Exception):
    """Why there is no launcher for this launch; another may still have one."""


class Library:
    """The loaded library, and what it is attached to."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.launch: Callable[..., None] = module.launch
        self.call: Callable[..., Any] = module.call
        self.remember: Callable[..., None] = module.remember
        self.use_workspace: Callable[..., None] = module.use_workspace
        self.prepare_cublaslt: Callable[..., int] = module.prepare_cublaslt
        self.prepare_cudnn: Callable[..., int] = module.prepare_cudnn
        self.workspace_bytes: Callable[[int], int] = module.workspace_bytes
        self.forget: Callable[[int], bool] = module.forget
        self.unlearn: Callable[[int], bool] = module.unlearn
        self.counts: Callable[[], Any] = module.counts
        self.has_cublaslt = self.has_cudnn = False

    def timed(self, times: int, *launch: int) -> list[int]:
        """Nanoseconds of each of so many launches, made one after the other as ``launch`` would;
        for benchmarks."""
        return [int(took) for took in self._module.timed(times, *launch)]

    def algorithm(self, number: int) -> bytes:
        """cuBLASLt's algorithm of a launcher: 64 bytes."""
        return bytes(self._module.algorithm(number))

    def uids(self, number: int) -> tuple[int, ...]:
        """Of the operands of a cuDNN launcher, in their order."""
        return tuple(int(uid) for uid in self._module.uids(number))

    def attach(self) -> None:
        """Find the vendor libraries that torch has loaded. Raises RuntimeError, or says in the
        log which of the two kinds of launch there is not."""
        major = _cuda_major()
        self._module.attach(major)
        self.has_cublaslt = _attached("cuBLASLt", lambda: self._module.attach_cublaslt(major))
        self.has_cudnn = _attached("cuDNN", self._module.attach_cudnn)


class Launcher:
    """A launch that ``library().launch`` makes by number. It is forgotten some time after this
    object is gone. ``workspace_bytes``: what a launch needs; ``plan_bytes``: what the plan takes
    of the device's memory, 0 for none."""

    __slots__ = ("_gone", "number", "plan_bytes", "workspace_bytes")

    def __init__(
        self, number: int, workspace_bytes: int, plan_bytes: int, gone: deque[tuple[int, int]]
    ) -> None:
        self.number, self.workspace_bytes = number, workspace_bytes
        self.plan_bytes, self._gone = plan_bytes, gone

    def __del__(self) -> None:
        # Not forgotten here: a plan's end unloads code, and this may run in anybody's capture.
        self._gone.append((self.number, self.plan_bytes))


class Matmul(NamedTuple):
    """A matmul of cuBLASLt. ``operands``: for each address that the launcher takes, the place of
    its tensor among the arguments of the release's function."""

    launcher: Launcher
    operands: tuple[int, ...]


class Plan(NamedTuple):
    """A cuDNN plan. ``uids``: of the addresses that the launcher takes."""

    launcher: Launcher
    uids: tuple[int, ...]


class _Process:
    """What the process has of it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.looked = False
        self.library: Library | None = None
        # Numbers and bytes of launchers whose object is gone.
        self.gone: deque[tuple[int, int]] = deque()
        self.made = 0
        self.plan_bytes = 0


_process = _Process()


def library() -> Library | None:
    """The library, loaded at the first call; ``None``, with one line in the log, if it cannot be
    used, and without one if this wheel has none or it was switched off."""
    process = _process
    if not process.looked:
        with process.lock:
            if not process.looked:
                process.library = _load()
                process.looked = True
    return process.library


def report() -> dict[str, Any]:
    """As plain data: ``loaded``; ``cublaslt``, ``cudnn``: whether launches of it can be native;
    ``launchers``, ``signatures``: now; ``launches``: by signature, so far; ``plan_bytes``: of the
    device, taken by plans that were rebuilt."""
    found = _process.library
    counts = (0, 0, 0) if found is None else tuple(int(count) for count in found.counts())
    return {
        "loaded": found is not None,
        "cublaslt": found is not None and found.has_cublaslt,
        "cudnn": found is not None and found.has_cudnn,
        **dict(zip(("launchers", "signatures", "launches"), counts, strict=True)),
        "plan_bytes": _process.plan_bytes,
    }


# The functions of the release that cublaslt() knows, and how many arguments they take there.
CUBLASLT = {"bmm_fp8": 7, "bmm_fp8_run_with_algo": 9, "mm_bf16_cublaslt_run_with_algo": 7}


def cublaslt(name: str, arguments: tuple[Any, ...]) -> Matmul:
    """The launch that the release's compiled function ``name`` made with these arguments.

    ``name`` is ``bmm_fp8``, ``bmm_fp8_run_with_algo`` or ``mm_bf16_cublaslt_run_with_algo``, the
    arguments are those that it took: ``(a, b, out, scale_a, scale_b, workspace, handle)`` and for
    the second ``(algorithms, index)``; the third has no scales and its ``b`` is ``(n, k)``.
    The algorithm is the one at ``index``, or the one that the first asks the heuristic for at each
    call. Raises :class:`NativeRefused`.
    """
    found = _usable("cuBLASLt")
    if name not in CUBLASLT:
        raise NativeRefused(f"{name} is not known here")
    scaled = name.startswith("bmm_fp8")
    if len(arguments) != CUBLASLT[name]:
        # 0.7.x has other ones: no handle, or a bias.
        raise NativeRefused(f"{name} of {len(arguments)} arguments, wanted {CUBLASLT[name]}")
    a, b, out, *scales, workspace, handle = arguments[: 7 if scaled else 5]
    chosen = arguments[7 if scaled else 5 :]
    algorithm = b""
    if chosen:
        algorithms, index = chosen
        at = _ALGORITHM_BYTES * int(index)
        algorithm = algorithms.numpy()[at : at + _ALGORITHM_BYTES].tobytes()
        if len(algorithm) != _ALGORITHM_BYTES:
            raise NativeRefused(f"no algorithm at {index}")
    batch, m, k = a.shape if scaled else (1, *a.shape)
    n = b.shape[-1] if scaled else b.shape[0]
    # Row-major out = a b is column-major out' = b' a', so b comes first.
    operands = (1, 0, 2, 4, 3) if scaled else (1, 0, 2)
    nbytes = workspace.numel() * workspace.element_size()
    try:
        number = found.prepare_cublaslt(
            handle,
            *(b.dtype, a.dtype, out.dtype),
            *(batch, n, m, k),
            *((scales[1].data_ptr(), scales[0].data_ptr()) if scales else (0, 0)),
            nbytes,
            algorithm,
        )
    except RuntimeError as error:
        raise NativeRefused(_line(error)) from None
    return Matmul(_launcher(found, number, 0), operands)


def cudnn(state: State, index: int, graph: Any, plan_index: int | None, handle: Any) -> Plan:
    """The plan that ``graph`` executes: the selected one, or the one at ``plan_index``, rebuilt
    for the same ``handle`` (cudnn-frontend's). ``index`` is that of the device.

    Outside any capture of this thread; holds the device's lock. Launches use the stream that the
    handle has, so they too need that lock, and :func:`cudnn.set_stream` before each. Raises
    :class:`NativeRefused`, also when all that rebuilt plans take would pass :data:`PLAN_BYTES`.
    """
    found = _usable("cuDNN")
    device = state.device
    if device.is_capturing(index):
        raise NativeRefused("the current stream captures")
    if _process.plan_bytes >= PLAN_BYTES:
        raise NativeRefused(f"rebuilt plans take {_process.plan_bytes} bytes already")
    with state.device_lock(index), device.device_guard(index), device.relaxed():
        before = _free(state, index)
        try:
            serialized, name = _serialized(graph, plan_index)
            number = found.prepare_cudnn(
                getattr(handle, "backend_handle", handle), serialized, name
            )
        except NativeRefused:
            raise
        except Exception as error:
            # Of parts of the frontend that are not public: the Python path is always right.
            raise NativeRefused(_line(error)) from None
        after = _free(state, index)
    # Other threads allocate meanwhile: an estimate, never less than nothing.
    taken = max(before - after, 0) if before is not None and after is not None else 0
    return Plan(_launcher(found, number, taken), found.uids(number))


def collect(state: State | None = None) -> None:
    """Forget the launchers whose objects are gone, unless a capture is known to run."""
    process = _process
    if not process.gone or process.library is None:
        return
    state = state or _state.current
    if state.device.captures_running() > 0:
        return
    with state.device.relaxed():
        while process.gone:
            try:
                number, plan_bytes = process.gone.popleft()
            except IndexError:  # another thread was quicker
                return
            process.library.forget(number)
            with process.lock:
                process.made -= 1
                process.plan_bytes -= plan_bytes


def _usable(what: str) -> Library:
    found = library()
    if found is None or not (found.has_cudnn if what == "cuDNN" else found.has_cublaslt):
        raise NativeRefused(f"no native launches of {what}")
    collect()
    if _process.made >= LAUNCHERS:
        raise NativeRefused(f"there are {LAUNCHERS} launchers")
    return found


def _launcher(found: Library, number: int, plan_bytes: int) -> Launcher:
    with _process.lock:
        _process.made += 1
        _process.plan_bytes += plan_bytes
    return Launcher(number, found.workspace_bytes(number), plan_bytes, _process.gone)


def _load() -> Library | None:
    path = Path(__file__).parent / FILE
    if not _state.current.settings.native or not path.exists():
        return None
    try:
        module = importlib.import_module("tvm_ffi").load_module(str(path))
        abi = int(module.abi())
        if abi != ABI:
            raise RuntimeError(f"{FILE} has ABI {abi}, wanted {ABI}")
        made = Library(module)
        made.attach()
    except Exception as error:
        # Whatever it is: a library that cannot be loaded must not break an import or a call.
        log.warning("No native launches, Python's serve: %s.", _line(error))
        return None
    return made if made.has_cublaslt or made.has_cudnn else None


def _attached(what: str, attach: Callable[[], object]) -> bool:
    try:
        attach()
    except RuntimeError as error:
        log.warning("No native launches of %s, Python's serve: %s.", what, _line(error))
        return False
    return True


def _cuda_major() -> int:
    version = torch.version.cuda
    if version is None:
        raise RuntimeError("torch is built without CUDA")
    return int(version.split(".")[0])


def _serialized(graph: Any, plan_index: int | None) -> tuple[bytes, str]:
    """The plan as cudnn-frontend writes it, and its name.

    Frontend 1.32 is the one that was read: a graph there serializes the plan that its C++ side
    has selected, and selecting one that is built is an assignment.
    """
    lowered = graph._lowered_graph
    place = graph._plan_index if plan_index is None else plan_index
    chosen, selected = (graph._plans[i].cpp_index for i in (place, graph._plan_index))
    if graph._engine_for(graph._plans[place]) is not None or chosen is None or selected is None:
        raise NativeRefused("a plan that cuDNN has not")
    lowered.build_plan_at_index(chosen)
    try:
        return bytes(lowered.serialize(as_bytes=True)), lowered.get_plan_name_at_index(chosen)
    finally:
        lowered.build_plan_at_index(selected)


def _free(state: State, index: int) -> int | None:
    try:
        return state.device.free_bytes(index)
    except (DriverError, DriverUnavailable):
        return None


def _line(error: BaseException) -> str:
    """The first line of what went wrong, without the full stop."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).rstrip(".")


_abandoned: list[_Process] = []


def _forget_after_fork() -> None:
    global _process
    # Kept, not dropped: the launchers are of a driver that a forked child cannot use, and the
    # library has no other process to start afresh in.
    _abandoned.append(_process)
    _process = _Process()
    _process.looked = True


os.register_at_fork(after_in_child=_forget_after_fork)
