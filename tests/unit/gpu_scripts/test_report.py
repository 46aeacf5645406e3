"""The table, and the status that it means."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu.catalogue import report

FACTS = {
    "distribution": "1.0",
    "fork": False,
    "gpu": "G",
    "gpus": 1,
    "capability": [9, 0],
    "driver": "580",
    "torch": "2",
    "cudnn": 91900,
    "cudnn_frontend": "1",
    "cuda_bindings": "13",
    "python": "3",
}


def result(verdict: str, note: str = "", **figures: Any) -> dict[str, Any]:
    return {"verdict": verdict, "note": note, "figures": figures, "seconds": 1.0}


def run_of(**results: dict[str, Any]) -> dict[str, Any]:
    cases = {
        key: {"id": key, "lane": "fp8-cudnn", "title": f"title of {key}", "hazards": ["A1"]}
        for key in ("B1", "B2", "B3")
    }
    wheels = {
        label: {
            "facts": {**FACTS, "fork": label == "fork"},
            "results": seen,
            "known": ["B1"] if label == "release" else [],
            "launcher": "fresh",
            "sha256": "ab",
        }
        for label, seen in results.items()
    }
    return {"date": "d", "command": "c", "seconds": 1.0, "cases": cases, "wheels": wheels}


RUN = run_of(
    release={
        "B1": result("pass"),
        "B2": result("fail", wrong="3 of 4"),
        "B3": result("not applicable", "needs two GPUs"),
    },
    fork={
        "B1": result("pass"),
        "B2": result("pass", bytes=0),
        "B3": result("not applicable", "needs two GPUs"),
    },
)


def test_the_table() -> None:
    text = report.markdown(RUN)
    assert "| B2 | fp8-cudnn | title of B2 | **fail**: wrong 3 of 4 | pass |" in text
    assert "| B3 | fp8-cudnn |" not in text  # it applies nowhere
    assert "| release | needs two GPUs | B3 |" in text
    assert "## Known there, and not reproduced in this run\n\n- release: B1" in text
    assert "- fork: pass, 1.0 s. bytes: 0" in text


def test_a_pipe_in_a_note_does_not_break_the_table() -> None:
    run = run_of(fork={"B1": result("error", "a|b\nc")})
    row = next(line for line in report.markdown(run).splitlines() if line.startswith("| B1"))
    assert row == "| B1 | fp8-cudnn | title of B1 | **error**: a\\|b c |"


@pytest.mark.parametrize("verdict", ["fail", "hang", "crash", "error"])
def test_only_forks_decide(verdict: str) -> None:
    bad = run_of(release={"B1": result(verdict)}, fork={"B1": result("pass")})
    assert report.failures(bad) == []
    assert report.failures(bad, forks_only=False) == [f"release B1: {verdict}"]
    worse = run_of(fork={"B1": result(verdict, "so")})
    assert report.failures(worse) == [f"fork B1: {verdict} so"]


def test_what_is_sent_is_of_the_fork() -> None:
    run = run_of(
        release={"B10.fp8-cudnn": result("fail", wrong=9)},
        fork={"B10.fp8-cudnn": result("pass", wrong=0), "B1": result("pass", other=1)},
    )
    lines = report.to_send(run).splitlines()
    assert lines[0].startswith("G SM90, driver 580")
    assert lines[1:] == ["B10.fp8-cudnn pass. wrong: 0"]
