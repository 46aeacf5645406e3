"""The tuner's state: every change of a cache is told, and reading tells nothing."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashinfer.gemm_workspace import tuning
from flashinfer.gemm_workspace.tuning import _DICT, _SET, Tuning

from .fake_release import AutoTuner

#: How to call each method of a dict and a set that could change it; the rest change nothing.
CALLS: dict[str, tuple[Any, ...]] = {
    "__setitem__": ("a", 2),
    "__delitem__": ("a",),
    "__ior__": ({"c": 3},),
    "clear": (),
    "pop": ("a",),
    "popitem": (),
    "setdefault": ("z", 1),
    "update": ({"y": 1},),
    "__iand__": ({"a"},),
    "__isub__": ({"a"},),
    "__ixor__": ({"a"},),
    "add": ("q",),
    "discard": ("a",),
    "remove": ("a",),
    "difference_update": ({"a"},),
    "intersection_update": ({"a"},),
    "symmetric_difference_update": ({"a", "q"},),
}


def telling(kind: Any, content: Any) -> tuple[Any, list[None]]:
    told: list[None] = []
    made = kind(content)
    made.changed = lambda: told.append(None)
    return made, told


@pytest.mark.parametrize(("kind", "plain"), [(_DICT, dict), (_SET, set)])
def test_every_method_that_changes_tells(kind: Any, plain: Any) -> None:
    """Found by trying every method of the plain type: whatever changes it must tell."""
    content = {"a": 1, "b": 2} if plain is dict else {"a", "b"}
    changing = 0
    for name in dir(plain):
        if name in ("__init__", "__class__", "__new__", "__setattr__", "__delattr__"):
            continue
        arguments = CALLS.get(name, ())
        if plain is set and name in ("pop", "update", "__ior__"):
            arguments = () if name == "pop" else ({"new"},)
        before = plain(content)
        try:
            getattr(before, name)(*arguments)
        except (TypeError, KeyError):
            continue
        made, told = telling(kind, content)
        getattr(made, name)(*arguments)
        assert made == before, name
        assert bool(told) == (before != content), name
        changing += before != content
    assert changing == (8 if plain is dict else 13)


@pytest.mark.parametrize(("kind", "plain"), [(_DICT, dict), (_SET, set)])
def test_a_copy_is_a_plain_one(kind: Any, plain: Any) -> None:
    made, _ = telling(kind, {"a": 1} if plain is dict else {"a"})
    for other in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert type(other) is plain
        assert other == made
    assert type(made.copy()) is plain or not hasattr(made.copy(), "changed")
    assert isinstance(made, plain)


@given(st.lists(st.sampled_from(["set", "del", "clear", "get", "len", "in"]), max_size=8))
def test_reads_tell_nothing(steps: list[str]) -> None:
    made, told = telling(_DICT, {"a": 1})
    for step in steps:
        before = dict(made), len(told)
        if step == "set":
            made["a"] = made.get("a", 0) + 1
        elif step == "del":
            made.pop("a", None)
        elif step == "clear":
            made.clear()
        else:
            {"get": lambda: made.get("a"), "len": lambda: len(made), "in": lambda: "a" in made}[
                step
            ]()
        if dict(made) != before[0]:
            assert len(told) > before[1]
        if step in ("get", "len", "in"):
            assert len(told) == before[1]


class Managed(AutoTuner):
    """A tuner of 0.7.0 or later."""

    def __init__(self) -> None:
        super().__init__()
        self._managed_cache: Any = None
        self._v2_local = threading.local()
        self._v2_local.active = False
        self._invalidated_file_keys: set[str] = set()


def met(kind: Any = AutoTuner) -> tuple[Tuning, Any, list[None]]:
    told: list[None] = []
    kind._instance = None
    tuning = Tuning({"AutoTuner": kind}, lambda: told.append(None))
    assert not tuning.steady()  # nobody has made one
    assert tuning.meet()
    assert tuning.steady()
    told.clear()
    return tuning, kind.get(), told


def test_it_stays_steady() -> None:
    tuning, _, told = met()
    assert all(tuning.steady() for _ in range(3))
    assert told == []


@pytest.mark.parametrize(
    "change",
    [
        lambda tuner: setattr(tuner, "profiling_cache", {}),
        lambda tuner: setattr(tuner, "_file_configs", {}),
        lambda tuner: setattr(type(tuner), "_instance", None),
        lambda tuner: setattr(type(tuner), "_instance", type(tuner)()),
        lambda tuner: setattr(tuner, "is_tuning_mode", True),
    ],
)
def test_what_forgets_everything(change: Callable[[Any], Any]) -> None:
    tuning, tuner, told = met()
    change(tuner)
    assert not tuning.steady()
    assert told
    tuner.is_tuning_mode = False
    assert tuning.meet()
    assert tuning.steady()


def test_another_choose_one() -> None:
    """A test that patches the tuner's choice gets its own."""

    class Patched(AutoTuner):
        pass

    tuning, _, told = met(Patched)
    Patched.choose_one = lambda *_: (None, None)  # type: ignore[assignment,method-assign]
    assert not tuning.steady()
    assert told


