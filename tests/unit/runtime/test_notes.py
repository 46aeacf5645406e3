"""Notes of a learning call: what is noted, what spoils it, and that nobody else is."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from flashinfer.gemm_workspace.notes import Notes, noted, noted_runner, watched


class Library:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def go(self, *args: Any, **kwargs: Any) -> str:
        self.calls.append((args, kwargs))
        if "fail" in args:
            raise RuntimeError("fails")
        return "done"


class Runner:
    def __init__(self, inner: Any = None) -> None:
        self.inner = inner

    @noted_runner
    def __call__(self, inputs: Any, **kwargs: Any) -> Any:
        """Runs."""
        if self.inner is not None:
            self.inner(inputs, **kwargs)
        inputs.append("changed")
        return len(inputs)


def test_outside_a_learning_call_nothing_stands_between() -> None:
    library = Library()
    assert watched(library) is library
    assert Runner()([1], tactic=2) == 2
    assert Runner.__call__.__name__ == "__call__"
    assert Runner.__call__.__doc__ == "Runs."


def test_launches_and_runs() -> None:
    library, notes, runner = Library(), Notes(), Runner()
    result = noted(notes, lambda: (watched(library).go(1, x=2), runner(inputs=[3], tactic=4)))
    assert result == ("done", 2)
    assert library.calls == [((1,), {"x": 2})]
    (launch,) = notes.launches
    assert (launch.owner, launch.name, launch.args, launch.kwargs) == (
        library,
        "go",
        (1,),
        {"x": 2},
    )
    (run,) = notes.runs
    assert (run.runner, run.inputs, run.kwargs) == (runner, [3], {"tactic": 4})
    assert notes.spoilt is None
    assert watched(library) is library


def test_a_runner_that_a_runner_calls_is_its_own_business() -> None:
    notes = Notes()
    outer = Runner(Runner())
    noted(notes, lambda: outer([1], tactic=2))
    assert [run.runner for run in notes.runs] == [outer]
    noted(notes, lambda: Runner()([1]))
    assert len(notes.runs) == 2


@pytest.mark.parametrize("way", ["launch", "runner"])
def test_a_failure_spoils(way: str) -> None:
    notes, library = Notes(), Library()

    class Failing(Runner):
        @noted_runner
        def __call__(self, inputs: Any, **kwargs: Any) -> Any:
            raise RuntimeError("fails")

    def call() -> None:
        watched(library).go("fail") if way == "launch" else Failing()([])

    with pytest.raises(RuntimeError, match="fails"):
        noted(notes, call)
    assert notes.spoilt is not None
    assert (notes.launches, notes.runs) == ([], [])
    assert watched(library) is library


def test_a_retry_spoils() -> None:
    notes, library = Notes(), Library()

    def call() -> None:
        try:
            raise ValueError
        except ValueError:
            watched(library).go(1)

    noted(notes, call)
    assert notes.spoilt == "a retry after an error"


def test_a_caller_that_handles_an_error_does_not() -> None:
    library = Library()
    try:
        raise ValueError
    except ValueError:
        notes = Notes()
        noted(notes, lambda: watched(library).go(1))
    assert notes.spoilt is None


def test_another_ops_call_inside_spoils_the_outer_one_alone() -> None:
    outer, inner, library = Notes(), Notes(), Library()
    noted(outer, lambda: noted(inner, lambda: watched(library).go(1)))
    assert outer.spoilt == "another op's call inside"
    assert (len(outer.launches), len(inner.launches), inner.spoilt) == (0, 1, None)


def test_threads_have_notes_of_their_own() -> None:
    notes, library = Notes(), Library()

    def call() -> None:
        thread = threading.Thread(target=lambda: watched(library).go("theirs"))
        thread.start()
        thread.join(30)
        watched(library).go("mine")

    noted(notes, call)
    assert [launch.args for launch in notes.launches] == [("mine",)]


def test_the_first_reason_stays() -> None:
    notes = Notes()
    notes.spoil("one")
    notes.spoil("two")
    assert notes.spoilt == "one"
