"""A first look at a FlashInfer on a CUDA machine: one case a process, a line a result.

::

    PYTHONPATH=<folder of an installed wheel> python tests/gpu/first_look.py \
        {right|moved|cold|concurrent|host}

Run it over a release and over its graft and compare. Shapes are (batch, m, n, k).
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
import time
from collections.abc import Callable

import cudnn
import torch
from gemms import DEVICE, SPLIT_K, Gemm, wrong_replays

import flashinfer


def right() -> None:
    """Results against float32; the second operand of a line is the relative error."""
    print(importlib.metadata.version("flashinfer-python"), flashinfer.__version__)
    print(torch.__version__, cudnn.backend_version(), torch.cuda.get_device_name())
    for backend in ("cudnn", "cublas"):
        for shape in [(1, 16, 1024, 16384), (1, 512, 5120, 5120), (8, 64, 512, 1024)]:
            gemm = Gemm(shape, backend)
            gemm()
            print(backend, shape, round(gemm.error(), 5))
    gemm = Gemm((1, 64, 512, 512), "cudnn", "mm_bf16")
    gemm()
    print("mm_bf16 cudnn", round(gemm.error(), 5))


def moved() -> None:
    """A graph is captured, the first cuDNN call outgrows the workspace, the graph is replayed."""
    for shape in [(1, 16, 1024, 16384), (1, 64, 512, 16384), (1, 128, 256, 32768)]:
        flashinfer.utils._cache_buf.clear()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        gemm = Gemm(shape, "cublas")
        reference = gemm.eager()
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
            gemms = [Gemm(shape, backend) for _ in range(4)]
            references = [gemm.eager() for gemm in gemms]
            graphs = [gemm.captured(20) for gemm in gemms]
            wrong = wrong_replays(gemms, graphs, references, 200)
            print(backend, shape, "wrong", wrong, "of", 200 * len(gemms))


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
    calls = [
        Gemm((1, 16, 512, 512), "cudnn"),
        Gemm((1, 16, 512, 512), "cublas"),
        Gemm((1, 16, 512, 512), "cudnn", "mm_bf16"),
    ]
    for _ in range(2):
        for call in calls:
            print(call.op, call.backend, microseconds(call))


if __name__ == "__main__":
    {case.__name__: case for case in (right, moved, cold, concurrent, host)}[sys.argv[1]]()
    sys.stdout.flush()
    os._exit(0)  # graphs are alive: their teardown is a case of its own
