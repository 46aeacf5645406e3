"""Lanes: which workspace a call gets.

Two launches that may run at once never share a workspace. Eager launches of one stream run in
order: key (device, stream). Graphs of one pool must not replay at once, PyTorch says, but graphs
of two pools may, and so may the branches of one graph: key (device, pool, stream). What an
address was handed out for stays valid: storage never moves and is never given back.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import suppress

import torch

from . import scope, torch_internals
from . import state as _state
from .arena import Arena
from .device import Capture
from .errors import (
    NO_MEMORY,
    CudnnWorkspaceTooSmallInCaptureError,
    DriverError,
    DriverUnavailable,
    GemmWorkspaceError,
)
from .growth import Asker, check_seal, device_name, grow, served
from .holds import collect, hold_lane, retire, sweep
from .names import GENERIC_LANE, LANE_BYTES, MADE_TO_MEASURE, shared_part
from .state import Lane, LaneKey, State, log
from .storage import Blocks, Storage

# On the way of every call, so bound once.
_dynamo_tracing = torch_internals.dynamo_tracing
_modes_active = torch_internals.modes_active
_here = torch_internals.current_device
_capturing = torch_internals.is_current_stream_capturing
_raw_stream = torch_internals.raw_stream

# Views kept per lane. A view costs host memory only; an op asks for one or two lengths.
VIEWS = 64

# Requests remembered for the hot path, before all are forgotten and looked up again.
HOT = 1024

# Handles that are no stream's own: the default stream, CU_STREAM_LEGACY and CU_STREAM_PER_THREAD.
# The last is another living stream in each thread.
_NAMES_OF_STREAMS = (0, 1, 2)

# A user of a lane that no graph's end removes: no capture has this id.
_FOREVER = -1

# Lanes above which one line in the log says what there is.
MANY = 16


def lane_workspace(name: str, nbytes: int, device: torch.device | str) -> torch.Tensor:
    """The workspace ``name`` of the current stream and capture: ``max(nbytes, 1)`` bytes, uint8.

    The length depends on the request alone, never on history. A request seen before on this lane
    returns the same tensor. Under capture the lane is held for the capturing graph. Raises
    :class:`GemmWorkspaceError`, under capture :class:`CudnnWorkspaceTooSmallInCaptureError`,
    when memory is really gone or the workspaces were sealed.
    """
    # Nearly every call ends here: one capture query, one stream, two looks. Written out, because
    # each further call of a function would cost a tenth of a microsecond.
    if not (_dynamo_tracing() or _modes_active()):
        known = _state.current.hot.get((name, nbytes, device))
        if known is not None:
            place, views, alone = known
            # torch's capture query is about the current device, and asking which that is costs
            # half of it again: where there is one device, that is not asked.
            if alone or _here() == place:
                if _capturing():
                    return _captured_view(_state.current, name, max(nbytes, 1), place)
                view = views.get(_raw_stream(place))
                if view is not None:
                    return view
    device = torch.device(device)
    if torch_internals.tracing():
        return torch.empty(max(nbytes, 1), dtype=torch.uint8, device=device)
    state = _state.current
    index = state.device.index_of(device)
    if index is None:
        return torch.empty(max(nbytes, 1), dtype=torch.uint8, device=device)
    stream_key = state.eager_stream(index)
    if stream_key is None:
        return _captured_view(state, name, max(nbytes, 1), index)
    view = _eager_view(state, name, max(nbytes, 1), index, stream_key)
    if device.index is not None and not state.settings.zero:
        _remember(state, (name, nbytes, device), index, view)
    return view


def _gemm_workspace_at_least(workspace: torch.Tensor, size: int) -> torch.Tensor:
    """``workspace`` if it has ``size`` bytes, else ``size`` bytes of the current lane.

    ``workspace`` itself is never touched: the caller, its clones and captured graphs use it.
    Under capture a lane of ours that is not the capture's own (it was fetched before the capture
    began) is replaced by that one, in the same length, and what is used is held for the graph.
    Raises as :func:`lane_workspace` does.
    """
    state = _state.current
    if workspace.numel() >= size:
        # A tensor that is traced has no address; a tensor that is none of ours has no lane.
        if type(workspace) is torch.Tensor and not _dynamo_tracing():
            lane = state.ledger.get(workspace.data_ptr()) or _lane_of_slice(state, workspace)
            if (
                lane is not None
                and scope.is_capturing(state.device, lane.index)
                and not _hold_as_it_is(state, lane)
            ):
                return _captured_view(state, lane.part, workspace.numel(), lane.index)
            if lane is not None:
                return _handed_out(state, workspace)
        return workspace
    if torch_internals.tracing() or torch_internals.is_traced_tensor(workspace):
        return workspace.new_empty(size, dtype=torch.uint8)
    # A view of ours says whose it is by its address; a clone or a caller's tensor does not.
    lane = state.ledger.get(workspace.data_ptr()) or _lane_of_slice(state, workspace)
    index = lane.index if lane is not None else state.device.index_of(workspace.device)
    if index is None:
        return workspace.new_empty(size, dtype=torch.uint8)
    stream_key = _eager_stream(state, index)
    part = GENERIC_LANE if lane is None else lane.part
    if stream_key is None:
        return _captured_view(state, part, size, index)
    # A plan that needs more than the op fetched asks at each call, mostly of the same lane.
    if lane is not None and lane.key == (index, stream_key):
        view = lane.views.get(size)
        if view is not None:
            return _handed_out(state, view)
    return _eager_view(state, part, size, index, stream_key)


def reserve_lane(name: str, nbytes: int, device: torch.device | str) -> torch.Tensor:
    """Grow the current lane of ``name`` to ``nbytes`` and return that view of it.

    Lanes of this name of other streams, made later, start with at least ``nbytes`` too. Raises
    as :func:`lane_workspace` does, and then later lanes are as before.
    """
    view = lane_workspace(name, nbytes, device)
    state = _state.current
    index = state.device.index_of(torch.device(device))
    if index is not None and not torch_internals.tracing():
        with state.lock:
            floor = (part_of(state, name, index), index)
            state.floors[floor] = max(nbytes, state.floors.get(floor, 0))
    return view


def part_of(state: State, name: str, index: int) -> str:
    """What of a lane key's storage ``name`` uses on device ``index``."""
    return shared_part(name) if state.shares(index) else name


