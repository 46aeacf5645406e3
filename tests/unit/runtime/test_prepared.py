"""Prepared launches: what is remembered, what is asked at each call, and what is never held."""

from __future__ import annotations

import contextlib
import gc
import inspect
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from flashinfer.gemm_workspace import captures, collect, guard_plan_build, launches, prepared
from flashinfer.gemm_workspace.holds import hold_plan, keep_plan
from flashinfer.gemm_workspace.state import State, use_device

from .fake_device import FakeDevice
from .fake_release import MIB, AutoTuner, Release, aligned, installed, operands


@pytest.fixture
def release(state: State) -> Iterator[Release]:
    with installed() as release:
        yield release


def hits() -> int:
    return int(prepared.report()["hits"])


def learnt(release: Release, *args: Any, **kwargs: Any) -> None:
    """Call twice: the second call is a hit."""
    before = hits()
    release.op(*args, **kwargs)
    release.op(*args, **kwargs)
    assert hits() == before + 1, prepared.report()


KINDS = ["plan", "function", "unwatched"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("out_given", [False, True])
def test_the_same_launch(release: Release, kind: str, out_given: bool) -> None:
    """With other tensors of the signature; the workspace and the tactic included."""
    AutoTuner.get().profiling_cache["op"] = 5
    scale = aligned(1)
    release.op(*operands(), scale, backend=kind)
    for _ in range(3):
        a, b = operands()
        out = aligned(4, 16, dtype=torch.bfloat16) if out_given else None
        scale = aligned(1)
        wanted_out = release.plain(a, b, scale, torch.bfloat16, out, kind)
        calls = release.calls
        got = release.op(a, b, scale, torch.bfloat16, out, kind)
        got = release.op(a, b, scale, torch.bfloat16, out, kind)
        assert (got is out) == out_given
        assert (got.shape, got.stride(), got.dtype) == (
            wanted_out.shape,
            wanted_out.stride(),
            wanted_out.dtype,
        )
        plain, *_, fast = release.library.launched[-3:]
        assert len(plain) == len(fast)
        for x, y in zip(plain, fast, strict=True):
            if isinstance(x, torch.Tensor):
                assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
                assert x is wanted_out or x.data_ptr() == y.data_ptr()
            else:
                assert x == y
        assert release.calls - calls <= 1
    assert prepared.report()["failures"] == 0
    assert hits() > 0


def test_each_kind_of_refusal_takes_the_releases_path(release: Release) -> None:
    for kind, why in {
        "two": "several launches",
        "twice": "several launches",
    }.items():
        calls, before = release.calls, hits()
        for _ in range(3):
            release.op(*operands(), backend=kind)
        assert release.calls == calls + 3
        assert hits() == before
        assert why in prepared.report()["refused"]


def test_an_operand_made_on_the_way_makes_the_runner_run(release: Release) -> None:
    """A clone of an argument is not the argument: not the launch, but the runner, is repeated."""
    a, b = operands()
    learnt(release, a, b, backend="copy")
    launch = release.library.launched[-1]
    assert launch[1] is not a
    assert launch[1].data_ptr() != a.data_ptr()


def test_two_arguments_that_are_one_tensor(release: Release) -> None:
    """What is learnt from them says which argument is which."""
    one, other = aligned(8, 8), aligned(8, 8)
    for kind in KINDS:
        prepared.forget()
        release.op(one, one, backend=kind)
        before = hits()
        for a, b in ((one, other), (other, one), (one, one)):
            release.op(a, b, backend=kind)
            _, x, y, *_ = release.library.launched[-1]
            assert (x.data_ptr(), y.data_ptr()) == (a.data_ptr(), b.data_ptr()), kind
        assert hits() == before + 3


def test_one_tensor_twice_and_then_another_layout(release: Release) -> None:
    """Told quickly, a tensor that came twice must come twice again."""
    one, scale = aligned(8, 8), aligned(1)
    for _ in range(3):
        release.op(one, one, scale, backend="function")
    assert prepared._current_memory().quick
    misses = prepared.report()["misses"]
    release.op(one, one.t(), scale, backend="function")
    assert prepared.report()["misses"] == misses + 1


def test_alignment_is_part_of_a_signature(release: Release) -> None:
    """Whichever comes first: what is learnt from one alignment is not used for another."""
    for first, second in ((16, 0), (0, 16), (32, 16)):
        prepared.forget()
        a, b = aligned(4, 8, off=first), aligned(8, 16)
        learnt(release, a, b, backend="function")
        release.op(a, b, backend="function")
        misses = prepared.report()["misses"]
        release.op(aligned(4, 8, off=second), b, backend="function")
        assert prepared.report()["misses"] == misses + 1


def test_an_output_that_is_an_operand_is_not_learnt(release: Release) -> None:
    a = aligned(8, 8)
    for _ in range(3):
        assert release.op(a, a, out=a) is a
    assert hits() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_the_callers_is_held(release: Release, kind: str) -> None:
    a, b = operands()
    scale, out = aligned(1), aligned(4, 16, dtype=torch.bfloat16)
    learnt(release, a, b, scale, out=out, backend=kind)
    watched = [weakref.ref(each) for each in (a, b, scale, out)]
    release.library.launched.clear()
    del a, b, scale, out
    gc.collect()
    assert [each() for each in watched] == [None] * 4


def test_an_evicted_plan_is_forgotten(release: Release) -> None:
    a, b = operands()
    learnt(release, a, b)
    plan = weakref.ref(release.plan(a.shape, -1))
    release.plan.cache_clear()
    gc.collect()
    assert plan() is None
    before = hits()
    release.op(a, b)
    assert (hits(), prepared.report()["failures"]) == (before, 1)
    learnt(release, a, b)


def test_a_plan_that_a_live_graph_holds(device: FakeDevice, state: State, release: Release) -> None:
    """Its eager calls take the release's path: the release's cache may have evicted it, and a
    capture looks there alone."""
    a, b = operands()
    learnt(release, a, b)
    plan = release.plan(a.shape, -1)
    with device.capturing(capture=7):
        hold_plan(state, state.device.capture(0, 3), plan)
    assert prepared.report()["remembered"] == 0
    release.plan.cache_clear()
    released(release, lambda: release.op(a, b), 1)
    again = release.plan(a.shape, -1)
    assert again is not plan  # built anew, and in the cache, as without prepared launches
    with device.capturing(capture=8):
        hold_plan(state, state.device.capture(0, 3), again)
    misses = prepared.report()["misses"]
    released(release, lambda: release.op(a, b), 5)
    report = prepared.report()
    assert report["refused"]["a plan that a live graph holds"] == 1  # known from then on
    assert report["misses"] == misses + 1
    device.destroy_graph(7)
    device.destroy_graph(8)
    collect()
    assert not state.held
    learnt(release, a, b)


def test_calls_from_memory_let_go_of_dead_graphs(
    device: FakeDevice, state: State, release: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = captures.Registry(lambda: 7)
    monkeypatch.setattr(captures, "registry", registry)
    monkeypatch.setattr(device, "captures_running", registry.running)
    a, b = operands()
    graph, plan = type("Graph", (), {})(), type("Plan", (), {})()
    alive = weakref.ref(plan)
    registry.began(graph, None)
    registry.ended(graph, True)
    with device.capturing(capture=7):
        hold_plan(state, state.device.capture(0, 3), plan)
    del plan
    learnt(release, a, b)
    device.destroy_graph(7)
    del graph
    before = hits()
    release.op(a, b)
    assert hits() == before + 1
    assert alive() is None


def test_a_plan_that_is_kept_for_the_process(state: State, release: Release) -> None:
    a, b = operands()
    learnt(release, a, b)
    keep_plan(state, release.plan(a.shape, -1), "no driver")
    released(release, lambda: release.op(a, b))


def test_a_full_cache_is_left_to_the_release(
    state: State, release: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call from memory is no use in its cache, which then evicts what was just called."""
    monkeypatch.setattr(prepared, "PLANS", 3)
    a, b = operands()
    learnt(release, a, b)

    @guard_plan_build
    def build(device: int) -> object:
        return type("Plan", (), {})()

    for _ in range(2):
        build(0)
    before = hits()
    release.op(a, b)
    assert hits() == before + 1
    build(0)
    assert prepared.report()["remembered"] == 0
    released(release, lambda: release.op(a, b), 3)
    assert prepared.report()["refused"] == {"too many plans were built": 1}


def test_an_operand_at_the_outputs_address_is_not_the_output() -> None:
    """An argument that is the output's memory in one call need not be in the next."""
    seen = object.__new__(launches._Seen)
    out = torch.zeros(4, 16)
    seen.form = SimpleNamespace(tensors=(0, 1))  # type: ignore[assignment]
    seen.values, seen.result, seen.given, seen.out = (out.view(64), out), out, 1, 2
    assert seen.at(out) == 1
    assert seen.at(seen.values[0]) == 0
    with pytest.raises(launches.Unrepeatable, match="two at one address"):
        seen.at(out.view(2, 32))
    seen.values, seen.given = (torch.zeros(64), None), None  # the op made the output
    assert seen.at(out.view(2, 32)) == 2


def test_nothing_of_a_refused_call_is_kept(release: Release) -> None:
    class Odd:
        pass

    a, b = operands()
    odd = Odd()
    with contextlib.suppress(Exception):
        release.op(a, b, backend=odd)
    memory = prepared._current_memory()
    assert memory.table == memory.quick == {}
    assert prepared.report()["refused"] == {"an argument of an unusual type": 1}


def test_who_found_it_before_it_was_forgotten_does_not_bring_it_back(release: Release) -> None:
    a, b = operands()
    release.op(a, b)
    memory = prepared._current_memory()
    (known,) = memory.table.values()
    with mock.patch.object(prepared, "_quick", side_effect=_forgetting(prepared._quick)):
        release.op(a, b)  # finds it, and everything is forgotten meanwhile
    assert known.gone
    assert memory.quick == {}


def _forgetting(quick: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any) -> Any:
        made = quick(*args)
        prepared.forget()
        return made

    return wrapped


def test_other_plans_stay_when_one_is_held(
    device: FakeDevice, state: State, release: Release
) -> None:
    a, b = operands()
    other, _ = operands(8)
    learnt(release, a, b)
    learnt(release, other, b)
    with device.capturing(capture=7):
        hold_plan(state, state.device.capture(0, 3), release.plan(a.shape, -1))
    before = hits()
    release.op(other, b)
    assert hits() == before + 1


# What is asked at each call. ----------------------------------------------------------------------


def released(release: Release, call: Callable[[], Any], times: int = 2) -> None:
    """Every call takes the release's path."""
    calls, before = release.calls, hits()
    for _ in range(times):
        call()
    assert release.calls == calls + times
    assert hits() == before


def test_a_capture(device: FakeDevice, release: Release) -> None:
    a, b = operands()
    learnt(release, a, b)
    with device.capturing():
        released(release, lambda: release.op(a, b))
    release.op(a, b)
    assert hits() == 2


def test_nothing_is_learnt_under_capture(device: FakeDevice, release: Release) -> None:
    a, b = operands()
    with device.capturing():
        released(release, lambda: release.op(a, b), 3)
    assert prepared.report()["remembered"] == 0
    learnt(release, a, b)


def test_another_current_device(device: FakeDevice, release: Release) -> None:
    a, b = operands()
    learnt(release, a, b)
    known = next(iter(prepared._current_memory().table.values()))
    known.index = 1  # as if the tensors were on another device than the current one
    released(release, lambda: release.op(a, b))


def test_the_stream_of_each_call(device: FakeDevice, release: Release) -> None:
    a, b = operands()
    learnt(release, a, b)
    workspaces = []
    for stream in (7, 8, 7):
        device.streams[0] = stream
        release.op(a, b)
        *_, workspace, bound = release.library.launched[-1]
        workspaces.append(workspace.data_ptr())
        assert bound == stream
    assert hits() == 4
    assert workspaces[0] == workspaces[2] != workspaces[1]


class _Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [_Functions, _Dispatch])
def test_modes(release: Release, mode: Any) -> None:
    a, b = operands()
    learnt(release, a, b)
    with mode():
        released(release, lambda: release.op(a, b))
    release.op(a, b)
    assert hits() == 2


def test_a_tensor_of_another_class(release: Release) -> None:
    class Mine(torch.Tensor):
        pass

    a, b = operands()
    learnt(release, a, b)
    mine = a.as_subclass(Mine)
    released(release, lambda: release.op(mine, b), 3)
    assert "a tensor of another class" in prepared.report()["refused"]
    learnt(release, torch.nn.Parameter(a, requires_grad=False), b)


def test_dynamo_sees_the_release(release: Release) -> None:
    """Compiled code runs the release's function, as it would without the fork."""
    a, b = operands()
    learnt(release, a, b, backend="unwatched")
    calls = release.calls
    compiled = torch.compile(
        lambda a, b: release.op(a, b, backend="unwatched") + 1, backend="eager"
    )
    before = hits()
    assert compiled(a, b).shape == (4, 16)
    assert release.calls > calls
    assert hits() == before


@pytest.mark.parametrize(
    "change",
    [
        lambda tuner: tuner.profiling_cache.__setitem__("op", 3),
        lambda tuner: tuner._file_configs.update(op=4),
        lambda tuner: setattr(tuner, "profiling_cache", {"op": 6}),
        lambda tuner: setattr(tuner, "_file_configs", {"op": 7}),
        lambda tuner: setattr(AutoTuner, "_instance", None),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_the_tuners_caches(release: Release, kind: str, change: Callable[[Any], Any]) -> None:
    a, b = operands()
    learnt(release, a, b, backend=kind)
    change(AutoTuner.get())
    released(release, lambda: release.op(a, b, backend=kind), 1)
    learnt_launch = release.library.launched[-1]
    release.op(a, b, backend=kind)
    assert release.library.launched[-1][-1] == learnt_launch[-1]
    assert hits() >= 2


def test_tuning_and_overrides(release: Release) -> None:
    a, b = operands()
    tuner = AutoTuner.get()
    learnt(release, a, b)
    tuner.is_tuning_mode = True
    released(release, lambda: release.op(a, b))
    tuner.is_tuning_mode = False
    assert prepared.report()["remembered"] == 0
    learnt(release, a, b)
    for stack in (tuner._get_override_stack(), tuner._get_skip_ops_stack()):
        stack.append("something")
        released(release, lambda: release.op(a, b))
        stack.pop()
        before = hits()
        release.op(a, b)
        assert hits() == before + 1


def test_overrides_are_a_threads_own(release: Release) -> None:
    a, b = operands()
    learnt(release, a, b)
    AutoTuner.get()._get_override_stack().append("something")
    before = hits()
    thread = threading.Thread(target=release.op, args=(a, b))
    thread.start()
    thread.join(30)
    assert hits() == before + 1


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("FLASHINFER_AUTOTUNER_LOAD_FROM_FILE", "1"),
        ("FLASHINFER_LOGLEVEL", "3"),
        ("FLASHINFER_DISABLE_CAKE_BF16_BMM_SWAP_AB", "1"),
    ],
)
def test_the_environment(
    release: Release, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    a, b = operands()
    learnt(release, a, b)
    monkeypatch.setenv(variable, value)
    released(release, lambda: release.op(a, b), 1)
    release.op(a, b)
    assert hits() == 2
    monkeypatch.delenv(variable)
    released(release, lambda: release.op(a, b), 1)


def test_no_call_is_kept_from_the_tracer(release: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = operands()
    learnt(release, a, b)
    monkeypatch.setenv("FLASHINFER_TRACE_DUMP", "1")
    released(release, lambda: release.op(a, b), 4)
    monkeypatch.setenv("FLASHINFER_TRACE_DUMP", "0")
    learnt(release, a, b)


def test_a_change_while_a_call_is_learnt(release: Release) -> None:
    """What the call resolved is older than the change: it is not remembered."""
    a, b = operands()
    release.op(a, b)
    prepared.forget()
    release.changes.append(lambda: AutoTuner.get().profiling_cache.update(op=9))
    release.op(a, b)
    release.changes.clear()
    assert prepared.report()["remembered"] == 0
    release.op(a, b, backend="function")
    release.op(a, b, backend="function")
    assert release.library.launched[-1][-1] == 9


# Failures. ----------------------------------------------------------------------------------------


def test_a_retry_is_not_learnt(release: Release) -> None:
    """A launch made while an error is handled is not what the call resolved to."""
    a, b = operands()
    execute, first = release.execute, [True]

    def failing(*args: Any) -> None:
        if first[0]:
            first[0] = False
            raise RuntimeError("this tactic fails")
        first[0] = True
        execute(*args)

    release.execute = failing  # type: ignore[method-assign]
    released(release, lambda: release.op(a, b), 3)
    release.execute = execute  # type: ignore[method-assign]
    learnt(release, a, b)


def test_an_op_that_ran_does_not_fail_for_being_watched(
    release: Release, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever goes wrong while a launch is described is told once, and not to the caller."""

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(launches, "prepare", broken)
    for m in (4, 5):
        a, b = operands(m=m)
        released(release, lambda a=a, b=b: release.op(a, b), 2)  # type: ignore[misc]
    assert prepared.report()["refused"] == {"unexpected ZeroDivisionError": 2}
    (record,) = caplog.records
    assert record.getMessage().startswith("A launch of op could not be described")


def test_a_call_from_within_an_error_handler_is_learnt(release: Release) -> None:
    a, b = operands()
    try:
        raise ValueError
    except ValueError:
        learnt(release, a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_a_launch_that_fails_is_the_releases_to_handle(release: Release, kind: str) -> None:
    a, b = operands()
    learnt(release, a, b, backend=kind)
    calls = release.calls
    release.library.fails = True
    with pytest.raises(RuntimeError, match="the library fails"):
        release.op(a, b, backend=kind)
    assert release.calls == calls + 1
    release.library.fails = False
    learnt(release, a, b, backend=kind)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        (("a", "b"), {}),
        ((1,), {"b": 2}),
        ((), {"nothing": 1}),
        ((torch.zeros(1), torch.zeros(1)), {"a": 1}),
        ((torch.zeros(2, 2), torch.zeros(2, 2), None, [1]), {}),
        (tuple(range(9)), {}),
    ],
)
def test_a_wrong_call_gets_the_releases_own_error(release: Release, args: Any, kwargs: Any) -> None:
    with pytest.raises(Exception) as wanted:  # noqa: PT011 - whatever the release says
        release.plain(*args, **kwargs)
    with pytest.raises(type(wanted.value)) as got:
        release.op(*args, **kwargs)
    assert str(got.value) == str(wanted.value)
    assert prepared.report()["remembered"] == 0


# The function. ------------------------------------------------------------------------------------


def test_everything_of_the_function_stays(release: Release) -> None:
    op, plain = release.op, release.plain
    for name in ("__name__", "__qualname__", "__doc__", "__module__", "__annotations__"):
        assert getattr(op, name) == getattr(plain, name)
    assert inspect.signature(op) == inspect.signature(plain)
    assert inspect.unwrap(op) is inspect.unwrap(plain)
    assert vars(op) is vars(plain)
    release.op(*operands())
    assert op.last == plain.last == 1  # set by the release on its own function, at each call
    op.mine = 3
    assert plain.mine == 3


def test_it_is_pickled_by_name(release: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[release.op.__module__]
    monkeypatch.setattr(release.op, "__qualname__", "op")
    monkeypatch.setattr(module, "op", release.op, raising=False)
    assert pickle.loads(pickle.dumps(release.op)) is release.op


def test_keywords_in_any_order_and_positions(release: Release) -> None:
    a, b = operands()
    learnt(release, a, b)
    learnt(release, a=a, b=b)
    learnt(release, b=b, a=a)
    learnt(release, a, b, None, torch.bfloat16)
    learnt(release, a, b, backend="function", dtype=torch.float16)
    assert prepared.report()["remembered"] == 5


@pytest.mark.parametrize("kind", KINDS)
def test_ways_to_write_a_call_are_not_mixed_up(release: Release, kind: str) -> None:
    """The same values in another order are other operands."""
    a, b = aligned(8, 8), aligned(8, 8)
    for _ in range(3):
        for call in (
            lambda: release.op(a, b, backend=kind),
            lambda: release.op(a=a, b=b, backend=kind),
            lambda: release.op(b=b, a=a, backend=kind),
            lambda: release.op(b, b=a, backend=kind),
        ):
            call()
            _, x, y, *_ = release.library.launched[-1]
            wanted = (a, b) if x.data_ptr() == a.data_ptr() else (b, a)
            assert (x.data_ptr(), y.data_ptr()) == tuple(each.data_ptr() for each in wanted)
        assert x.data_ptr() == b.data_ptr()
    launched = [launch[1].data_ptr() for launch in release.library.launched]
    assert launched == [each.data_ptr() for each in (a, a, a, b)] * 3
    assert hits() == 8


def test_skip_check(release: Release) -> None:
    """Like any argument, but for a backend that the release remembers from an earlier call."""
    a, b = operands()
    learnt(release, a, b, skip_check=True)
    learnt(release, a, b, skip_check=False)
    learnt(release, a, b, backend="auto", skip_check=True)
    released(release, lambda: release.op(a, b, None, torch.bfloat16, None, "auto", skip_check=True))
    learnt(release, a, b, None, torch.bfloat16, None, "auto", skip_check=False)


def test_a_release_that_logs_every_call_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    logging = SimpleNamespace(_API_LOG_LEVEL=1)
    monkeypatch.setitem(sys.modules, "flashinfer.api_logging", logging)  # type: ignore[arg-type]

    def op(a: torch.Tensor) -> torch.Tensor:
        return a

    assert prepared.prepared_launches(op) is op


# Bounds, threads, states. -------------------------------------------------------------------------


def test_bounded(release: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "SIGNATURES", 8)
    monkeypatch.setattr(prepared, "FORMS", 4)
    for m in range(1, 40):
        release.op(*operands(m=m), backend="function")
        release.op(*operands(m=m), backend="function")
    memory = prepared._current_memory()
    assert len(memory.table) == 8
    assert 0 < len(memory.quick) <= 8
    before = hits()
    for m in range(32, 40):  # the youngest are here
        release.op(*operands(m=m), backend="function")
    assert hits() == before + 8
    a, b = operands()
    names = ["scale", "dtype", "out", "backend"]
    values = {"scale": None, "dtype": torch.bfloat16, "out": None, "backend": "function"}
    for start in range(4):
        order = names[start:] + names[:start]
        release.op(a, b, **{name: values[name] for name in order})
        release.op(a, b, **{name: values[name] for name in order[:3]})
    cells = dict(zip(release.op.__code__.co_freevars, release.op.__closure__, strict=True))
    assert len(cells["forms"].cell_contents) == 4


def test_another_state_knows_nothing(release: Release) -> None:
    a, b = operands()
    learnt(release, a, b)
    with use_device(FakeDevice()):
        assert prepared.report()["remembered"] == 0
        learnt(release, a, b)


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHINFER_GEMM_WORKSPACE_PREPARED", "0")
    with use_device(FakeDevice()), installed() as release:
        a, b = operands()
        released(release, lambda: release.op(a, b), 4)
        assert prepared.report()["enabled"] is False
    monkeypatch.setenv("FLASHINFER_GEMM_WORKSPACE_PREPARED", "1")
    with use_device(FakeDevice()), installed() as release:
        learnt(release, *operands())
        assert prepared.report()["enabled"] is True


def test_a_larger_workspace_is_asked_for_as_such(release: Release, state: State) -> None:
    """The lane's length at the launch is the one that the release's path came to."""
    from flashinfer.gemm_workspace import _gemm_workspace_at_least

    a, b = operands()
    execute = release.execute
    release.execute = (
        lambda *args: execute(  # type: ignore[method-assign]
            *args[:-1], _gemm_workspace_at_least(args[-1], 48 * MIB)
        )
    )
    release.op(a, b)
    slow = release.library.launched[-1][-2]
    release.op(a, b)
    fast = release.library.launched[-1][-2]
    assert hits() == 1
    assert (
        (slow.data_ptr(), slow.numel())
        == (fast.data_ptr(), fast.numel())
        == (
            slow.data_ptr(),
            48 * MIB,
        )
    )


def test_threads_learn_and_launch_at_once(release: Release) -> None:
    """Every launch has its own call's operands, whatever is forgotten meanwhile."""
    wrong: list[Any] = []
    stop = threading.Event()

    def work(number: int) -> None:
        a, b = operands(m=number % 3 + 1)
        for _ in range(300):
            out = aligned(a.shape[0], 16, dtype=torch.bfloat16)
            if release.op(a, b, out=out, backend="function") is not out:
                wrong.append(number)

    def disturb() -> None:
        while not stop.is_set():
            prepared.forget()
            AutoTuner.get().profiling_cache["op"] = 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    disturber = threading.Thread(target=disturb)
    for thread in (*threads, disturber):
        thread.start()
    for thread in threads:
        thread.join(60)
    stop.set()
    disturber.join(60)
    assert wrong == []
    owners = {id(launch[4]): (launch[1], launch[2]) for launch in release.library.launched}
    assert len(owners) > 0
    for launch in release.library.launched:
        assert launch[1].shape[0] == launch[4].shape[0]


def test_a_signature_is_told_quickly_in_both_modes(release: Release) -> None:
    """A warm-up in inference mode and a server without it: other tensors, one signature."""

    def slow_looks(calls: int) -> int:
        with mock.patch.object(
            prepared._Memory, "find", autospec=True, side_effect=prepared._Memory.find
        ) as find:
            for _ in range(calls):
                release.op(*operands())
        return int(find.call_count)

    with torch.inference_mode():
        learnt(release, *operands())
        assert slow_looks(3) == 0
    assert slow_looks(3) == 1
    for _ in range(10):
        assert slow_looks(1) == 0
        with torch.inference_mode():
            assert slow_looks(1) == 0
    report = prepared.report()
    assert (report["remembered"], report["failures"]) == (1, 0)
