"""From facts to findings."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashinfer.gemm_workspace.doctor import releases, render
from flashinfer.gemm_workspace.doctor.autotune import Cache, Entry
from flashinfer.gemm_workspace.doctor.buckets import Tokens
from flashinfer.gemm_workspace.doctor.facts import Facts, Fork, Gpu, JitCache, Missing
from flashinfer.gemm_workspace.doctor.findings import Finding, Level, status
from flashinfer.gemm_workspace.doctor.gate import gate
from flashinfer.gemm_workspace.doctor.judge import judge
from flashinfer.gemm_workspace.doctor.logs import Found, Log

from .given import WHOLE, any_cache, any_facts, any_log, facts, flashinfer

SM120 = (Gpu("NVIDIA GeForce RTX 5090", (12, 0)),)
NO = Missing("because")
CUDNN = Entry("fp8_gemm", "CudnnFp8GemmRunner", 512, "((1, 512, 64))", False)
CUBLAS = Entry("fp8_gemm", "CublasFp8GemmRunner", 1, "((1, 1, 64))", True)


def codes(findings: list[Finding]) -> dict[str, Level]:
    return {finding.code: finding.level for finding in findings}


@given(any_facts, st.lists(any_cache, max_size=2), st.lists(any_log, max_size=2))
def test_any_mix_of_facts_has_a_verdict(facts: Facts, caches: list[Any], logs: list[Any]) -> None:
    findings = judge(facts, caches, logs)
    assert status(findings) in (0, 1, 2)
    levels = [list(Level).index(finding.level) for finding in findings]
    assert levels == sorted(levels)
    tokens = [Tokens(405, 482)]
    text = render.as_text(facts, caches, logs, tokens, findings)
    assert text.startswith(render.VERDICTS[status(findings)])
    assert all(each.isprintable() or each == "\n" for each in text)
    data = render.as_data(facts, caches, logs, tokens, findings)
    assert json.loads(json.dumps(data)) == data
    assert data["verdict"] == render.VERDICTS[data["status"]]


@given(any_facts)
def test_an_affected_release_is_never_called_healthy(facts: Facts) -> None:
    found = facts.flashinfer
    if not isinstance(found, Missing) and found.release in releases.AFFECTED and found.fork is None:
        assert status(judge(facts)) == 1


@given(any_facts)
def test_the_fork_alone_makes_no_one_affected_by_the_release(facts: Facts) -> None:
    found = facts.flashinfer
    if not isinstance(found, Missing) and isinstance(found.fork, Fork) and found.fork.whole:
        assert not {"moving-workspace", "sm12x-cudnn", "fork-damaged"} & set(codes(judge(facts)))


def test_the_healthy_machine() -> None:
    assert judge(facts()) == []
    assert render.headline(facts(), []) == (
        "healthy: no defect that this doctor knows.",
        "nothing",
    )


def test_healthy_says_what_is_not_known() -> None:
    verdict, _ = render.headline(facts(gpus=NO, cudnn=NO), [])
    assert verdict.endswith("(not known: GPUs, cuDNN).")


@pytest.mark.parametrize("release", sorted(releases.AFFECTED))
def test_an_affected_release(release: str) -> None:
    (finding,) = judge(facts(flashinfer=flashinfer(release)))
    assert (finding.code, finding.level) == ("moving-workspace", Level.AFFECTED)
    assert f"flashinfer_python-{release}+ws.<n>-py3-none-any.whl" in finding.do
    assert status([finding]) == 1


def test_where_its_gemms_cannot_run_it_says_so() -> None:
    (finding,) = judge(facts(flashinfer=flashinfer("0.6.14"), cudnn_frontend=NO))
    assert "Not reached here" in finding.what
    assert finding.level is Level.AFFECTED


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ({"flashinfer": NO}, {"no-flashinfer": Level.UNKNOWN}),
        ({"flashinfer": flashinfer("0.9.0")}, {"unknown-release": Level.UNKNOWN}),
        ({"flashinfer": flashinfer("0.7.4")}, {}),
        ({"flashinfer": flashinfer("0.7.1")}, {"plans-not-kept": Level.ADVICE}),
        ({"flashinfer": flashinfer("0.6.11.post3")}, {}),
        (
            {"flashinfer": flashinfer("0.6.11.post3"), "gpus": SM120},
            {"sm12x-cudnn": Level.AFFECTED},
        ),
        (
            {"flashinfer": flashinfer("0.6.11.post3"), "gpus": NO},
            {"sm12x-cudnn-unknown": Level.UNKNOWN},
        ),
        (
            {
                "flashinfer": flashinfer("0.6.11.post3"),
                "gpus": SM120,
                "cudnn": 92301,
                "cudnn_of_torch": 92301,
            },
            {},
        ),
        (
            {"flashinfer": flashinfer("0.6.17"), "gpus": SM120},
            {"moving-workspace": Level.AFFECTED, "sm12x-cudnn": Level.AFFECTED},
        ),
        (
            {"flashinfer": flashinfer("0.6.18"), "gpus": SM120},
            {"moving-workspace": Level.AFFECTED},
        ),
        ({"flashinfer": flashinfer("0.6.16.post3", NO)}, None),
        ({"torch": NO, "import_error": "no torch"}, {"no-torch": Level.UNKNOWN}),
        ({"import_error": "no"}, {"no-import": Level.UNKNOWN}),
        ({"cuda_bindings": NO}, {"no-bindings": Level.AFFECTED}),
        ({"cuda_bindings": NO, "image": "/img"}, {"no-bindings": Level.UNKNOWN}),
        ({"cuda_bindings": NO, "flashinfer": flashinfer("0.7.4")}, {}),
        ({"cubin": "0.6.16.post3", "jit_cache": "0.6.16.post3+cu130"}, {}),
        ({"cubin": "0.6.16"}, {"versions": Level.AFFECTED}),
        ({"jit_cache": "0.6.16.post2+cu130"}, {"versions": Level.AFFECTED}),
        (
            {"cubin": "0.6.16", "environment": {"FLASHINFER_DISABLE_VERSION_CHECK": "1"}},
            {"versions": Level.ADVICE},
        ),
        ({"cubin": "0.7.2", "flashinfer": flashinfer("0.7.4")}, {"versions": Level.ADVICE}),
        ({"cudnn_of_torch": 92301}, {"two-cudnn": Level.ADVICE}),
        ({"cudnn_mapped": ("/a/libcudnn.so.9", "/b/libcudnn.so.9")}, {"two-cudnn": Level.ADVICE}),
        ({"cudnn_mapped": ("/a/libcudnn.so.9", "/a/libcudnn_ops.so.9")}, {}),
        ({"jit": JitCache("/jit", 3, 2, None)}, {"jit-stale": Level.ADVICE}),
        ({"jit": JitCache("/jit", 3, 2, "/usr/bin/nvcc")}, {}),
        ({"jit": JitCache("/jit", 3, 0, None)}, {}),
        (
            {"environment": {"FLASHINFER_ALLOW_CUDNN_PLAN_BUILD_IN_CAPTURE": "1"}},
            {"builds-allowed": Level.ADVICE},
        ),
        (
            {"environment": {"FLASHINFER_GEMM_WORKSPACE_SHARE": "perhaps"}},
            {"setting": Level.ADVICE},
        ),
        ({"environment": {"FLASHINFER_GEMM_WORKSPACE_SEAL_POLICY": "Warn "}}, {}),
    ],
)
def test_findings(changed: dict[str, Any], wanted: dict[str, Level] | None) -> None:
    found = codes(judge(facts(**changed)))
    if wanted is None:
        wanted = {"fork-unreadable": Level.UNKNOWN, "moving-workspace": Level.AFFECTED}
    assert found == wanted


@pytest.mark.parametrize(
    ("files", "release", "level"),
    [
        ({"reverted": ("flashinfer/gemm/gemm_base.py",)}, "0.6.16.post3", Level.AFFECTED),
        ({"reverted": ("flashinfer/gemm/gemm_base.py",)}, "0.7.4", Level.UNKNOWN),
        ({"altered": ("flashinfer/utils.py",)}, "0.7.4", Level.UNKNOWN),
    ],
)
def test_a_fork_that_was_installed_over(files: dict[str, Any], release: str, level: Level) -> None:
    fork = Fork("ws.1", release, {}, **files)
    findings = judge(facts(flashinfer=flashinfer(release, fork)))
    (finding,) = [each for each in findings if each.code == "fork-damaged"]
    assert finding.level is level
    assert next(iter(files.values()))[0] in finding.what


@pytest.mark.parametrize(
    ("changed", "active"),
    [
        ({"gpus": SM120}, True),
        ({"gpus": SM120, "cudnn": 92300}, True),
        ({"gpus": SM120, "cudnn": 92301}, False),
        ({"gpus": SM120, "cudnn": NO}, True),
        ({"gpus": SM120, "cudnn": NO, "flashinfer": flashinfer("0.6.18")}, None),
        ({"gpus": SM120, "flashinfer": flashinfer("0.6.18")}, True),
        ({"gpus": SM120, "flashinfer": flashinfer("0.6.17")}, False),
        ({"gpus": (Gpu("a", (9, 0)), *SM120)}, True),
        ({"gpus": (Gpu("a", (12, 1)),)}, True),
        ({}, False),
        ({"gpus": NO}, None),
        ({"gpus": NO, "cudnn": 92301}, False),
        ({"flashinfer": NO}, None),
        ({"flashinfer": flashinfer("main"), "gpus": SM120}, None),
    ],
)
def test_the_gate(changed: dict[str, Any], active: bool | None) -> None:
    assert gate(facts(**changed)).active is active


def cache(*entries: Entry, metadata: Any = None, odd: int = 0) -> Cache:
    return Cache("/c.json", entries, metadata, odd, "x" if odd else "")


@pytest.mark.parametrize(
    ("entries", "inert", "untuned"),
    [
        ([CUDNN, CUBLAS], 1, 1),
        ([CUDNN, Entry(CUDNN.op, CUBLAS.runner, 512, CUDNN.shapes, True)], 1, 0),
        ([CUBLAS], 0, 0),
        ([Entry("fp4_gemm", "CudnnFp4GemmRunner", 512, "((512, 64))", False)], 0, 0),
    ],
)
def test_entries_that_the_gate_makes_inert(entries: list[Entry], inert: int, untuned: int) -> None:
    told = facts(gpus=SM120)
    findings = judge(told, [cache(*entries)])
    if inert:
        (finding,) = findings
        assert f"runner of {inert} entries" in finding.what
        assert f"{untuned} of their shapes" in finding.what
        assert "fresh folder" in finding.do
        assert finding.level is Level.ADVICE
    else:
        assert findings == []
    assert judge(facts(), [cache(*entries)]) == []  # no SM12x: the gate leaves cuDNN in
    (data,) = render.as_data(told, [cache(*entries)], [], [], findings)["autotune_caches"]
    assert (data["inert"], data["shapes_left_untuned"]) == (inert, untuned)


@pytest.mark.parametrize(
    ("metadata", "unlike"),
    [
        (None, False),
        ({"flashinfer_version": "0.6.16.post3", "cudnn_version": "91900"}, False),
        ({"flashinfer_version": "*", "cudnn_version": "91900", "more": "x"}, False),
        ({"flashinfer_version": "0.6.16.post3", "cudnn_version": "92301"}, True),
        ({"flashinfer_version": "0.6.16.post3"}, True),
        ({"flashinfer_version": "0.6.16.post3", "cudnn_version": None}, True),
        ({}, True),
    ],
)
def test_a_cache_of_another_environment(metadata: Any, unlike: bool) -> None:
    found = codes(judge(facts(), [cache(CUBLAS, metadata=metadata)]))
    assert ("cache-environment" in found) is unlike
    assert status(judge(facts(), [cache(CUBLAS, metadata=metadata)])) == 0


def test_other_things_of_caches() -> None:
    plain = Entry("fp8_gemm", "CudnnFp8GemmRunner", 1, "((1, 1))", True)
    assert codes(judge(facts(), [cache(plain)])) == {"cache-plain-index": Level.ADVICE}
    older = facts(flashinfer=flashinfer("0.6.14", WHOLE), metadata=NO)
    assert judge(older, [cache(plain)]) == []
    assert codes(judge(facts(), [cache(odd=2)])) == {"cache-odd": Level.ADVICE}
    assert codes(judge(facts(), [Missing("gone")])) == {"cache-unreadable": Level.UNKNOWN}


@pytest.mark.parametrize(
    ("kind", "level"),
    [
        ("gate", None),
        ("growth", None),
        ("refused", Level.AFFECTED),
        ("capture", Level.AFFECTED),
        ("memory", Level.ADVICE),
        ("cache", Level.ADVICE),
        ("fault", Level.UNKNOWN),
    ],
)
def test_logs(kind: str, level: Level | None) -> None:
    log = Log("/s.log", 9, {kind: Found(3, 4, "the line")})
    findings = judge(facts(), logs=[log])
    assert codes(findings) == ({f"log-{kind}": level} if level else {})
    assert all("the line" in finding.what for finding in findings)
    text = render.as_text(facts(), [], [log], [], findings)
    assert "3 lines, first 4:" in text


def test_a_fault_that_something_explains_is_no_riddle() -> None:
    log = Log("/s.log", 9, {"fault": Found(3, 4, "the line")})
    assert codes(judge(facts(flashinfer=flashinfer("0.6.14")), logs=[log])) == {
        "moving-workspace": Level.AFFECTED
    }


def test_a_log_that_cannot_be_read_to_its_end() -> None:
    for log in (Missing("gone"), Log("/s.log", 9, {}, "stopped after line 9: x")):
        assert status(judge(facts(), logs=[log])) == 2


def test_tokens_name_their_bucket_and_who_serves_it() -> None:
    told = facts(gpus=SM120)
    caches = [cache(CUDNN, CUDNN, CUBLAS)]
    text = render.as_text(told, caches, [], [Tokens(405, 482), Tokens(900, 900)], [])
    assert "405-482 tokens: M = 512" in text
    assert "CudnnFp8GemmRunner 2" in text
    assert "2 of them removed by the gate" in text
    assert "900 tokens: M = 1024\n    no GEMM is tuned for it: the untuned default serves" in text
    assert "405-482 tokens: M = 512" in render.as_text(told, [], [], [Tokens(405, 482)], [])
