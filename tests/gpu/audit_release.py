"""The fork's audit laid beside an unmodified release: does it find the workspace that moved?

::

    PYTHONPATH=<folder of the installed release> python tests/gpu/audit_release.py \
        {cublas|cudnn} <folder "flashinfer" that holds gemm_workspace>

Prints one line of JSON. The release's own modules stay as they are: only the folder in which
``flashinfer.gemm_workspace`` is found is added, and none of the release calls it.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

import flashinfer

if os.path.exists(os.path.join(os.path.dirname(flashinfer.__file__ or ""), "gemm_workspace")):
    sys.exit(f"{flashinfer.__file__} is a graft, wanted a release")
flashinfer.__path__.append(sys.argv[2])

from gemms import DEVICE, SPLIT_K, Gemm  # noqa: E402

from flashinfer.gemm_workspace import audit  # noqa: E402

MIB = 1 << 20


def found(graph: Any, address: int, nbytes: int) -> dict[str, Any]:
    """What the audit says of the workspace, and how much it says against other memory."""
    report = audit.audit(graph)
    inside = [
        finding
        for finding in report.findings
        if finding.address is not None and address <= finding.address < address + nbytes
    ]
    bad = report.of("stale", "suspect")
    return {
        "verdicts": sorted({str(finding.verdict) for finding in inside}),
        "places": [f"{each.kind} {each.where}+{each.offset}" for each in inside],
        "elsewhere": [each.as_dict() for each in bad if each not in inside],
        "not inspected": [each.why for each in report.of("not inspected")],
        "exit status": report.exit_status,
        "text": report.text(),
    }


def cublas() -> dict[str, Any]:
    """A captured split-K ``bmm_fp8``; the first cuDNN call outgrows the release's workspace."""
    gemm = Gemm((1, 16, 1024, 16384), "cublas")
    gemm.eager()
    workspace = flashinfer.utils._cache_buf["bmm_fp8_workspace", DEVICE]
    old = workspace.data_ptr(), workspace.numel()
    unwatched = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(unwatched):
        gemm()
    with audit.watch():
        graph = gemm.captured()
    before = found(graph, *old)
    Gemm((1, 512, 5120, 5120), "cudnn")()
    torch.cuda.synchronize()
    now = flashinfer.utils._cache_buf["bmm_fp8_workspace", DEVICE].data_ptr()
    return {
        "moved": now != old[0],
        "before": before,
        "after": found(graph, *old),
        "after, not watched": found(unwatched, *old),
    }


def cudnn() -> dict[str, Any]:
    """Every cuDNN plan of the split-K shapes; the workspace moves as the release moves it."""
    import flashinfer.gemm.gemm_base as base

    kind = base._torch_data_type_to_cudnn_data_type
    plans = {}
    for shape in SPLIT_K:
        gemm = Gemm(shape, "cudnn")
        a, b, out, scale = gemm.a, gemm.b, gemm.out, gemm.scale
        built = base.build_cudnn_gemm_fp8_graph(
            a_shape=a.shape,
            a_stride=a.stride(),
            b_shape=b.shape,
            b_stride=b.stride(),
            a_type=kind(a.dtype),
            b_type=kind(b.dtype),
            o_type=kind(out.dtype),
            device=DEVICE,
            tactic=0,
        )
        for plan in range(built.get_execution_plan_count()):
            workspace = torch.zeros(64 * MIB, dtype=torch.uint8, device=DEVICE)
            arguments = (built, a, b, scale, scale, out, workspace)

            def run(arguments: Any = arguments, plan: int = plan) -> None:
                base.execute_cudnn_gemm_fp8_graph(*arguments, tactic=plan)

            run()
            torch.cuda.synchronize()
            with audit.watch():
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    run()
            # Whether the plan uses its workspace is told by the bytes, not by the audit.
            workspace.fill_(0xA5)
            graph.replay()
            torch.cuda.synchronize()
            uses = bool((workspace != 0xA5).any())
            old = workspace.data_ptr(), workspace.numel()
            before = found(graph, *old)
            workspace.resize_(workspace.numel() + 256)  # the release's own growth statement
            plans[f"{shape} plan {plan}"] = {
                "uses": uses,
                "moved": workspace.data_ptr() != old[0],
                "before": before,
                "after": found(graph, *old),
            }
            del graph, workspace, arguments, run
    return plans


if __name__ == "__main__":
    print(json.dumps({"cublas": cublas, "cudnn": cudnn}[sys.argv[1]]()))
    sys.stdout.flush()
    os._exit(0)  # graphs that refer to freed memory are alive: nothing of them shall run
