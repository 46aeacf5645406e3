"""A pretended GPU on which the catalogue's cases run, to find what is wrong in *them*.

Over ``pretend``: plans that compute their product on the CPU, graphs that repeat the executions
that were captured, streams and events that order nothing. Nothing about the release is proven by
a verdict seen here. ``python pretend_gpu.py [KEY ...]`` with a release, ``tests/release``
and ``tests/gpu`` on PYTHONPATH; the last line printed is the results, as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pretend
import torch
from pretend import World, pretend_compiler, pretend_cuda, pretend_cudnn

MIB = 1 << 20
WORLD = World(capability=(9, 0), backend_version=91900)
#: Bytes that plan 0 (cuBLASLt's), 1 (split-K) and 2 ask for; -1 is plan 0.
SIZES = (32 * MIB + 256, 4 * MIB, 0)
#: After which a case is given up here: much is slower on the CPU.
SECONDS = 20
RECORDING: list[list[Any]] = []


class Plan(pretend.Plan):
    """Multiplies what it is given."""

    def get_workspace_size(self, *_: object, **__: object) -> int:
        return SIZES[0]

    def get_workspace_size_plan_at_index(self, index: int, *_: object, **__: object) -> int:
        return SIZES[index]

    def get_plan_name_at_index(self, index: int) -> str:
        return f"pretended {index}"

    def execute(self, pack: Any, workspace: torch.Tensor, **_: object) -> None:
        self._multiply(pack, workspace, 0)

    def execute_plan_at_index(
        self, pack: Any, workspace: torch.Tensor, index: int, **_: object
    ) -> None:
        self._multiply(pack, workspace, index)

    def _multiply(self, pack: Any, workspace: torch.Tensor, index: int) -> None:
        import flashinfer.gemm.gemm_base as gemm_base

        uids = gemm_base.UIDs
        if workspace.numel() < SIZES[index]:
            raise RuntimeError(f"workspace of {workspace.numel()} for {SIZES[index]}")
        a, b, out = (pack[uid.value] for uid in (uids.A_UID, uids.B_UID, uids.O_UID))

        def launch() -> None:
            if SIZES[index]:
                workspace[:4096].fill_(index + 1)
            out.copy_((a.float() @ b.float()).reshape(out.shape))

        launch()
        if RECORDING:
            RECORDING[-1].append(launch)


class Graph:
    """Repeats what was launched while it was captured."""

    def __init__(self, *_: object, **__: object) -> None:
        self.launches: list[Any] = []

    def replay(self) -> None:
        for launch in self.launches:
            launch()


@contextlib.contextmanager
def graph(cuda_graph: Graph, **_: object) -> Iterator[None]:
    RECORDING.append(cuda_graph.launches)
    WORLD.capturing = True
    WORLD.capture += 1
    try:
        yield
    finally:
        WORLD.capturing = False
        RECORDING.pop()


class Stream:
    def __init__(self, *_: object, **__: object) -> None:
        self.cuda_stream = 7

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


def pretend_graphs() -> None:
    """The parts of ``torch.cuda`` that cases and soak use, beside what ``pretend`` answers."""
    for name, answer in {
        "CUDAGraph": Graph,
        "graph": graph,
        "Stream": Stream,
        "stream": lambda *_: contextlib.nullcontext(),
        "current_stream": lambda *_: Stream(),
        "graph_pool_handle": lambda: (0, 1),
        "mem_get_info": lambda *_: (1024 * MIB, 2048 * MIB),
        "memory_allocated": lambda *_: 0,
        "memory_reserved": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
        "reset_peak_memory_stats": lambda *_: None,
        "set_device": lambda *_: None,
        "_sleep": lambda *_: None,
        "Event": lambda **_: SimpleNamespace(
            record=lambda *_: None, elapsed_time=lambda _: 1.0, synchronize=lambda: None
        ),
    }.items():
        setattr(torch.cuda, name, answer)
    generator = torch.Generator
    torch.Generator = lambda *_: generator()  # type: ignore[misc, assignment]


def small(call: Any) -> None:
    """Let every GEMM of the catalogue be a small one."""
    made = call.__init__

    def init(self: Any, lane: str, shape: Any, *args: Any, **kwargs: Any) -> None:
        b, m, n, k = shape
        made(self, lane, (b, m, min(n, 64), min(k, 64)), *args, **kwargs)

    call.__init__ = init


def prepare() -> Any:
    """Import everything over the pretended machine; the catalogue's registry."""
    import torch._subclasses.fake_tensor  # noqa: F401  before anything of torch is replaced

    pretend_cudnn(WORLD)
    sys.modules["cudnn"].graph.side_effect = lambda *_: contextlib.nullcontext((Plan(WORLD), None))
    sys.modules["cudnn"].pygraph.side_effect = lambda *_, **__: Plan(WORLD)
    import flashinfer.gemm.gemm_base as gemm_base

    pretend_cuda(WORLD)
    pretend_graphs()
    pretend_compiler(gemm_base)
    from catalogue import ops

    small(ops.Call)
    return ops


def main() -> None:
    line = os.dup(1)
    os.dup2(2, 1)
    torch.set_num_threads(1)
    prepare()

    def give_up(*_: object) -> None:
        raise TimeoutError("slow here")

    signal.signal(signal.SIGALRM, give_up)
    from catalogue import cases  # noqa: F401
    from catalogue.case import REGISTRY, Absent

    runtime = pretend.runtime()
    results: dict[str, Any] = {}
    for key in sys.argv[1:] or REGISTRY:
        case = REGISTRY[key]
        machine: Any = contextlib.nullcontext()
        if runtime is not None:
            machine = runtime.use_device(pretend.PretendDevice(WORLD))
        signal.alarm(SECONDS)
        try:
            with machine:
                seen = case.run(case.lane)
            results[key] = ["pass" if seen.passed else "fail", seen.note, seen.figures]
        except Absent as error:
            results[key] = ["absent", str(error), {}]
        except Exception as error:
            traceback.print_exc()
            results[key] = ["error", f"{type(error).__name__}: {error}", {}]
        signal.alarm(0)
        sys.stderr.write(f"{key}: {results[key]}\n")
        sys.stderr.flush()
    os.write(line, (json.dumps(results, default=str) + "\n").encode())


if __name__ == "__main__":
    main()