def map_ahead(state: State, index: int, nbytes: int, lanes: int) -> None:
    """Grow the current stream's lanes to ``nbytes`` and have ``lanes`` spare ones as long.

    The caller has ``state.lock``. Raises as :func:`lane_workspace` does.
    """
    key, stream, capture = _place(state, index)
    for lane in list(state.lanes.values()):
        if lane.key == key and lane.storage.nbytes < nbytes:
            _grow(state, lane, nbytes, _asker("reserve", lane, capture))
    free = state.free.setdefault(index, [])
    nbytes = max(nbytes, LANE_BYTES)  # no lane starts with less
    identity = None if capture is None else capture.id
    asker = Asker("reserve", "spare", ("spare", index), index, stream, identity)
    while sum(each.nbytes >= nbytes for each in free) < lanes:
        short = [each for each in free if each.nbytes < nbytes]
        longest = max(short, key=lambda each: each.nbytes, default=None)
        check_seal(state, longest, nbytes, asker)
        storage = longest if longest is not None else _new(state, asker.index)
        grow(state, storage, nbytes, asker)
        if storage not in free:
            free.append(storage)


# The way of a call. ------------------------------------------------------------------------------


def _remember(
    state: State, request: tuple[str, int, torch.device], index: int, view: torch.Tensor
) -> None:
    """Let the next such call of the current stream find ``view`` at once."""
    stream = state.device.raw_stream(index)
    if not state.device.lasts(index, stream):
        return
    with state.lock:
        if len(state.hot) >= HOT:
            state.hot.clear()
        known = state.hot.setdefault(request, (index, {}, state.device.alone(index)))
        known[1][stream] = view


def _eager_stream(state: State, index: int) -> Hashable | None:
    """``state.eager_stream``, without its capture query where the execution has asked."""
    if scope.local.work[0] == index:
        if scope.is_capturing(state.device, index):
            return None
        return state.device.stream_key(index, state.device.raw_stream(index))
    return state.eager_stream(index)


def _captured_view(state: State, name: str, nbytes: int, index: int) -> torch.Tensor:
    stream = state.device.raw_stream(index)
    capture = _capture(state, index, stream)
    stream_key = state.device.stream_key(index, stream)
    entry = (name, nbytes, index, stream_key)
    hold = state.holds.get(capture.id)
    view = None if hold is None else hold.views.get(entry)
    if view is None:
        # A11: the op may go on to a runner of cuBLAS, and this may be its first call.
        state.device.make_blas_handle(index)
        key = _captured_key(state, index, capture, stream_key)
        with state.lock:
            lane = _lane(state, name, nbytes, index, stream, key, capture)
            view = hold_lane(state, capture, lane).views[entry] = _cut(lane, nbytes)
    return _handed_out(state, view)


