"""What an audit and a watch cost, in one process, with and without each other.

On a CUDA machine, with the runtime (and, for its own GEMMs, an installed graft) importable::

    python benchmarks/audit_cost.py [OUT.json]

Prints JSON, times in milliseconds, memory in bytes. By kind of graph, each of about 1,000 nodes:
``audit`` of a graph that was not watched (first call, then the median and the worst of 15),
``audit, watched``, and ``audit, watched, history`` with 10,000 recorded events; ``nodes`` and
``addresses`` say how much was read. ``capture`` is a capture of one kernel (median of 101), plain
and watched. Both again with 20,000 more blocks in the allocator. ``kept`` is what 60 kept raw
graphs of 1,000 nodes add to the process and to the device, beside 60 that torch drops.
``allocation`` is one ``torch.empty`` and its free, plain and recorded.
"""

from __future__ import annotations

import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flashinfer.gemm_workspace import audit

NODES = 1000
BLOCKS = 20_000
EVENTS = 10_000


def milliseconds(call: Callable[[], object], times: int = 15) -> dict[str, float]:
    """The first call, then the median and the worst of ``times``."""
    spent = []
    for _ in range(times + 1):
        start = time.perf_counter()
        call()
        spent.append((time.perf_counter() - start) * 1e3)
    first, *rest = spent
    return {
        "first": round(first, 3),
        "median": round(statistics.median(rest), 3),
        "worst": round(max(rest), 3),
    }


def kinds() -> dict[str, tuple[Callable[[], object], int]]:
    """What is captured -> the call, and how often."""
    small = torch.zeros(4096, device="cuda")
    square = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(square)
    found: dict[str, tuple[Callable[[], object], int]] = {
        "add_": (lambda: small.add_(1), NODES),
        "mm": (lambda: torch.mm(square, square, out=out), NODES),
    }
    try:
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "gpu"))
        from gemms import Gemm

        for backend in ("cublas", "cudnn"):
            gemm = Gemm((1, 16, 1024, 16384), backend)
            gemm.eager()
            # Two or three nodes a call.
            found[f"bmm_fp8 {backend} split-K"] = (gemm, NODES // 2)
    except (ImportError, AttributeError) as missing:
        print(f"no FlashInfer GEMMs: {missing}", file=sys.stderr)
    return found


def captured(call: Callable[[], object], times: int, keep: bool) -> torch.cuda.CUDAGraph:
    """A graph of ``times`` calls."""
    graph = torch.cuda.CUDAGraph(keep_graph=keep)
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()
    return graph


def audits() -> dict[str, Any]:
    """The cost of an audit by kind of graph."""
    results: dict[str, Any] = {}
    for kind, (call, times) in kinds().items():
        call()
        torch.cuda.synchronize()
        plain = captured(call, times, keep=True)
        with audit.watch():
            watched = captured(call, times, keep=False)
        report = audit.audit(watched)
        row: dict[str, Any] = {
            "nodes": report.nodes,
            "addresses": sum(each.address is not None for each in report.findings),
            "verdicts": report.counts,
            "audit": milliseconds(lambda graph=plain: audit.audit(graph)),
            "audit, watched": milliseconds(lambda graph=watched: audit.audit(graph)),
            "text": milliseconds(lambda report=report: report.text(everything=True)),
        }
        with audit.watch(history=EVENTS):
            recorded = captured(call, times, keep=False)
            for _ in range(EVENTS // 2):
                torch.empty(512, device="cuda")
            row["audit, watched, history"] = milliseconds(lambda graph=recorded: audit.audit(graph))
        results[kind] = row
        del plain, watched, recorded
    return results


def captures() -> dict[str, Any]:
    """The cost of a capture of one kernel, plain and watched."""
    tensor = torch.zeros(8, device="cuda")

    def one() -> None:
        captured(lambda: tensor.add_(1), 1, keep=False)

    results: dict[str, Any] = {"plain": milliseconds(one, 101)}
    with audit.watch():
        results["watched"] = milliseconds(one, 101)
    results["plain again"] = milliseconds(one, 101)
    return results


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS")) * 1024


def kept() -> dict[str, Any]:
    """What 60 graphs of 1,000 nodes take, dropped by torch and kept."""
    tensor = torch.zeros(8, device="cuda")
    results: dict[str, Any] = {}
    for name, watched in (("dropped, warm-up", False), ("dropped", False), ("kept", True)):
        gc.collect()
        torch.cuda.synchronize()
        host, device = resident(), torch.cuda.mem_get_info()[0]
        if watched:
            audit.watch()
        graphs = [captured(lambda: tensor.add_(1), NODES, keep=False) for _ in range(60)]
        audit.watch().stop()
        torch.cuda.synchronize()
        results[name] = {
            "host": resident() - host,
            "device": device - torch.cuda.mem_get_info()[0],
        }
        del graphs
    return results


def allocation() -> dict[str, float]:
    """Microseconds of one allocation and its free."""

    def one() -> float:
        start = time.perf_counter()
        for _ in range(20_000):
            torch.empty(512, device="cuda")
        return (time.perf_counter() - start) / 20_000 * 1e6

    one()
    plain = min(one() for _ in range(5))
    with audit.watch(history=EVENTS):
        recorded = min(one() for _ in range(5))
    return {"plain, us": round(plain, 3), "recorded, us": round(recorded, 3)}


def main() -> int:
    """Measure and print."""
    if not torch.cuda.is_available():
        print("needs a CUDA device", file=sys.stderr)
        return 2
    report: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "audits": audits(),
        "captures": captures(),
        "kept": kept(),
        "allocation": allocation(),
    }
    blocks = [torch.empty(600, dtype=torch.uint8, device="cuda") for _ in range(BLOCKS)]
    report[f"with {len(blocks)} more blocks"] = {"audits": audits(), "captures": captures()}
    text = json.dumps(report, indent=1)
    print(text)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
