"""For operators: make room ahead, close the door, and see what there is."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch

from . import state as _state
from .device import CPU
from .growth import device_name, served
from .holds import collect
from .lanes import map_ahead
from .state import Lane, State
from .storage import Storage


def reserve(nbytes: int, device: torch.device | str | None = None, lanes: int = 1) -> None:
    """Map memory ahead: ``lanes`` spare workspaces of at least ``nbytes`` bytes each.

    A new lane, also one under capture or after :func:`seal`, takes a spare one before it maps
    anything. The lanes that the current stream has already grow to ``nbytes`` as well. Asking
    again for what is there does nothing. ``device`` is the current one unless given.

    How many: one for each stream that runs GEMMs, and one for each stream under capture of each
    graph pool; times the ops used, where ops do not share (``stats()["sharing"]``).

    Raises :class:`GemmWorkspaceError`, under capture
    :class:`CudnnWorkspaceTooSmallInCaptureError`; what was mapped by then stays spare. Raises
    ValueError for a number that is none.
    """
    for what, number in (("nbytes", nbytes), ("lanes", lanes)):
        if not isinstance(number, int) or number < 0:
            raise ValueError(f"{what} is {number!r}, wanted a number of at least 0")
    state = _state.current
    index: int | None = state.device.current_index()
    if device is None and index == CPU and torch.cuda.is_available():
        index = state.device.index_of(torch.device("cuda"))
    elif device is not None:
        index = state.device.index_of(torch.device(device))
    if index is None:
        raise ValueError(f"device {device} has no lanes, wanted a CUDA device or the CPU")
    collect()
    place = index

    def map_them() -> None:
        with state.lock:
            map_ahead(state, place, nbytes, lanes)

    served(state, place, map_them)


def seal(sealed: bool = True) -> None:
    """From now on, mapping memory for a lane is an error, or a line in the log.

    Which of the two: ``FLASHINFER_GEMM_WORKSPACE_SEAL_POLICY``. What is mapped, spare
    workspaces included, is used as before. ``sealed=False`` opens again. The release's other
    cached buffers are not sealed.
    """
    _state.current.sealed = sealed


_FORMATS = ("dict", "prometheus")


@overload
def stats(format: Literal["dict"] = "dict") -> dict[str, Any]: ...
@overload
def stats(format: Literal["prometheus"]) -> str: ...


def stats(format: str = "dict") -> dict[str, Any] | str:
    """What the runtime holds, as a dict or as Prometheus text. All sizes in bytes.

    ``"prometheus"``: exposition format 0.0.4, see :mod:`.prometheus` and docs/metrics.md. Raises
    ValueError for another format.

    ``lanes``: workspaces in use, with the graphs that hold them. ``streams_of_others``: how many
    lanes are of streams that torch did not make; such a lane is taken by another only once a new
    stream comes at the handle of its stream, since nobody sees a stream end. ``spare``: mapped
    and unused (``dirty``: usable after the next synchronisation). ``storage`` by device:
    ``arena``, or ``blocks`` where memory cannot be mapped behind an address. ``sharing`` by
    device: whether ops share. ``growths``: the last 256. ``plans_kept_for_process``: plans that
    could not be tied to a graph. ``prepared``: calls of known signatures, see
    :func:`.prepared.report`.
    """
    if format not in _FORMATS:
        raise ValueError(f"format is {format!r}, wanted one of {', '.join(_FORMATS)}")
    told = _stats()
    if format == "dict":
        return told
    # Only where it is asked for: importing the package stays cheap.
    from .prometheus import text

    return text(told)


def _stats() -> dict[str, Any]:
    # Here: calls load it when they need it, and importing the package stays cheap.
    from .prepared import report

    state = _state.current
    collect()
    prepared = report()
    with state.lock:
        lanes = [_lane(lane) for lane in state.lanes.values()]
        spare = [
            {"device": device_name(index), "bytes": storage.nbytes, "dirty": dirty}
            for dirty, places in ((False, state.free), (True, state.dirty))
            for index, storages in places.items()
            for storage in storages
            if storage.nbytes
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
        plans = {id(plan) for hold in state.holds.values() for plan in hold.plans.values()}
        return {
            "lanes": lanes,
            "streams_of_others": sum(
                not (lane.captured or state.device.lasts(lane.index, lane.stream))
                for lane in state.lanes.values()
            ),
            "spare": spare,
            "buffers": buffers,
            "lane_bytes": sum(each.nbytes + each.kept_bytes for _, each in _lane_storages(state)),
            "kept_bytes": sum(
                each.kept_bytes
                for each in (*(each for _, each in _lane_storages(state)), *state.buffers.values())
            ),
            "storage": {
                device_name(index): storage.kind for index, storage in _lane_storages(state)
            },
            "sharing": {device_name(index): shares for index, shares in state.sharing.items()},
            "sealed": state.sealed,
            "growths_total": state.growths_total,
            "growths": [growth.as_dict() for growth in state.growths],
            "graphs_alive": len(state.holds),
            "graphs_untied": sum(hold.tie is None for hold in state.holds.values()),
            "plans_held": len(plans | state.kept_plans.keys()),
            "plans_kept_for_process": len(state.kept_plans),
            "builds_refused": state.builds_refused,
            "prepared": prepared,
        }


def _lane_storages(state: State) -> list[tuple[int, Storage]]:
    used = [(lane.index, lane.storage) for lane in state.lanes.values()]
    places = (state.free, state.dirty)
    unused = [
        (index, each) for place in places for index, storages in place.items() for each in storages
    ]
    return used + unused


def _lane(lane: Lane) -> dict[str, Any]:
    return {
        "name": lane.part,
        "device": device_name(lane.index),
        "kind": "capture" if lane.captured else "stream",
        "key": lane.key,
        "storage": lane.storage.kind,
        "bytes": lane.storage.nbytes,
        "kept_bytes": lane.storage.kept_bytes,
        "graphs": len(lane.users),
    }
