"""GEMMs with operands and outputs of their own, for scripts and tests on a GPU."""

from __future__ import annotations

import torch

import flashinfer

DEVICE = torch.device("cuda:0")
Shape = tuple[int, int, int, int]

#: (batch, m, n, k) for which cuBLASLt and cuDNN choose split-K kernels on SM90: those use the
#: workspace.
SPLIT_K: list[Shape] = [(1, 64, 512, 65536), (1, 128, 256, 32768), (1, 16, 1024, 16384)]


class Gemm:
    """One GEMM: ``bmm_fp8`` by default, or ``mm_bf16``."""

    def __init__(self, shape: Shape, backend: str, op: str = "bmm_fp8") -> None:
        b, m, n, k = shape
        self.op, self.backend = op, backend
        if op == "bmm_fp8":
            self.a = self._random(b, m, k).to(torch.float8_e4m3fn)
            self.b = self._random(b, n, k).to(torch.float8_e4m3fn).transpose(-2, -1)
            self.out = torch.empty(b, m, n, device=DEVICE, dtype=torch.bfloat16)
        else:
            self.a = self._random(m, k).to(torch.bfloat16)
            self.b = self._random(n, k).to(torch.bfloat16).t()
            self.out = torch.empty(m, n, device=DEVICE, dtype=torch.bfloat16)
        self.scale = torch.ones(1, device=DEVICE)

    @staticmethod
    def _random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE) * 0.5

    def __call__(self) -> None:
        if self.op == "bmm_fp8":
            flashinfer.bmm_fp8(
                self.a, self.b, self.scale, self.scale, torch.bfloat16, self.out, self.backend
            )
        else:
            flashinfer.mm_bf16(self.a, self.b, out=self.out, backend=self.backend)

    def error(self) -> float:
        """Relative error of ``out`` against float32."""
        reference = self.a.float() @ self.b.float()
        return float((self.out.float() - reference).norm() / reference.norm())

    def eager(self) -> torch.Tensor:
        """Run once; a copy of the result."""
        self()
        torch.cuda.synchronize()
        return self.out.clone()

    def captured(self, times: int = 1, **how: object) -> torch.cuda.CUDAGraph:
        """A graph of ``times`` calls."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, **how):  # type: ignore[arg-type]
            for _ in range(times):
                self()
        return graph


def wrong_replays(
    gemms: list[Gemm],
    graphs: list[torch.cuda.CUDAGraph],
    references: list[torch.Tensor],
    times: int,
) -> int:
    """Replay all graphs at once, each on a stream of its own; count results that differ."""
    streams = [torch.cuda.Stream() for _ in graphs]
    wrong = 0
    for _ in range(times):
        for gemm in gemms:
            gemm.out.zero_()
        torch.cuda.synchronize()
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        pairs = zip(gemms, references, strict=True)
        wrong += sum(not torch.equal(gemm.out, reference) for gemm, reference in pairs)
    return wrong