@pytest.mark.parametrize("name", ["profiling_cache", "_file_configs", "_invalidated_file_keys"])
def test_a_cache_that_changes(name: str) -> None:
    tuning, tuner, told = met(Managed)
    cache = getattr(tuner, name)
    cache.add("x") if isinstance(cache, set) else cache.update(x=1)
    assert told
    assert tuning.steady()


def test_a_managed_cache_or_context() -> None:
    tuning, tuner, told = met(Managed)
    tuner._managed_cache = object()
    assert not tuning.steady()
    tuner._managed_cache = None
    tuner._v2_local.active = True
    assert not tuning.steady()
    tuner._v2_local.active = False
    assert tuning.steady()
    assert told == []


@pytest.mark.parametrize("variable", tuning._VARIABLES)
def test_every_variable(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tuning, _, told = met()
    monkeypatch.setenv(variable, "7")
    assert not tuning.steady()
    assert len(told) == 1
    traced = variable == "FLASHINFER_TRACE_DUMP"
    assert tuning.steady() is not traced
    monkeypatch.delenv(variable)
    assert not tuning.steady()
    assert tuning.steady()


@pytest.mark.parametrize("value", ["", "0"])
def test_not_tracing(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tuning, *_ = met()
    monkeypatch.setenv("FLASHINFER_TRACE_DUMP", value)
    tuning.steady()
    assert tuning.steady()


class Lockless:
    profiling_cache: dict[str, Any] = {}  # noqa: RUF012
    _file_configs: dict[str, Any] = {}  # noqa: RUF012

    @classmethod
    def get(cls) -> Any:
        return cls()


class Foreign(AutoTuner):
    def __init__(self) -> None:
        super().__init__()

        class Other(dict):  # type: ignore[type-arg]
            pass

        self.profiling_cache = Other()


@pytest.mark.parametrize("kind", [Lockless, Foreign])
def test_a_tuner_that_cannot_be_watched(kind: Any) -> None:
    kind._instance = None
    tuning = Tuning({"AutoTuner": kind}, lambda: None)
    assert not tuning.meet()
    assert not tuning.steady()


def test_meeting_twice_replaces_nothing() -> None:
    tuning, tuner, told = met()
    caches = tuner.profiling_cache, tuner._file_configs
    assert tuning.meet()
    assert (tuner.profiling_cache, tuner._file_configs) == caches
    assert tuner.profiling_cache is caches[0]
    assert told == []


def test_a_cache_keeps_its_content() -> None:
    AutoTuner._instance = None
    tuner = AutoTuner.get()
    tuner.profiling_cache["a"] = 1
    tuning = Tuning({"AutoTuner": AutoTuner}, lambda: None)
    assert tuning.meet()
    assert tuner.profiling_cache == {"a": 1}
