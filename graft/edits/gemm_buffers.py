"""The GEMM ops take their workspace from a lane instead of the process-wide cache."""

from __future__ import annotations

import ast

from ..module import Found, Module, Site
from .base import Edit, in_gemm_or_low_latency

#: First part of the cache key of every workspace that becomes a lane.
LANES = frozenset(
    {
        "mm_bf16_workspace",
        "bmm_bf16_workspace",
        "mm_mxfp8_workspace",
        "bmm_mxfp8_workspace",
        "mm_fp4_workspace",
        "bmm_fp8_workspace",
        "gemm_fp8_nt_groupwise_workspace",
        "mm_bf16_fp4_workspace",
        "grouped_mm_workspace",
        "grouped_mm_mxfp8_workspace",
        "grouped_mm_fp4_workspace",
        "nvfp4_svdquant_gemm_workspace",
        "trllm_low_latency_gemm",
        "mm_bf16_fp4_split_k_partial",
        "mm_bf16_fp4_split_k_partial_dummy",
        "tgv_gemm_sm100_blockscaled_workspace",
        "mm_fp8_low_latency_workspace",
        *(
            f"group_gemm_{kind}_nt_groupwise_{part}_workspace"
            for kind in ("fp8", "mxfp4", "nvfp4")
            for part in ("int", "float")
        ),
    }
)
#: Descriptors that a kernel wrapper writes and reads back: stays in the cache (0.7.1 only).
STAYS = frozenset({"cake_nvfp4_svdquant_tma_workspace"})
#: Modules whose cached buffers carry state between calls: never a lane.
STATEFUL = frozenset({"flashinfer/gemm/cake_quant_lora_gemm.py"})

GETTERS = ("_get_cache_buf", "_get_stream_cache_buf")


def find(module: Module, own_lengths: frozenset[str]) -> Found:
    found = Found()
    if module.path in STATEFUL:
        return found
    for call in module.calls(*GETTERS):
        match call.args, call.keywords:
            case [ast.Constant(value=str(name)), size, _], [] if name in LANES:
                found.sites.append(Site(call.lineno, name))
                found.splices.append(module.replace(call.func, "lane_workspace"))
                found.imports.add("lane_workspace")
                if name in own_lengths:
                    # The length is in the autotuner's key: another one voids tuned cache files.
                    if ast.unparse(size) != "DEFAULT_WORKSPACE_SIZE":
                        found.not_understood.append(Site(call.lineno, ast.unparse(call)))
                    else:
                        found.splices.append(module.replace(size, "32 * 1024 * 1024"))
            case [ast.Constant(value=str(name)), *_], _ if name in STAYS:
                pass
            case _:
                found.not_understood.append(Site(call.lineno, ast.unparse(call)))
    return found


EDIT = Edit(
    name="gemm-buffers",
    summary="GEMM workspaces come from lanes (one per device, stream and capture)",
    hazards=("A2", "A5", "A6", "A7", "A8", "A16", "A17", "A32"),
    upstream="in part flashinfer#3618 (a buffer per stream), in 0.7.4",
    in_scope=in_gemm_or_low_latency,
    marks=tuple(name.encode() for name in GETTERS),
    find=find,
)
