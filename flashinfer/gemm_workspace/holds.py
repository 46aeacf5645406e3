"""Holds: what a captured graph needs lives exactly as long as the graph does.

Each graph that used a lane or executed a plan holds a token (``Device.tie``), which is released
when the graph, everything instantiated from it and its last running replay are gone. Releases
are noticed later, by looking: nothing of ours runs inside CUDA's destructors.
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from itertools import islice

from . import state as _state
from .device import Capture
from .errors import DriverError, DriverUnavailable
from .state import Hold, Lane, State, log

# Tokens looked at in one bounded collection: this many of the newest graphs (temporary ones die
# young) and as many of all in turn. One look takes about a microsecond.
_NEWEST = 8
_IN_TURN = 8

# Weak references to plans that may gather before dead ones are dropped.
_PRUNE = 1024


def hold_lane(state: State, capture: Capture, lane: Lane) -> Hold:
    """Keep ``lane`` for the graph of ``capture``; the caller has ``state.lock``."""
    hold = _hold_of(state, capture)
    if capture.id not in lane.users:
        hold.lanes.append(lane)
        lane.users.add(capture.id)
    return hold


def hold_plan(state: State, capture: Capture, plan: object) -> None:
    """Keep ``plan`` for the graph of ``capture``."""
    hold = state.holds.get(capture.id)
    if hold is not None and id(plan) in hold.plans:
        return
    with state.lock:
        plans = _hold_of(state, capture).plans
        if id(plan) in plans:
            return
        plans[id(plan)] = plan
        state.held[id(plan)] += 1
    state.plan_held(id(plan))


def keep_plan(state: State, plan: object, reason: object) -> None:
    """Keep ``plan`` for the life of the process: its graph cannot be known."""
    with state.lock:
        if id(plan) not in state.kept_plans:
            state.kept_plans[id(plan)] = plan
            state.held[id(plan)] += 1
    state.plan_held(id(plan))
    _say_kept(state, reason)


def _hold_of(state: State, capture: Capture) -> Hold:
    hold = state.holds.get(capture.id)
    if hold is None:
        tie = None
        try:
            tie = state.device.tie(capture.graph)
        except (DriverUnavailable, DriverError) as error:
            _say_kept(state, error)
        hold = state.holds[capture.id] = Hold(capture.id, tie)
    return hold


def _say_kept(state: State, reason: object) -> None:
    if state.first_time("kept for the process"):
        log.warning(
            "What captured graphs use is kept for the life of the process, since it cannot be "
            "tied to them (%s). Install cuda-python 12 or later (pip install cuda-bindings) to "
            "have it released with each graph.",
            reason,
        )


def sweep(state: State, everything: bool) -> None:
    """Notice graphs that are gone; the caller has ``state.lock``.

    Their lanes can be taken by others at once: a token is released only after the last replay,
    and under capture a lane is used by captured launches alone. Frees nothing, calls no CUDA.
    """
    if everything:
        looked_at = list(state.holds)
    else:
        looked_at = [*islice(reversed(state.holds), _NEWEST), *islice(state.rounds, _IN_TURN)]
        if len(looked_at) < min(len(state.holds), _NEWEST) + _IN_TURN:
            state.rounds = iter(list(state.holds))  # a round is over
    for capture in looked_at:
        hold = state.holds.get(capture)
        if hold is None or hold.tie is None or not hold.tie.released():
            continue
        for lane in hold.lanes:
            lane.users.discard(capture)
            if not lane.users and (lane.captured or lane.stream_gone):
                retire(state, lane, dirty=not lane.captured)
        state.garbage.extend(hold.plans.values())
        # Only now: an interrupt (KeyboardInterrupt) before leaves it to be done again. One after
        # leaves a count too high, which costs its plan's eager calls time and nothing else.
        del state.holds[capture]
        state.held.subtract(hold.plans.keys())
        for plan in hold.plans:
            if state.held[plan] <= 0:
                del state.held[plan]


def retire(state: State, lane: Lane, dirty: bool = False) -> None:
    """Let the next new lane have the storage of ``lane``; the caller has ``state.lock``.

    ``dirty``: work of its stream may still run.
    """
    if state.lanes.get((lane.part, lane.key)) is not lane:
        return  # once: storage in two lists would get two owners
    del state.lanes[lane.part, lane.key]
    for address in lane.addresses:
        if state.ledger.get(address) is lane:
            del state.ledger[address]
    place = state.dirty if dirty else state.free
    place.setdefault(lane.index, []).append(lane.storage)


def watch_plan(state: State, plan: object) -> None:
    """``plan`` was built: while captures run it must not be unloaded, whoever drops it."""
    with suppress(TypeError), state.lock:  # what cannot be watched is none of cuDNN's
        state.unpinned.append(weakref.ref(plan))
        if len(state.unpinned) >= state.prune_at:
            # A process that never captures would keep a reference for every plan it ever built.
            state.unpinned[:] = [ref for ref in state.unpinned if ref() is not None]
            state.prune_at = 2 * len(state.unpinned) + _PRUNE
        if state.device.captures_running() > 0:
            _pin(state)


def _pin(state: State) -> None:
    """Keep every plan that there is; the caller has ``state.lock``.

    Unloading a module ends captures of other threads, and a builder's cache evicts, and Python
    collects cycles, at any moment. Costs what was built since the last time.
    """
    for ref in state.unpinned:
        plan = ref()
        if plan is not None:
            state.pins[id(plan)] = plan
            state.pinned.append(ref)
    state.unpinned.clear()


def _unpin(state: State) -> list[object]:
    pins = list(state.pins.values())
    state.pins.clear()
    state.unpinned += state.pinned
    state.pinned.clear()
    return pins


def collect(everything: bool = True, unpin: bool = True) -> None:
    """Let go of what only graphs that are gone needed. Does nothing while a capture runs.

    Without ``everything`` in bounded work, and less than 50 us; with ``unpin`` in time that grows
    with the number of plans, so not before each capture.
    """
    state = _state.current
    # First: it also notes that what has died is known.
    if state.device.captures_running() > 0:
        return
    if not (state.holds or state.garbage or (unpin and state.pins)):
        return
    with state.lock:
        sweep(state, everything)
        garbage, state.garbage = state.garbage, []
        if unpin:
            garbage += _unpin(state)
    if garbage:
        # Outside the lock: destructors run whatever they like. Relaxed: they unload modules,
        # which must not end a capture that nobody told us of.
        with state.device.relaxed():
            garbage.clear()


def before_capture() -> None:
    """What ``capture_begin`` calls first: the last moment to collect before its capture."""
    collect(everything=False, unpin=False)
    state = _state.current
    if state.unpinned:
        with state.lock:
            _pin(state)
