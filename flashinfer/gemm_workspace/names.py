"""Names of the lanes and the sizes that they start from."""

from __future__ import annotations

# cuDNN's cuBLASLt engine asks for 32 MiB + 256 B for every shape on SM90 and later: a lane that
# starts here meets it without ever growing. Bytes.
LANE_BYTES = 40 * 1024 * 1024

# Used by kernels of the release alone, which say what they need: these start with what is asked.
MADE_TO_MEASURE = frozenset(
    {
        "mm_bf16_fp4_split_k_partial",
        "mm_bf16_fp4_split_k_partial_dummy",
        "trllm_low_latency_gemm",
    }
)

# The lane of a caller's own tensor that turned out too short: no op's name is known for it.
GENERIC_LANE = "gemm_workspace"

LANE_NAMES = frozenset(
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
    }
    # One name a part: the int and the float part are in use at once and must not overlap.
    | {
        f"group_gemm_{kind}_nt_groupwise_{part}_workspace"
        for kind in ("fp8", "mxfp4", "nvfp4")
        for part in ("int", "float")
    }
)


def is_lane(name: str) -> bool:
    """Whether ``name`` is a GEMM workspace, served by a lane and not by the release's cache."""
    return name in LANE_NAMES


# What ops share where they share (see settings.SHARED_ON).
SHARED_PART = GENERIC_LANE

# In use together with another workspace of the same launch, so never in the shared arena.
APART = {
    **{
        f"group_gemm_{kind}_nt_groupwise_int_workspace": "group_gemm_int_workspace"
        for kind in ("fp8", "mxfp4", "nvfp4")
    },
    "mm_bf16_fp4_split_k_partial": "mm_bf16_fp4_split_k_partial",
    "mm_bf16_fp4_split_k_partial_dummy": "mm_bf16_fp4_split_k_partial_dummy",
}
_PARTS = frozenset(APART.values())


def shared_part(name: str) -> str:
    """The part that ``name`` uses where ops share; a part uses itself."""
    return APART.get(name) or (name if name in _PARTS else SHARED_PART)
