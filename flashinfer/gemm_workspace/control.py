"""For operators: make room ahead, and see what there is."""

from __future__ import annotations

from typing import Any

import torch

from . import state as _state
from .growth import device_name
from .lanes import grow_lane, lane_key, raise_floor


def reserve(nbytes: int, device: torch.device | str | None = None) -> None:
    """Grow the current stream's lanes to ``nbytes``, and start later ones of the device there.

    ``device`` is the current one unless given. Raises :class:`GemmWorkspaceError`, under capture
    :class:`CudnnWorkspaceTooSmallInCaptureError`; later lanes are then as before.
    """
    state = _state.current
    index: int | None = state.device.current_index()
    if device is not None:
        index = state.device.index_of(torch.device(device))
    if index is None:
        raise ValueError(f"device {device} has no lanes, wanted a CUDA device or the CPU")
    key = lane_key(state.device, index)
    with state.lock:
        for lane in list(state.lanes.values()):
            if lane.key == key and lane.storage.nbytes < nbytes:
                grow_lane(state, lane, nbytes)
        raise_floor(state, None, index, nbytes)


def stats() -> dict[str, Any]:
    """What the runtime holds. All sizes in bytes."""
    state = _state.current
    with state.lock:
        lanes = [
            {
                "name": lane.name,
                "device": device_name(lane.index),
                "key": lane.key,
                "bytes": lane.storage.nbytes,
                "kept_bytes": lane.storage.kept_bytes,
            }
            for lane in state.lanes.values()
        ]
        buffers = [
            {
                "name": name,
                "device": device_name(index),
                "bytes": storage.nbytes,
                "kept_bytes": storage.kept_bytes,
            }
            for (name, index), storage in state.buffers.items()
        ]
        kept = [*(lane.storage for lane in state.lanes.values()), *state.buffers.values()]
        return {
            "lanes": lanes,
            "buffers": buffers,
            "kept_bytes": sum(storage.kept_bytes for storage in kept),
            "growths": list(state.growths),
            "plans_held": len(state.held_plans),
            "builds_refused": state.builds_refused,
        }
