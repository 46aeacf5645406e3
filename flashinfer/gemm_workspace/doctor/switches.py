"""Environment variables that the doctor looks at."""

from __future__ import annotations

from collections.abc import Mapping

#: Variables of the fork with the values they may have.
SWITCHES: Mapping[str, tuple[str, ...]] = {
    "FLASHINFER_ALLOW_CUDNN_PLAN_BUILD_IN_CAPTURE": ("0", "1"),
    "FLASHINFER_GEMM_WORKSPACE_SHARE": ("0", "1"),
    "FLASHINFER_GEMM_WORKSPACE_SINGLE_CAPTURE_LANE": ("0", "1"),
    "FLASHINFER_GEMM_WORKSPACE_SEAL_POLICY": ("error", "warn"),
    "FLASHINFER_GEMM_WORKSPACE_LOG": ("0", "1"),
    "FLASHINFER_GEMM_WORKSPACE_ZERO": ("0", "1"),
    "FLASHINFER_GEMM_WORKSPACE_PREPARED": ("0", "1"),
    "FLASHINFER_GEMM_WORKSPACE_NATIVE": ("0", "1"),
}
OTHERS = (
    "FLASHINFER_DISABLE_VERSION_CHECK",
    "FLASHINFER_CUBIN_DIR",
    "FLASHINFER_WORKSPACE_BASE",
    "FLASHINFER_DISABLE_JIT",
    "FLASHINFER_AUTOTUNE_CACHE_DIR",
    "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR",
    "VLLM_CACHE_ROOT",
    "VLLM_DISABLED_KERNELS",
    "SGLANG_CACHE_DIR",
    "CUDA_VISIBLE_DEVICES",
)


def of(environment: Mapping[str, str]) -> dict[str, str]:
    """Those of ``environment`` that are looked at."""
    return {name: environment[name] for name in (*SWITCHES, *OTHERS) if name in environment}
