"""Prepared launches in real releases: whatever happens between two calls, the libraries get the
launches that they would get without.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from graft.releases import RELEASES

from .conftest import Trees
from .trees import drive

pytestmark = pytest.mark.release

SCRIPT = "drive_prepared.py"
#: One before and one after the autotuner became a package, the default, the newest.
BASES = ("0.6.12", "0.6.16.post3", "0.7.4")
#: While these are so, every call takes the release's own path.
NEVER_WITHIN = ("tuning", "buckets", "rounded up", "capture", "trace", "skipped")
#: These change what is launched for every op with a tactic: the rest of a sequence differs.
TELLING = ("tuned", "tuned, cleared", "file loaded", "context with a file", "tuning")
EXAMPLES = os.environ.get("PREPARED_EXAMPLES", "80")


# What one process has driven is not driven again by another: the tests of a base stay together.
@pytest.fixture(
    scope="module",
    params=[
        pytest.param(base, marks=pytest.mark.xdist_group(f"prepared {base}")) for base in BASES
    ],
)
def base(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def changes(base: str, tree: Trees, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("tuned")
    found: dict[str, Any] = drive(tree(base, grafted=True), "changes", str(folder), script=SCRIPT)
    return found


def of(changes: dict[str, Any], name: str) -> dict[str, Any]:
    """The cases of one change, by op and backend."""
    found = {
        case.partition(": ")[2]: result
        for case, result in changes.items()
        if case.partition(": ")[0] == name
    }
    assert found, name
    return found


def test_the_same_launches(changes: dict[str, Any]) -> None:
    """Same plans, functions, tactics, operands, workspaces, streams and lock, for every change."""
    different = {case: result for case, result in changes.items() if not result["same"]}
    assert different == {}
    names = {case.partition(": ")[0] for case in changes}
    assert len(names) >= 30
    assert {case.partition(": ")[2].split()[0] for case in changes} == {
        *("bmm_fp8", "mm_bf16", "bmm_bf16", "mm_fp8", "mm_fp4", "mm_mxfp8", "bmm_mxfp8")
    }


def test_a_known_signature_is_launched_at_once(changes: dict[str, Any]) -> None:
    """The first call is watched, each later one is prepared, for every op and backend."""
    for case, result in of(changes, "nothing").items():
        report = result["report"]
        assert (report["misses"], report["hits"]) == (1, 3), case
        assert (report["failures"], report["refused"]) == (0, {}), case


def test_what_sends_every_call_down_the_releases_path(changes: dict[str, Any]) -> None:
    for name in NEVER_WITHIN:
        if name == "skipped" and not any(case.startswith("skipped:") for case in changes):
            continue  # 0.6.12 cannot
        for case, result in of(changes, name).items():
            assert result["report"]["hits within"] == 0, (name, case)
            assert result["report"]["hits"] > 0, (name, case)


def test_another_stream_needs_no_learning(changes: dict[str, Any]) -> None:
    for case, result in of(changes, "stream").items():
        assert result["report"]["hits within"] == 3, case


def test_the_changes_change_something(base: str, changes: dict[str, Any]) -> None:
    """A tuned launch is another one than an untuned one: the comparison can fail."""
    plain = of(changes, "nothing")
    for name in TELLING:
        for case, result in of(changes, name).items():
            if base == "0.6.12" and "backend_version" not in case and result["kinds"] == 1:
                # There cuDNN runs one plan for every tactic, unless shapes are given at each call.
                assert "cudnn" in case or "auto" in case
                continue
            assert result["kinds"] > plain[case]["kinds"], (name, case)
    for case, result in of(changes, "plans evicted").items():
        if " cudnn " in case:
            assert result["kinds"] > plain[case]["kinds"], case


def test_random_sequences(tree: Trees, base: str, tmp_path: Path) -> None:
    """Calls of a few signatures, with tuning, files, clearing, captures, streams, failures between.

    PREPARED_EXAMPLES sets how many sequences, HYPOTHESIS_PROFILE=soak takes fresh ones.
    """
    total = drive(tree(base, grafted=True), "sequences", str(tmp_path), EXAMPLES, script=SCRIPT)
    assert total["hits"] > int(EXAMPLES) / 2
    assert total["misses"] > 0


def test_nothing_is_left_out(tree: Trees, base: str) -> None:
    """On the release's own path nothing writes but the launch: torch makes an output and views."""
    found = drive(tree(base, grafted=True), "operators", script=SCRIPT)
    assert len(found) > 25
    for case, operators in found.items():
        writes = set(operators) - {
            "aten.empty.memory_format",
            *("aten.transpose.int", "aten.permute.default", "aten.unsqueeze.default"),
            *("aten.detach.default", "aten.view.dtype"),
        }
        assert writes == set(), case


@pytest.mark.parametrize("version", RELEASES)
def test_the_ops_look_as_they_did(tree: Trees, version: str) -> None:
    """Name, signature, documentation, attributes, pickling: nothing of a public op changes."""
    look: Callable[[bool], Any] = lambda grafted: drive(  # noqa: E731
        tree(version, grafted=grafted), "functions"
    )
    release, fork = look(False), look(True)
    assert len(release) == 7
    assert fork == release
