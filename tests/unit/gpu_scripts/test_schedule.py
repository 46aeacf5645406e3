"""Which job runs when, and what its end is called."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.gpu.catalogue.schedule import Job, run, verdict_of

PASS = json.dumps({"verdict": "pass", "figures": {"wrong": 0}})


@pytest.mark.parametrize(
    ("status", "stdout", "verdict", "note"),
    [
        (0, PASS, "pass", ""),
        (0, f"a library printed\n{PASS}\n", "pass", ""),
        (0, json.dumps({"verdict": "fail", "note": "so"}), "fail", "so"),
        (0, "", "error", "printed no result, but 'nothing'"),
        (0, "garbage", "error", "printed no result, but 'garbage'"),
        (0, '{"verdict": "splendid"}', "error", "printed no result"),
        (0, '["pass"]', "error", "printed no result"),
        (0, f"{PASS}\nand more", "error", "printed no result, but 'and more'"),
        (1, "", "error", "exit status 1: said last"),
        (1, PASS, "error", "exit status 1"),
        (-11, "", "crash", "SIGSEGV"),
        (-6, PASS, "crash", "SIGABRT after it said pass"),
        (-99, "", "crash", "signal 99"),
    ],
)
def test_what_an_end_is_called(status: int, stdout: str, verdict: str, note: str) -> None:
    result = verdict_of(status, stdout, "first\nsaid last\n", 1.0)
    assert result["verdict"] == verdict
    assert note in result["note"]
    assert ("stderr" in result) == (verdict in ("error", "crash"))


def test_a_process_that_the_watchdog_ended_hangs_whatever_it_printed() -> None:
    assert verdict_of(-9, PASS, "", 9.0, limit=8.0)["note"] == "no end after 8 s after it said pass"
    assert verdict_of(-9, "", "", 9.0, limit=8.0)["verdict"] == "hang"


class Fake:
    """A machine with a clock of its own, on which a process takes as long as it says."""

    def __init__(self, takes: dict[str, float], stubborn: frozenset[str] = frozenset()) -> None:
        self.now, self.takes, self.stubborn = 0.0, takes, stubborn
        self.running: dict[str, float] = {}
        self.together: list[frozenset[str]] = []
        self.order: list[str] = []
        self.killed: list[str] = []

    def start(self, arguments: list[str], stdout: Path, stderr: Path, environment: Any) -> Any:
        name = arguments[0]
        self.running[name] = self.now
        self.order.append(name)
        self.together.append(frozenset(self.running))
        stdout.write_text(PASS)
        stderr.write_text("")
        return _Process(self, name)

    def close(self) -> None: ...

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def run(self, jobs: list[Job], folder: Path, at_once: int) -> None:
        clock = lambda: self.now  # noqa: E731
        run(jobs, {"w": self}, folder, at_once, clock=clock, sleep=self.sleep)


class _Process:
    def __init__(self, fake: Fake, name: str) -> None:
        self._fake, self._name = fake, name

    def status(self) -> int | None:
        fake, name = self._fake, self._name
        if name in fake.killed and name not in fake.stubborn:
            fake.running.pop(name, None)
            return -9
        if fake.now - fake.running[name] < fake.takes.get(name, 1.0):
            return None
        fake.running.pop(name)
        return 0

    def kill(self) -> None:
        self._fake.killed.append(self._name)


def job(name: str, seconds: float = 10, **settings: Any) -> Job:
    return Job("w", name, [name], seconds, **settings)


def test_a_hang_is_ended_and_the_rest_goes_on(tmp_path: Path) -> None:
    jobs = [job("hangs", 5), job("runs")]
    fake = Fake({"hangs": 1e9})
    fake.run(jobs, tmp_path, 2)
    assert [each.result and each.result["verdict"] for each in jobs] == ["hang", "pass"]
    assert fake.killed == ["hangs"]


def test_a_process_that_cannot_be_ended_is_given_up(tmp_path: Path) -> None:
    jobs = [job("stuck", 5), job("runs")]
    Fake({"stuck": 1e9}, frozenset({"stuck"})).run(jobs, tmp_path, 1)
    assert [each.result and each.result["verdict"] for each in jobs] == ["hang", "pass"]


@given(
    st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=8),
    st.integers(1, 4),
)
def test_never_more_than_asked_and_alone_is_alone(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[tuple[int, bool]], at_once: int
) -> None:
    jobs = [job(f"job{n}", 50, alone=alone) for n, (_, alone) in enumerate(kinds)]
    fake = Fake({f"job{n}": takes / 10 for n, (takes, _) in enumerate(kinds)})
    fake.run(jobs, tmp_path_factory.mktemp("jobs"), at_once)
    alone = {each.key for each in jobs if each.alone}
    assert all(len(names) <= at_once for names in fake.together)
    assert all(len(names) == 1 for names in fake.together if names & alone)
    assert len(fake.order) == len(jobs)
    assert all(each.result is not None for each in jobs)


def test_after_and_only_if(tmp_path: Path) -> None:
    first, second = job("warm", 1), job("case", 50, only_if=[("w", "warm")])
    third = job("third", 90, after=[("w", "case"), ("w", "nobody")])
    fake = Fake({})
    fake.run([third, second, first], tmp_path, 4)
    assert fake.order == ["warm", "case", "third"]


def test_a_case_is_not_run_when_what_it_needs_did_not_pass(tmp_path: Path) -> None:
    warm, case = job("warm", 1), job("case", only_if=[("w", "warm")])
    fake = Fake({"warm": 1e9})
    fake.run([case, warm], tmp_path, 4)
    assert fake.order == ["warm"]
    assert case.result is not None
    assert case.result["verdict"] == "error"
    assert "warm did not pass: no end after 1 s" in case.result["note"]


def test_two_that_wait_for_each_other_both_run(tmp_path: Path) -> None:
    names = ["one", "two"]
    jobs = [job(a, after=[("w", b)]) for a, b in itertools.permutations(names, 2)]
    fake = Fake({})
    fake.run(jobs, tmp_path, 2)
    assert sorted(fake.order) == names
