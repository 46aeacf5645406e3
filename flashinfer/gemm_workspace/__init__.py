"""Runtime of the fork: GEMM workspaces that never move, and cuDNN calls that are safe to capture.

Laid over a FlashInfer release, whose edited modules call the names below. It imports no other
flashinfer module and no third-party one but torch, and importing it makes no CUDA call.

Data flows one way: ``driver``, ``torch_internals``, ``captures`` <- ``device`` (the machine) <-
``arena``, ``storage`` (memory) <- ``state`` (what is known) <- ``growth``, ``holds``, ``lanes``,
``cache``, ``plans``, ``execution``, ``gate`` (the policy) <- ``control`` (operators).
Beside it, for calls of a known signature: ``notes``, ``signature``, ``tuning``, ``frontend`` <-
``launches`` <- ``prepared``; these are imported when the first of their names is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import captures, holds
from .cache import cache_buffer
from .control import reserve, seal, stats
from .errors import (
    CudnnCaptureUnsafeError,
    CudnnPlanBuildInCaptureError,
    CudnnWorkspaceTooSmallInCaptureError,
    GemmWorkspaceError,
)
from .execution import _retain_cudnn_graph_if_capturing, device_locked
from .gate import gate_sm12x_cudnn
from .holds import collect
from .lanes import _gemm_workspace_at_least, lane_workspace, reserve_lane
from .names import LANE_BYTES, is_lane
from .plans import (
    _check_cudnn_plan_build_not_capturing,
    create_cudnn_handle,
    guard_plan_build,
)
from .state import use_device

if TYPE_CHECKING:
    from .notes import noted_runner, watched
    from .prepared import prepared_launches

__all__ = [
    "LANE_BYTES",
    "CudnnCaptureUnsafeError",
    "CudnnPlanBuildInCaptureError",
    "CudnnWorkspaceTooSmallInCaptureError",
    "GemmWorkspaceError",
    "_check_cudnn_plan_build_not_capturing",
    "_gemm_workspace_at_least",
    "_retain_cudnn_graph_if_capturing",
    "cache_buffer",
    "collect",
    "create_cudnn_handle",
    "device_locked",
    "gate_sm12x_cudnn",
    "guard_plan_build",
    "is_lane",
    "lane_workspace",
    "noted_runner",
    "prepared_launches",
    "reserve",
    "reserve_lane",
    "seal",
    "stats",
    "use_device",
    "watched",
]

_LATER = {"noted_runner": "notes", "prepared_launches": "prepared", "watched": "notes"}


def __getattr__(name: str) -> Any:
    module = _LATER.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{module}", __name__), name)


captures.before_begin = holds.before_capture
for _graph_class in captures.graph_classes():
    captures.install(_graph_class)
