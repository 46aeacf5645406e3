"""The only module that touches parts of cudnn-frontend that are not public.

``graph.execute()`` describes every operand anew at each call, which is most of what it costs.
Newer frontends (1.32 is the one that was read) then pass an array of addresses to the library;
for operands that were described once, and are alike, that last step is enough. Where it is not
there, or not meant for the plan, the public call is made.
"""

from __future__ import annotations

import ctypes
import operator
import struct
import sys
import weakref
from collections.abc import Callable
from typing import Any

# ``launch(addresses, workspace address, handle)``.
Raw = Callable[[tuple[int, ...], int, Any], None]


def set_stream() -> Callable[[Any, int], None] | None:
    """``cudnn.set_stream(handle, stream)`` of the frontend that this process uses."""
    return getattr(sys.modules.get("cudnn"), "set_stream", None)


def weak(graph: Any) -> Callable[[], Any] | None:
    """A reference that keeps neither the graph nor its plan; ``None`` if it cannot have one."""
    try:
        return weakref.ref(graph)
    except TypeError:
        return None


def raw(graph: Any, index: int | None, uids: tuple[int, ...], handle: Any) -> Raw | None:
    """How to execute, by address, the plan that ``graph`` has just executed with ``handle``.

    ``index`` is the argument of ``execute_plan_at_index``, ``None`` for ``execute``; ``uids``
    are those of the addresses that will be passed. ``None`` if the public call is to be made:
    an older frontend, a plan of one of the frontend's own engines, operands bound to the graph.
    The result keeps no plan alive; called when the graph is gone it raises ReferenceError. Calls
    need the device's lock: they share one array.
    """
    try:
        if not graph._planning_done or graph._data_bindings:
            return None
        place = graph._plan_index if index is None else index
        plan = graph._plans[place]
        if graph._engine_for(plan) is not None:
            return None
        plan_index = -1 if plan.cpp_index is None else int(plan.cpp_index)
        order = tuple(graph._variant_pack_uids())
        graph._lowered_graph._execute_with_raw_ptrs  # noqa: B018
        if not isinstance(handle.backend_handle, int) or not set(order) <= set(uids):
            return None
    except Exception:
        # Whatever differs there from the frontend that was read: the public call is always right.
        return None
    reference = weak(graph)
    if reference is None or len(order) < 2:
        return None
    pick = operator.itemgetter(*(uids.index(uid) for uid in order))
    count = len(order)
    array = (ctypes.c_uint64 * count)()
    address = ctypes.addressof(array)
    write = struct.Struct(f"={count}Q").pack_into

    def launch(addresses: tuple[int, ...], workspace: int, handle: Any) -> None:
        graph = reference()
        if graph is None:
            raise ReferenceError("the plan was evicted")
        write(array, 0, *pick(addresses))
        graph._lowered_graph._execute_with_raw_ptrs(
            address, count, workspace, handle.backend_handle, plan_index
        )

    return launch