def _eager_view(
    state: State, name: str, nbytes: int, index: int, stream_key: Hashable
) -> torch.Tensor:
    key = (index, stream_key)
    lane = state.lanes.get((part_of(state, name, index), key))
    view = None if lane is None else lane.views.get(nbytes)
    if view is not None:
        return _handed_out(state, view)
    collect(everything=False, unpin=False)
    stream = state.device.raw_stream(index)
    if lane is None:
        with state.lock:
            _retire_former(state, index, stream, key)
        _wash(state, index)

    def make() -> torch.Tensor:
        with state.lock:
            return _cut(_lane(state, name, nbytes, index, stream, key, None), nbytes)

    return _handed_out(state, served(state, index, make))


def _handed_out(state: State, view: torch.Tensor) -> torch.Tensor:
    """``view``, filled with zeros on the current stream where that was asked for."""
    return view.zero_() if state.settings.zero else view


def _cut(lane: Lane, nbytes: int) -> torch.Tensor:
    """The view of ``nbytes`` bytes; the caller has the lock."""
    view = lane.views.get(nbytes)
    if view is None:
        if len(lane.views) >= VIEWS:
            # First in, first out: a least-recently-used order would cost every hit a write.
            del lane.views[next(iter(lane.views))]
        view = lane.views[nbytes] = lane.storage.cut(nbytes)
    return view


def _capture(state: State, index: int, stream: int) -> Capture:
    try:
        return scope.capture(state.device, index, stream)
    except (DriverUnavailable, DriverError) as error:
        raise CudnnWorkspaceTooSmallInCaptureError(
            f"no workspace for the capture on {device_name(index)}: which capture it is cannot be "
            f"told, since the CUDA driver API cannot be reached ({error}). Install cuda-python 12 "
            "or later (pip install cuda-bindings), or run this call outside the capture."
        ) from error


def _captured_key(state: State, index: int, capture: Capture, stream_key: Hashable) -> LaneKey:
    if state.settings.single_capture_lane:
        return (index, ("any",), stream_key)
    pool = state.device.pool_of(capture.id)
    # An unknown pool: nobody else can have this key, and the lane goes when the graph does.
    group = ("pool", pool) if pool is not None else ("capture", capture.id)
    return (index, group, stream_key)


def _place(state: State, index: int) -> tuple[LaneKey, int, Capture | None]:
    stream = state.device.raw_stream(index)
    stream_key = state.device.stream_key(index, stream)
    if not state.device.is_capturing(index):
        return (index, stream_key), stream, None
    capture = _capture(state, index, stream)
    return _captured_key(state, index, capture, stream_key), stream, capture


def _lane_of_slice(state: State, workspace: torch.Tensor) -> Lane | None:
    """The lane of a piece that somebody cut from a view."""
    if workspace.storage_offset() == 0:
        return None
    return state.ledger.get(workspace.untyped_storage().data_ptr())


def _hold_as_it_is(state: State, lane: Lane) -> bool:
    """Hold ``lane`` for the current capture; False if it is not the lane of that capture.

    It is not when the workspace was fetched before the capture began: eager calls of its stream,
    and captures of other pools, could use it at the same time.
    """
    stream = state.device.raw_stream(lane.index)
    try:
        capture = scope.capture(state.device, lane.index, stream)
    except (DriverUnavailable, DriverError):
        # Whose graph it is cannot be told, so nobody else ever gets this lane.
        lane.users.add(_FOREVER)
        return True
    stream_key = state.device.stream_key(lane.index, stream)
    if lane.key != _captured_key(state, lane.index, capture, stream_key):
        return False
    if capture.id not in lane.users:
        with state.lock:
            # Found without the lock: it may have been retired, and taken by another, since.
            if state.lanes.get((lane.part, lane.key)) is not lane:
                return False
            hold_lane(state, capture, lane)
    return True


# Lanes and their storage; the caller has ``state.lock``. -----------------------------------------


