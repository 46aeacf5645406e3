"""The grafted code runs: every cuDNN lane, refusal, gate and tuned cache file, release by release.

Each drive also runs on the unmodified release, where it must find the defect.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from graft.releases import RELEASES

from .conftest import Trees
from .trees import drive

pytestmark = pytest.mark.release

BASES = ("0.6.12", "0.6.14", "0.6.16.post3", "0.6.18.post1", "0.7.2.post1", "0.7.4")
AFFECTED = ("0.6.14", "0.6.16.post3", "0.6.18.post1")
REFUSED = "CudnnPlanBuildInCaptureError"
GROUPED = {
    "_run_cudnn_moe_grouped_gemm",
    "_run_cudnn_moe_block_scale_grouped_gemm_mxfp8",
    "_run_cudnn_moe_block_scale_grouped_gemm_fp4",
}


@pytest.mark.parametrize("base", BASES)
def test_no_user_of_a_workspace_ever_loses_it(tree: Trees, base: str) -> None:
    """Plans ask for 0 B to 300 MiB: what was handed out stays allocated, where it was (B1, B2)."""
    results = drive(tree(base, grafted=True), "lanes")
    assert len(results) == (11 if base == "0.6.12" else 13)  # bf16 x fp4 came with 0.6.14
    assert set(results) >= GROUPED
    assert {name: wrong for name, wrong in results.items() if wrong} == {}


@pytest.mark.parametrize("base", AFFECTED)
def test_the_release_takes_workspaces_away(tree: Trees, base: str) -> None:
    """The same drive sees the defect in every function of the unmodified release."""
    results = drive(tree(base, grafted=False), "lanes")
    assert len(results) == 13
    for name, wrong in results.items():
        assert any("have lost theirs" in line for line in wrong), name


@pytest.mark.parametrize("cudnn", ["92000", "92301"])
@pytest.mark.parametrize("base", BASES)
def test_nothing_is_built_under_capture(tree: Trees, base: str, cudnn: str) -> None:
    """Straight and through every runner's retry, with and without override shapes (B8, B9)."""
    results = drive(tree(base, grafted=True), "refusals", cudnn)
    # bf16 x fp4 asks for cuDNN 9.23.1 itself, before anything of ours.
    own = {"mm_bf16_fp4 cudnn": "ValueError"} if cudnn == "92000" else {}
    if base == "0.6.12":  # has neither that op nor mm_mxfp8 with cuDNN
        own = {}
    assert len(results["eager"]) == (5 if base == "0.6.12" else 7)
    for call, outcome in results["cold"].items():
        assert outcome == own.get(call.partition(" cudnn")[0] + " cudnn", REFUSED), call
    assert results["handle"] == REFUSED
    assert results["made"] == 0
    assert results["eager"] == results["warm"] == dict.fromkeys(results["eager"], "ran") | own
    if base not in ("0.6.12", "0.6.14"):  # there most runners use one plan for every tactic
        assert results["other"] == dict.fromkeys(results["eager"], REFUSED) | own


@pytest.mark.parametrize("base", AFFECTED)
def test_the_release_builds_under_capture(tree: Trees, base: str) -> None:
    """The same drive on the unmodified release: everything is built, and nothing is said."""
    results = drive(tree(base, grafted=False), "refusals", "92301")
    assert set(results["cold"].values()) == {"ran"}
    assert results["made"] > 0


def gated(sm: str, cudnn: int) -> bool:
    return sm.startswith("12.") and cudnn < 92301


@pytest.mark.parametrize("base", BASES)
def test_the_gate_drops_cudnn_exactly_where_it_should(tree: Trees, base: str) -> None:
    """SM 12.0 and 12.1 below cuDNN 9.23.1, in both places, never the only runner (A23, A36)."""
    results = drive(tree(base, grafted=True), "gate")
    for sm, lines in results["logged"].items():
        assert len(lines) == int(sm.startswith("12.")), sm
        for line in lines:
            assert line.startswith("Skipping cuDNN in bmm_fp8 auto candidates on SM12x")
    assert len(results["kept"]) == 2 * 2 * 4 * 4
    for case, kept in results["kept"].items():
        _, sm, _, cudnn, names = case.split(" ")
        wanted = names.split("+")
        if gated(sm, int(cudnn)) and len(wanted) > 1:
            wanted.remove("cudnn")
        assert kept == wanted, case


def test_the_release_does_not_gate(tree: Trees) -> None:
    """0.6.16.post3 keeps cuDNN everywhere; 0.6.18.post1 forgets the dispatch."""
    case = "12.0 cudnn 92000 cublas+cudnn"
    ungated = drive(tree("0.6.16.post3", grafted=False), "gate")["kept"]
    assert ungated[f"heuristic {case}"] == ungated[f"dispatch {case}"] == ["cublas", "cudnn"]
    partly = drive(tree("0.6.18.post1", grafted=False), "gate")["kept"]
    assert partly[f"heuristic {case}"] == ["cublas"]
    assert partly[f"dispatch {case}"] == ["cublas", "cudnn"]


@pytest.mark.parametrize("base", RELEASES)
def test_a_tuned_cache_file_keeps_working(tree: Trees, base: str, tmp_path: Path) -> None:
    """B30: the file that the release writes gives the same runner and tactic on the fork.

    Before a lane has grown, while it grows to 300 MiB, and after.
    """
    file = str(tmp_path / "tuned.json")
    release = drive(tree(base, grafted=False), "tune", file)
    assert release["errors"] == {}
    # 13 ops and backends in all; three of them came later.
    missing = {"0.6.12": 3, "0.6.13": 2, "0.6.14": 1, "0.6.15": 1, "0.6.15.post1": 1}
    assert len(release["chosen"]) == 13 - missing.get(base, 0)
    assert all(tactic != "-1" for _, tactic in release["chosen"].values())
    fork = drive(tree(base, grafted=True), "tuned", file)
    for when in ("before", "growing", "after"):
        assert fork[when] == release, when


@pytest.mark.parametrize("base", ["0.6.12", "0.6.16.post3"])
def test_the_release_forgets_what_it_tuned(tree: Trees, base: str, tmp_path: Path) -> None:
    """On the unmodified release a grown workspace voids entries of the same file."""
    file = str(tmp_path / "tuned.json")
    tuned = drive(tree(base, grafted=False), "tune", file)["chosen"]
    after = drive(tree(base, grafted=False), "tuned", file)["after"]["chosen"]
    assert [op for op in tuned if after[op] != tuned[op]]


@pytest.mark.parametrize("base", ["0.6.16.post3", "0.6.18.post1"])
def test_profiling_captures_leave_no_trail(tree: Trees, base: str) -> None:
    """B19, A21: the tuner captures each candidate on clones of a workspace that is too short.

    Each of those graphs dies; the next one takes its lane, and memory does not rise.
    """
    results = drive(tree(base, grafted=True), "profile")
    assert results["captures"] > 50
    under_capture = [nbytes for nbytes, capturing in results["allocated"] if capturing]
    assert 0 < len(under_capture) <= 2
    assert len(results["allocated"]) <= 4
