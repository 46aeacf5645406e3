"""The command over stand-in children: real processes, no GPU, no torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.catalogue import runner

from .conftest import STAND_IN

MakeWheel = Callable[[str], Path]

ENDS = {
    "passes": ("pass", ""),
    "fails": ("fail", "as it must"),
    "crashes": ("crash", "SIGSEGV"),
    "exits": ("error", "exit status 7: what it said last"),
    "raises": ("error", "exit status 1"),
    "garbage": ("error", "printed no result"),
    "silent": ("error", "printed no result, but 'nothing'"),
    "environment": ("pass", ""),
    "prints-after": ("pass", ""),
    "compiled.fp8-cublas": ("pass", ""),
    "elsewhere": ("not applicable", "needs two GPUs"),
}


def results(out: Path, label: str = "1.0") -> dict[str, Any]:
    run = json.loads((out / "catalogue.json").read_text())
    found: dict[str, Any] = run["wheels"][label]["results"]
    return found


@pytest.mark.parametrize("how", ["--fresh", "forked"])
def test_every_way_to_end(
    how: str, make_wheel: MakeWheel, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(make_wheel("1.0")), "-o", str(tmp_path / "out"), "-j", "4"]
    status = runner.main([*arguments, *([how] if how == "--fresh" else [])], STAND_IN)
    assert status == 0  # it is no fork
    seen = results(tmp_path / "out")
    for key, (verdict, note) in ENDS.items():
        assert seen[key]["verdict"] == verdict, key
        assert note in seen[key]["note"], key
    assert seen["fails"]["figures"] == {"wrong": 3}
    assert seen["environment"]["figures"] == {"set": "7"}
    if how == "--fresh":
        assert "SIGABRT after it said pass" in seen["crashes-after"]["note"]
    table = (tmp_path / "out" / "catalogue.md").read_text()
    assert "| **fail**: as it must |" in table
    assert "forked after the imports" in table or how == "--fresh"
    assert "passes" in capfd.readouterr().out


def test_a_fork_that_is_not_fine_is_status_1(
    make_wheel: MakeWheel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("STAND_IN_FORK", "1")
    arguments = [str(make_wheel("1.0")), "-o", str(tmp_path / "out")]
    assert runner.main([*arguments, "-k", "passes,elsewhere"], STAND_IN) == 0
    assert runner.main([*arguments, "-k", "passes,fails"], STAND_IN) == 1
    assert "1.0 fails: fail as it must" in capsys.readouterr().out


def test_a_server_that_does_not_come_is_done_without(
    make_wheel: MakeWheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_SERVES", "0")
    out = tmp_path / "out"
    assert runner.main([str(make_wheel("1.0")), "-o", str(out), "-k", "passes"], STAND_IN) == 0
    assert results(out)["passes"]["verdict"] == "pass"
    assert "no server: it does not serve" in (out / "catalogue.md").read_text()


def test_what_does_not_compile_is_not_run(
    make_wheel: MakeWheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_WARM", "fail")
    out = tmp_path / "out"
    runner.main([str(make_wheel("1.0")), "-o", str(out), "-k", "compiled"], STAND_IN)
    assert "warm.fp8-cublas did not pass" in results(out)["compiled.fp8-cublas"]["note"]


def refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str], out: Path | None = None
) -> str:
    """Exit status 2, one line, nothing written; the line."""
    assert runner.main(arguments, STAND_IN) == 2
    said = capsys.readouterr()
    assert said.out == ""
    lines = said.err.strip().splitlines()
    assert len(lines) == 1, said.err
    assert out is None or not out.exists()
    return lines[0]


def test_bad_input(
    make_wheel: MakeWheel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    wheel = str(make_wheel("1.0"))
    assert "no wheel named" in refused([], capsys)
    assert "no wheel nowhere.whl" in refused(["nowhere.whl"], capsys)
    assert "two wheels are called 1.0" in refused([wheel, wheel], capsys)
    assert "-j is 0" in refused([wheel, "-j", "0"], capsys)
    assert f"-o {wheel}/a: {wheel} is no folder" in refused([wheel, "-o", f"{wheel}/a"], capsys)
    assert "--site /nowhere is no folder" in refused([wheel, "--site", "/nowhere"], capsys)
    broken = tmp_path / "flashinfer_python-2.0-py3-none-any.whl"
    broken.write_bytes(b"no archive")
    assert "cannot be unpacked" in refused([str(broken)], capsys)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "holds no flashinfer package" in refused([str(empty)], capsys)
    assert "no case is called B99" in refused([wheel, "-k", "B99"], capsys)
    monkeypatch.setenv("STAND_IN_DEVICE", "none")
    out = tmp_path / "out"
    said = refused([wheel, "-o", str(out)], capsys, out)
    assert "no CUDA device to run on: none in this test" in said


def test_a_folder_and_labels(make_wheel: MakeWheel, tmp_path: Path) -> None:
    folder = tmp_path / "unpacked"
    (folder / "flashinfer").mkdir(parents=True)
    (folder / "flashinfer" / "__init__.py").touch()
    (folder / "flashinfer_python-3.0+ws.1.dist-info").mkdir()
    out = tmp_path / "out"
    arguments = [str(folder), f"mine={make_wheel('1.0')}", "-o", str(out), "-k", "passes"]
    assert runner.main(arguments, STAND_IN) == 0
    run = json.loads((out / "catalogue.json").read_text())
    assert list(run["wheels"]) == ["3.0+ws.1", "mine"]