def _lane(
    state: State,
    name: str,
    nbytes: int,
    index: int,
    stream: int,
    key: LaneKey,
    capture: Capture | None,
) -> Lane:
    """The lane of ``key``, with at least ``nbytes``."""
    part = part_of(state, name, index)
    lane = state.lanes.get((part, key))
    if lane is not None:
        if lane.storage.nbytes < nbytes:
            _grow(state, lane, nbytes, _asker(name, lane, capture))
        return lane
    if capture is None:
        _retire_former(state, index, stream, key)
    else:
        sweep(state, everything=True)
    start = nbytes if part in MADE_TO_MEASURE else max(nbytes, LANE_BYTES)
    if capture is None:
        # Under capture a floor would be paid once a pool and stream, and growing is cheap there.
        start = max(start, state.floors.get((part, index), 0))
    asker = Asker(
        scope.op() or name, part, key, index, stream, None if capture is None else capture.id
    )
    try:
        storage = _take(state, start, asker)
    except (GemmWorkspaceError, CudnnWorkspaceTooSmallInCaptureError) as first:
        if start <= max(nbytes, 1):
            raise
        try:
            storage = _take(state, max(nbytes, 1), asker)  # what was asked for may still be had
        except (GemmWorkspaceError, CudnnWorkspaceTooSmallInCaptureError):
            raise first from first.__cause__
    lane = Lane(part, key, index, stream, capture is not None, storage)
    # Only now: a lane whose storage could not be had was never there.
    state.lanes[part, key] = lane
    _enter(state, lane)
    if len(state.lanes) > MANY and state.first_time("many lanes"):
        captured = sum(each.captured for each in state.lanes.values())
        log.warning(
            "%d workspaces are in use: %d of streams, %d of streams under capture. Each stream, "
            "and each stream of each graph pool, has its own. Captures that share a pool share "
            "them (torch.cuda.graph(..., pool=...)); an engine that never replays two graphs at "
            "once can set FLASHINFER_GEMM_WORKSPACE_SINGLE_CAPTURE_LANE=1.",
            len(state.lanes),
            len(state.lanes) - captured,
            captured,
        )
    return lane


def _asker(op: str, lane: Lane, capture: Capture | None) -> Asker:
    identity = None if capture is None else capture.id
    return Asker(scope.op() or op, lane.part, lane.key, lane.index, lane.stream, identity)


def _grow(state: State, lane: Lane, nbytes: int, asker: Asker) -> None:
    check_seal(state, lane.storage, nbytes, asker)
    grow(state, lane.storage, nbytes, asker)
    _enter(state, lane)


def _enter(state: State, lane: Lane) -> None:
    address = lane.storage.address
    if address not in lane.addresses:
        lane.addresses.append(address)
    state.ledger[address] = lane


def _retire_former(state: State, index: int, stream: int, key: LaneKey) -> None:
    """Lanes of a stream that is gone: another one has its handle now."""
    if stream in _NAMES_OF_STREAMS:
        return
    for lane in list(state.lanes.values()):
        if lane.index == index and lane.stream == stream and not lane.captured and lane.key != key:
            lane.stream_gone = True
            if not lane.users:
                retire(state, lane, dirty=True)


def _wash(state: State, index: int) -> None:
    """Make dirty storage free. Waits for the device, so without the lock: what runs there may
    wait for a launch of another thread, on another device, that needs the lock first."""
    with state.lock:
        dirty = state.dirty.get(index)
        if state.free.get(index) or not dirty or state.device.captures_running() > 0:
            return
        del state.dirty[index]
    place = state.dirty
    try:
        # A capture that nobody told us of forbids it: then they stay dirty.
        with suppress(DriverError, DriverUnavailable):
            state.device.synchronize(index)
            place = state.free
    finally:
        with state.lock:
            place.setdefault(index, []).extend(dirty)


def _take(state: State, nbytes: int, asker: Asker) -> Storage:
    """Storage of at least ``nbytes``: spare one, if there is any, before new one."""
    free = state.free.setdefault(asker.index, [])
    # The smallest that is long enough, else the longest, which then has least to grow.
    fitting = [each for each in free if each.nbytes >= nbytes]
    if fitting:
        storage = min(fitting, key=lambda each: each.nbytes)
    else:
        longest = max(free, key=lambda each: each.nbytes, default=None)
        check_seal(state, longest, nbytes, asker)
        storage = longest if longest is not None else _new(state, asker.index)
        grow(state, storage, nbytes, asker)
    if storage in free:
        free.remove(storage)
    return storage


def _new(state: State, index: int) -> Storage:
    """New storage with nothing behind it yet."""
    device = state.device
    try:
        arena = Arena.on(device, index)
    except NO_MEMORY:
        arena = None  # not even addresses: a block may still be had
    if arena is None:
        return Blocks(lambda size, capturing: device.allocate(index, size, capturing))
    # Among the free at once, where it stays when growing it fails: addresses must not be lost.
    state.free.setdefault(index, []).append(arena)
    return arena
