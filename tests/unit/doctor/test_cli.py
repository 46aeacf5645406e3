"""The command line, as an operator runs it: a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flashinfer.gemm_workspace.doctor import cli

from .given import site_packages

ROOT = Path(__file__).parents[3]
DOCTOR = ROOT / "flashinfer" / "gemm_workspace" / "doctor"


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """The folder, by a Python without site-packages: no torch, no FlashInfer."""
    return subprocess.run(
        [sys.executable, "-S", str(DOCTOR), *map(str, arguments)],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent", **environment},
        check=False,
        timeout=300,  # a first start on a slow disk
    )


def test_without_torch_and_without_flashinfer() -> None:
    done = run()
    assert done.returncode == 2
    assert done.stdout.startswith("could not tell: FlashInfer was not found")
    assert "torch                  missing: ModuleNotFoundError" in done.stdout
    assert done.stderr == ""


def test_with_an_affected_release(tmp_path: Path) -> None:
    done = run("--site-packages", site_packages(tmp_path), "--json")
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert report["verdict"] == "affected"
    assert report["findings"][0]["code"] == "moving-workspace"
    assert report["facts"]["gpus"] == {
        "missing": "another image is examined, and nothing of it is run"
    }


def test_a_broken_install(tmp_path: Path) -> None:
    """The parent package does not import: the module form cannot run, the folder does."""
    site = site_packages(tmp_path)
    (site / "flashinfer" / "__init__.py").write_text("raise RuntimeError('cubin 1 is not 2')\n")
    (site / "torch.py").write_text("import os, sys\nprint('half a line', end='')\nos.abort()\n")
    done = run("--json", PYTHONPATH=str(site))
    report = json.loads(done.stdout)
    assert report["status"] == 1
    died = "the child process was killed by SIGABRT, "
    assert report["facts"]["torch"] == {"missing": died + "in this step"}
    assert report["facts"]["import_error"] == died + "before this step"
    (site / "torch.py").write_text("raise ImportError('libcudart.so.13')\n")
    report = json.loads(run("--json", PYTHONPATH=str(site)).stdout)
    assert report["facts"]["torch"] == {"missing": "ImportError: libcudart.so.13"}
    assert report["facts"]["import_error"] == "RuntimeError: cubin 1 is not 2"


def test_it_leaves_nothing_behind(tmp_path: Path) -> None:
    site = site_packages(tmp_path / "site")
    (site / "flashinfer" / "__init__.py").write_text(
        "import os, pathlib\n"
        "pathlib.Path(os.environ['FLASHINFER_WORKSPACE_BASE'], 'x').write_text('')\n"
        "assert os.environ['CUDA_VISIBLE_DEVICES'] == ''\n"
    )
    (tmp_path / "home").mkdir()
    (tmp_path / "tmp").mkdir()
    done = run(
        *("--json",),
        HOME=str(tmp_path / "home"),
        TMPDIR=str(tmp_path / "tmp"),
        PYTHONPATH=str(site),
    )
    facts = json.loads(done.stdout)["facts"]
    # The stand-in has no version, which is asked last.
    assert facts["import_error"].startswith("AttributeError")
    assert [*(tmp_path / "home").iterdir(), *(tmp_path / "tmp").iterdir()] == []
    assert not list(site.rglob("*.pyc"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "ten"], "'ten' is no number of tokens"),
        (["--site-packages", "/nonexistent"], "/nonexistent: no such folder"),
        (["--sm", "blackwell"], "'blackwell' is no compute capability"),
        (["--nothing"], "unrecognized arguments: --nothing"),
    ],
)
def test_arguments_without_a_meaning(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert message in line


def test_files_that_are_not_there_or_no_caches(tmp_path: Path) -> None:
    site = site_packages(tmp_path / "site", "0.7.4", torch="2.11.0")
    cut = tmp_path / "cut.json"
    cut.write_text('{"_metadata": {')
    hostile = tmp_path / "server.log"
    hostile.write_bytes(b"\x1b]0;owned\x07 CudnnPlanBuildInCaptureError \xff\n")
    done = run(
        *("--site-packages", site, "--autotune-cache", cut, "--autotune-cache", "/nonexistent"),
        *("--log", hostile, "--log", "/nonexistent", "--tokens", "405-482"),
    )
    assert done.returncode == 1  # the refusal in the log
    assert done.stderr == ""
    assert "cut short or edited, not JSON" in done.stdout
    assert "log: /nonexistent: No such file or directory" in done.stdout
    assert "\x1b" not in done.stdout
    assert "\\x1b]0;owned" in done.stdout
    assert "Traceback" not in done.stdout


def test_surrogates_of_a_hand_edited_file_are_printed(tmp_path: Path) -> None:
    site = site_packages(tmp_path / "site", "0.7.4", torch="2.11.0")
    edited = tmp_path / "c.json"
    edited.write_text('{"_metadata": {"gpu": "\\ud800"}, "\\ud800": ["R", 1]}')
    for more in ([], ["--json"]):
        done = run("--site-packages", site, "--autotune-cache", edited, *more, LC_ALL="C")
        assert done.returncode == 0, done.stderr
        assert "ud800" in done.stdout


def test_a_terminal_without_the_letters_of_a_path(tmp_path: Path) -> None:
    site = site_packages(tmp_path / "ünïcode", "0.7.4", torch="2.11.0")
    done = run("--site-packages", site, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "\\xfcn\\xefcode" in done.stdout


def test_its_modules_hide_no_others(tmp_path: Path) -> None:
    site = site_packages(tmp_path)
    (site / "torch.py").write_text("import judge\n")
    torch = json.loads(run("--json", PYTHONPATH=str(site)).stdout)["facts"]["torch"]
    assert torch == {"missing": "ModuleNotFoundError: No module named 'judge'"}


def test_the_readers_end_may_go_away(tmp_path: Path) -> None:
    site = site_packages(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-S", str(DOCTOR), "--site-packages", str(site)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() in (1, 2)


def test_the_module_form_where_the_parents_import(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "flashinfer.gemm_workspace.doctor"),
            *("--site-packages", str(site_packages(tmp_path, fork=True)), "--sm", "9.0"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 2, done.stderr
    assert "active, ws.1 over 0.6.16.post3" in done.stdout


def test_caches_of_engines_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli.gather, "of_this_environment", _facts)
    folder = tmp_path / ".cache/vllm/flashinfer_autotune_cache/0.6.16.post3/120f/abc"
    folder.mkdir(parents=True)
    key = "('fp8_gemm', 'CudnnFp8GemmRunner', ((1, 512, 64), (1, 64, 32)), ())"
    metadata = {"flashinfer_version": "0.6.16.post3", "cudnn_version": "91900"}
    content: dict[str, Any] = {"_metadata": metadata, key: ["CudnnFp8GemmRunner", [1, []]]}
    (folder / "autotune_configs.json").write_text(json.dumps(content))
    (folder / "cut.json").write_text("{")
    other = {**content, "_metadata": {**metadata, "flashinfer_version": "0.6.11"}}
    (folder / "other.json").write_text(json.dumps(other))
    assert cli.main(["--tokens", "405-482"], {"HOME": str(tmp_path)}) == 0
    text = capsys.readouterr().out
    assert "the gate removes the runner of 1 entries" in text
    assert text.count("autotune cache ") == 1
    assert "405-482 tokens: M = 512" in text


def _facts(environment: object, sm: object) -> Any:
    from .given import facts
    from .test_judge import SM120

    return facts(gpus=SM120)


def test_a_defect_of_its_own_is_no_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(environment: object, sm: object) -> Any:
        raise ZeroDivisionError("no")

    monkeypatch.setattr(cli.gather, "of_this_environment", fails)
    assert cli.main([], {}) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("doctor: a defect of its own: ZeroDivisionError('no') at ")
    assert "test_cli.py:" in line
