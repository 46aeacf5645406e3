"""Lanes: which workspace a call gets.

Two launches that may run at once never share a workspace, so a lane belongs to one stream, and
under capture to one stream of one capture. What an address was handed out for stays valid: a
growing lane keeps its old block, and views that were cut from it.
"""

from __future__ import annotations

import torch

from . import state as _state
from . import torch_internals
from .device import CPU, Device
from .errors import CudnnWorkspaceTooSmallInCaptureError, DriverUnavailable
from .growth import device_name, grow
from .names import GENERIC_LANE, LANE_BYTES
from .state import Lane, LaneKey, State

# Views kept per lane. A view costs host memory only; an op asks for one or two lengths.
VIEWS = 64


def lane_key(device: Device, index: int) -> LaneKey:
    """Key of the lane that the current call on device ``index`` uses."""
    if index == CPU:
        return ("cpu",)
    stream = device.raw_stream(index)
    if not device.is_capturing(index):
        return (index, stream)
    try:
        return (index, device.capture_id(index, stream), stream)
    except DriverUnavailable as error:
        raise CudnnWorkspaceTooSmallInCaptureError(
            f"no workspace for the capture on {device_name(index)}: which capture it is cannot be "
            f"told, since the CUDA driver API cannot be reached ({error}). Install cuda-python 12 "
            "or later (pip install cuda-bindings), or run this call outside the capture."
        ) from error


def lane_workspace(name: str, nbytes: int, device: torch.device | str) -> torch.Tensor:
    """The workspace ``name`` of the current stream and capture: ``max(nbytes, 1)`` bytes, uint8.

    The length depends on the request alone, never on history. A request seen before on this lane
    returns the same tensor. Raises :class:`GemmWorkspaceError`, under capture
    :class:`CudnnWorkspaceTooSmallInCaptureError`, when memory is really gone.
    """
    if not isinstance(device, torch.device):
        device = torch.device(device)
    if torch_internals.tracing():
        return torch.empty(max(nbytes, 1), dtype=torch.uint8, device=device)
    state = _state.current
    index = state.device.index_of(device)
    if index is None:
        return torch.empty(max(nbytes, 1), dtype=torch.uint8, device=device)
    return _view(state, name, nbytes, index)


def _gemm_workspace_at_least(workspace: torch.Tensor, size: int) -> torch.Tensor:
    """``workspace`` if it has ``size`` bytes, else ``size`` bytes of the current lane.

    ``workspace`` itself is never touched: the caller, its clones and captured graphs use it.
    Raises as :func:`lane_workspace` does.
    """
    if workspace.numel() >= size:
        return workspace
    if torch_internals.tracing() or torch_internals.is_traced_tensor(workspace):
        return workspace.new_empty(size, dtype=torch.uint8)
    state = _state.current
    index = state.device.index_of(workspace.device)
    if index is None:
        return workspace.new_empty(size, dtype=torch.uint8)
    # A view of ours says whose it is by its block; a clone or a caller's tensor does not.
    name = state.ledger.get(workspace.untyped_storage().data_ptr(), GENERIC_LANE)
    return _view(state, name, size, index)


def reserve_lane(name: str, nbytes: int, device: torch.device | str) -> torch.Tensor:
    """Grow the current lane of ``name`` to ``nbytes`` and return that view of it.

    Lanes of this name that are made later on this device start with at least ``nbytes``. Raises
    as :func:`lane_workspace` does, and then later lanes are as before too.
    """
    view = lane_workspace(name, nbytes, device)
    state = _state.current
    index = state.device.index_of(torch.device(device))
    if index is not None and not torch_internals.tracing():
        raise_floor(state, name, index, nbytes)
    return view


def raise_floor(state: State, name: str | None, index: int, nbytes: int) -> None:
    """New lanes of ``name`` (``None``: of every name) start with at least ``nbytes``."""
    with state.lock:
        key = (name, index)
        state.floors[key] = max(nbytes, state.floors.get(key, 0))


def _view(state: State, name: str, nbytes: int, index: int) -> torch.Tensor:
    key = lane_key(state.device, index)
    view = state.views.get((name, nbytes, key))
    return view if view is not None else _cut(state, name, nbytes, index, key)


def _cut(state: State, name: str, nbytes: int, index: int, key: LaneKey) -> torch.Tensor:
    with state.lock:
        view = state.views.get((name, nbytes, key))
        if view is not None:  # another thread was first
            return view
        length = max(nbytes, 1)
        lane = state.lanes.get((name, key)) or Lane(name, key, index)
        if lane.storage.nbytes < length:
            grow_lane(state, lane, length)
        view = lane.storage.cut(length)
        if len(lane.lengths) >= VIEWS:
            # First in, first out: a least-recently-used order would cost every hit a write.
            state.views.pop((name, lane.lengths.popleft(), key), None)
        lane.lengths.append(nbytes)
        state.views[name, nbytes, key] = view
        return view


def grow_lane(state: State, lane: Lane, nbytes: int) -> None:
    """Make ``lane`` hold ``nbytes`` and be known; the caller has ``state.lock``."""
    if lane.storage.nbytes == 0:
        floors = (state.floors.get((name, lane.index), 0) for name in (lane.name, None))
        nbytes = max(nbytes, LANE_BYTES, *floors)
    grow(state, lane.storage, nbytes, name=lane.name, key=lane.key, index=lane.index)
    # Only now: a lane whose first block failed was never there.
    state.lanes[lane.name, lane.key] = lane
    state.ledger[lane.storage.address] = lane.name
