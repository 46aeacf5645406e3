"""The gate for ``bmm_fp8``: no cuDNN on SM12x before the release that fixed its kernels."""

from __future__ import annotations

import sys

import torch

from . import state as _state
from .device import CPU
from .state import log

# Backend version 9.23.1.
WANTED = 92301


def gate_sm12x_cudnn(runner_names: list[str], tensor: torch.Tensor) -> list[str]:
    """``runner_names`` without ``"cudnn"`` where that runner faults on ``tensor``'s device.

    The same object when nothing changes; cuDNN stays when it is the only runner.
    """
    if "cudnn" not in runner_names:
        return runner_names
    state = _state.current
    index = state.device.index_of(tensor.device)
    if index is None or index == CPU or state.capability(index)[0] != 12:
        return runner_names
    version = _cudnn_version()
    others = [name for name in runner_names if name != "cudnn"]
    if version >= WANTED or not others:
        return runner_names
    if state.first_time("gate"):
        log.warning(
            "Skipping cuDNN in bmm_fp8 auto candidates on SM12x: cuDNN backend version %s, "
            "wanted %d (9.23.1) or later; update cuDNN to have it tried.",
            version or "unknown",
            WANTED,
        )
    return others


def _cudnn_version() -> int:
    """Version of the backend that is loaded, 0 when that cannot be told."""
    try:
        return int(sys.modules["cudnn"].backend_version())
    except (KeyError, AttributeError, ImportError, OSError, RuntimeError, TypeError, ValueError):
        # Absent, half imported, or a front end without its library: too old either way.
        return 0
