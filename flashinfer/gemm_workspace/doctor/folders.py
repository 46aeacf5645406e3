"""Where engines keep the autotuner's cache files.

vLLM (vllm#42537): ``VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR``, else ``flashinfer_autotune_cache`` below
``VLLM_CACHE_ROOT``, which is ``vllm`` below ``XDG_CACHE_HOME`` or ``~/.cache``. SGLang
(sglang#24156): ``flashinfer/autotune`` below ``SGLANG_CACHE_DIR``, by default ``~/.cache/sglang``.
FlashInfer's own ``autotune_v2`` (0.7.0 on): ``FLASHINFER_AUTOTUNE_CACHE_DIR``, else
``.cache/flashinfer/autotune`` below ``FLASHINFER_WORKSPACE_BASE`` or the home folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .facts import Missing
from .machine import home


def cache_folders(environment: Mapping[str, str]) -> list[Path]:
    """The folders that exist, of each engine."""
    found = home(environment)
    user = None if isinstance(found, Missing) else found

    def named(variable: str) -> Path | None:
        value = environment.get(variable)
        if not value:
            return None
        return user / value[2:] if user and value.startswith("~/") else Path(value)

    caches = named("XDG_CACHE_HOME") or _below(user, ".cache")
    vllm = named("VLLM_CACHE_ROOT") or _below(caches, "vllm")
    sglang = named("SGLANG_CACHE_DIR") or _below(user, ".cache", "sglang")
    base = named("FLASHINFER_WORKSPACE_BASE") or user
    candidates = (
        named("VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR") or _below(vllm, "flashinfer_autotune_cache"),
        _below(sglang, "flashinfer", "autotune"),
        named("FLASHINFER_AUTOTUNE_CACHE_DIR") or _below(base, ".cache", "flashinfer", "autotune"),
    )
    return [folder for folder in dict.fromkeys(candidates) if folder and _is_folder(folder)]


def _below(folder: Path | None, *parts: str) -> Path | None:
    return None if folder is None else folder.joinpath(*parts)


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False
