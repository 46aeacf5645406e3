"""The doctor's table against the build's, which is not shipped."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from flashinfer.gemm_workspace import gate as runtime_gate
from flashinfer.gemm_workspace import settings
from flashinfer.gemm_workspace.doctor import releases, switches
from flashinfer.gemm_workspace.doctor.caches import GATED
from flashinfer.gemm_workspace.doctor.logs import MARKS
from graft.releases import FIRST_AFFECTED, RELEASES, state_of


def test_the_tables_are_one() -> None:
    def those(words: str) -> set[str]:
        return {version for version, row in RELEASES.items() if words in row.state}

    assert those("affected:") == releases.AFFECTED
    assert those("plans of captured graphs are not kept") == releases.PLANS_NOT_KEPT
    assert set(RELEASES) == releases.KNOWN
    assert FIRST_AFFECTED.release == releases.FIRST_AFFECTED
    gated = {version for version in releases.KNOWN if releases.has_gate(version)}
    assert gated == those("SM12x gate present") | releases.PLANS_NOT_KEPT | releases.FIXED


def test_older_releases_are_another_shape() -> None:
    assert releases.is_older_shape("0.6.11.post3")
    assert "older shape" in state_of("0.6.11.post3")
    for version in (*releases.KNOWN, "0.8.0", "main", "0.6.12rc1"):
        assert not releases.is_older_shape(version)


def test_the_gate_is_the_runtimes() -> None:
    assert releases.GATE_BACKEND == runtime_gate.WANTED
    source = Path(runtime_gate.__file__).read_text()
    (mark,) = MARKS["gate"]
    assert mark.decode() in source
    assert GATED == {"fp8_gemm": "CudnnFp8GemmRunner"}


def test_the_switches_are_the_runtimes() -> None:
    read = {
        f"FLASHINFER_GEMM_WORKSPACE_{call.args[1].value}": ast.literal_eval(call.args[2])
        for call in ast.walk(ast.parse(Path(settings.__file__).read_text()))
        if isinstance(call, ast.Call)
        and getattr(call.func, "id", "") == "_one_of"
        and isinstance(call.args[1], ast.Constant)
    }
    assert read
    for name, values in read.items():
        assert set(switches.SWITCHES[name]) == set(values), name
    assert set(switches.SWITCHES) - set(read) == {settings.ALLOW}


def test_what_the_runtime_says_is_what_a_log_is_searched_for() -> None:
    runtime = Path(settings.__file__).parent
    said = "\n".join(path.read_text() for path in runtime.glob("*.py"))
    joined = "".join(part for part in said.replace('"\n', '"').split('" "'))
    for kind in ("gate", "growth", "refused", "sealed", "lanes", "memory"):
        for mark in MARKS[kind]:
            assert mark.decode().strip() in joined, mark


@pytest.mark.parametrize(
    ("release", "backend", "frontend", "wanted"),
    [
        ("0.6.16.post3", 92300, "1.24.0", False),
        ("0.6.16.post3", 92301, "1.0", True),
        ("0.7.4", 92301, "", True),
        ("0.6.12", 92100, "1.20.0", True),
        ("0.6.12", 92099, "1.30.0", False),
        ("0.6.15.post1", 92300, "1.23.9", False),
        ("0.6.15.post1", 92300, "1.24.0", True),
        ("0.6.15.post1", 92300, "one", None),
        ("main", 92301, "1.24.0", None),
    ],
)
def test_override_shape(release: str, backend: int, frontend: str, wanted: bool | None) -> None:
    assert releases.override_shape(release, backend, frontend) is wanted
