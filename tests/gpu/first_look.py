"""A first look at a FlashInfer on a CUDA machine: one case a process, a line a result.

::

    PYTHONPATH=<folder of an installed wheel> python tests/gpu/first_look.py \
        {right|moved|cold|concurrent|host}

Run it over a release and over its graft and compare. Shapes are (batch, m, n, k); those below make
cuBLASLt and cuDNN choose split-K kernels on SM90, which use the workspace.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
import time
from collections.abc import Callable

import cudnn
import torch

import flashinfer

DEVICE = torch.device("cuda:0")
SPLIT_K = [(1, 64, 512, 65536), (1, 128, 256, 32768), (1, 16, 1024, 16384)]
Shape = tuple[int, int, int, int]


def fp8(*shape: int) -> torch.Tensor:
    return (torch.randn(*shape, device=DEVICE) * 0.5).to(torch.float8_e4m3fn)


class Gemm:
    """One ``bmm_fp8`` with operands and an output of its own."""

    def __init__(self, shape: Shape, backend: str) -> None:
        b, m, n, k = shape
        self.a, self.b = fp8(b, m, k), fp8(b, n, k).transpose(-2, -1)
        self.scale = torch.ones(1, device=DEVICE)
        self.out = torch.empty(b, m, n, device=DEVICE, dtype=torch.bfloat16)
        self.backend = backend

    def __call__(self) -> None:
        flashinfer.bmm_fp8(
            self.a, self.b, self.scale, self.scale, torch.bfloat16, self.out, self.backend
        )

    def captured(self, times: int = 1) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(times):
                self()
        return graph


def error(out: torch.Tensor, reference: torch.Tensor) -> float:
    return float((out.float() - reference).norm() / reference.norm())


def right() -> None:
    """Results against float32; the second operand of a line is the relative error."""
    print(importlib.metadata.version("flashinfer-python"), flashinfer.__version__)
    print(torch.__version__, cudnn.backend_version(), torch.cuda.get_device_name())
    for backend in ("cudnn", "cublas"):
        for shape in [(1, 16, 1024, 16384), (1, 512, 5120, 5120), (8, 64, 512, 1024)]:
            gemm = Gemm(shape, backend)
            gemm()
            print(backend, shape, round(error(gemm.out, gemm.a.float() @ gemm.b.float()), 5))
    a = torch.randn(64, 512, device=DEVICE, dtype=torch.bfloat16)
    b = torch.randn(512, 512, device=DEVICE, dtype=torch.bfloat16).t()
    out = flashinfer.mm_bf16(a, b, backend="cudnn")
    print("mm_bf16 cudnn", round(error(out, a.float() @ b.float()), 5))


def moved() -> None:
    """A graph is captured, the first cuDNN call outgrows the workspace, the graph is replayed."""
    for shape in [(1, 16, 1024, 16384), (1, 64, 512, 16384), (1, 128, 256, 32768)]:
        flashinfer.utils._cache_buf.clear()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        gemm = Gemm(shape, "cublas")
        gemm()
        reference = gemm.out.clone()
        graph = gemm.captured()
        Gemm((1, 512, 5120, 5120), "cudnn")()
        torch.cuda.synchronize()
        others = [torch.full((32 << 20,), 7, dtype=torch.uint8, device=DEVICE) for _ in range(8)]
        gemm.out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        overwritten = sum(int((other != 7).sum()) for other in others)
        equal = torch.equal(gemm.out, reference)
        print(shape, "bytes of other tensors overwritten", overwritten, "replay right", equal)


def cold() -> None:
    """The first call of a process is made under capture."""
    gemm = Gemm((1, 16, 4096, 4096), "cudnn")
    try:
        gemm.captured()
        print("captured")
    except Exception as failure:
        print(type(failure).__name__, str(failure)[:400])
    gemm()
    graph = gemm.captured()
    reference = gemm.out.clone()
    gemm.out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    print("usable after, replay right", torch.equal(gemm.out, reference))


def concurrent() -> None:
    """Four graphs with pools of their own, replayed at once 200 times."""
    for backend in ("cublas", "cudnn"):
        for shape in SPLIT_K:
            streams = [torch.cuda.Stream() for _ in range(4)]
            gemms = [Gemm(shape, backend) for _ in streams]
            for gemm in gemms:
                gemm()
            torch.cuda.synchronize()
            references = [gemm.out.clone() for gemm in gemms]
            graphs = [gemm.captured(20) for gemm in gemms]
            wrong = 0
            for _ in range(200):
                for gemm in gemms:
                    gemm.out.zero_()
                torch.cuda.synchronize()
                for stream, graph in zip(streams, graphs, strict=True):
                    with torch.cuda.stream(stream):
                        graph.replay()
                torch.cuda.synchronize()
                pairs = zip(gemms, references, strict=True)
                wrong += sum(not torch.equal(gemm.out, reference) for gemm, reference in pairs)
            print(backend, shape, "wrong", wrong, "of", 200 * len(streams))


def microseconds(call: Callable[[], object]) -> float:
    """Host time of one call: the best of five means of 200."""
    for _ in range(30):
        call()
    means = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(200):
            call()
        means.append((time.perf_counter() - start) / 200)
    return round(min(means) * 1e6, 1)


def host() -> None:
    """Microseconds that one eager call costs on the host."""
    a = torch.randn(16, 512, device=DEVICE, dtype=torch.bfloat16)
    b = torch.randn(512, 512, device=DEVICE, dtype=torch.bfloat16).t()
    out = torch.empty(16, 512, device=DEVICE, dtype=torch.bfloat16)
    for _ in range(2):
        for backend in ("cudnn", "cublas"):
            print("bmm_fp8", backend, microseconds(Gemm((1, 16, 512, 512), backend)))
        print(
            "mm_bf16 cudnn",
            microseconds(lambda: flashinfer.mm_bf16(a, b, out=out, backend="cudnn")),
        )


if __name__ == "__main__":
    {case.__name__: case for case in (right, moved, cold, concurrent, host)}[sys.argv[1]]()
    sys.stdout.flush()
    os._exit(0)  # graphs are alive: their teardown is a case of its own
