"""The same wheel by every door, and what the commands print."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from wheelfile import ROOT, graft, read

from graft.label import CURRENT, LABELS
from graft.record import row_of
from graft.releases import DEFAULT_BASE, RELEASES

pytestmark = pytest.mark.release

BASE = "0.6.16.post3"
WheelOf = Callable[[str], Path]


def name_of(version: str) -> str:
    return f"flashinfer_python-{version}+ws.{CURRENT}-py3-none-any.whl"


def copy_of_repository(folder: Path) -> Path:
    """What a build needs of the repository, in another place and with other times."""
    for name in ("graft", "flashinfer"):
        shutil.copytree(
            ROOT / name,
            folder / name,
            ignore=shutil.ignore_patterns("__pycache__", ".*"),
            copy_function=shutil.copyfile,
        )
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).is_file():
            shutil.copyfile(ROOT / name, folder / name)
    for path in folder.rglob("*"):
        os.utime(path, (1_000_000_000, 1_000_000_000))
    return folder


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_of_repository(tmp_path_factory.mktemp("repository"))


@pytest.fixture(scope="module")
def by_version(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Path:
    """The wheel built by its version, from the copy of the repository."""
    folder = tmp_path_factory.mktemp("by-version")
    done = graft("build", BASE, "-o", folder, root=repository)
    assert done.returncode == 0, done.stderr
    return folder / name_of(BASE)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, release_wheel: WheelOf) -> Path:
    """A folder that the release is installed into."""
    folder = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*pip, "--target", folder, release_wheel(BASE)], check=True)
    return folder


def test_the_default_base() -> None:
    assert DEFAULT_BASE == BASE


def test_two_builds_are_one(by_version: Path, repository: Path, tmp_path: Path) -> None:
    wanted = by_version.read_bytes()
    elsewhere = tmp_path / "another repository"
    elsewhere.mkdir()
    copy_of_repository(elsewhere)
    for path in elsewhere.rglob("*.py"):
        path.chmod(0o777)
        os.utime(path, (1_600_000_001, 1_600_000_001))
    for root, mask, more in (
        (repository, 0o077, {"PYTHONHASHSEED": "1", "TZ": "Asia/Tokyo", "LC_ALL": "C"}),
        (elsewhere, 0o000, {"PYTHONHASHSEED": "2", "SOURCE_DATE_EPOCH": "1"}),
    ):
        folder = tmp_path / f"{mask:o}"
        done = graft("build", "-o", folder, root=root, umask=mask, env=more)
        assert done.returncode == 0, done.stderr
        assert (folder / name_of(BASE)).read_bytes() == wanted


def test_by_the_wheels_path(
    by_version: Path, repository: Path, release_wheel: WheelOf, tmp_path: Path
) -> None:
    path = tmp_path / "renamed.whl"
    shutil.copyfile(release_wheel(BASE), path)
    done = graft("build", path, "-o", tmp_path, root=repository)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / name_of(BASE)).read_bytes() == by_version.read_bytes()


def test_from_the_installed_copy(
    by_version: Path, repository: Path, installed: Path, tmp_path: Path
) -> None:
    env = {"PYTHONPATH": str(installed)}
    done = graft("build", "installed", "-o", tmp_path, root=repository, env=env)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / name_of(BASE)).read_bytes() == by_version.read_bytes()


def test_an_installed_copy_that_was_changed(
    repository: Path, installed: Path, tmp_path: Path
) -> None:
    path = installed / "flashinfer" / "gemm" / "gemm_base.py"
    plain = path.read_bytes()
    env = {"PYTHONPATH": str(installed)}
    try:
        path.write_bytes(plain + b"# by hand\n")
        done = graft("build", "installed", "-o", tmp_path / "out", root=repository, env=env)
        assert done.returncode == 2
        assert done.stderr.splitlines() == [
            "graft: RECORD and the files disagree",
            "  flashinfer/gemm/gemm_base.py: altered (its sha256 is not the one in RECORD)",
        ]
        path.unlink()
        done = graft("build", "installed", "-o", tmp_path / "out", root=repository, env=env)
        assert "gemm_base.py: in RECORD, but missing" in done.stderr
    finally:
        path.write_bytes(plain)
    # With a RECORD that agrees it is still not the release.
    (record,) = installed.glob("flashinfer_python-*.dist-info/RECORD")
    rows = record.read_text()
    try:
        path.write_bytes(plain + b"# by hand\n")
        row = row_of("flashinfer/gemm/gemm_base.py", path.read_bytes())
        lines = [
            f"{row.path},{row.hash},{row.size}" if line.startswith(f"{row.path},") else line
            for line in rows.splitlines()
        ]
        record.write_text("\n".join(lines) + "\n")
        done = graft("build", "installed", "-o", tmp_path / "out", root=repository, env=env)
        assert done.returncode == 2
        assert "is not the released one" in done.stderr
    finally:
        path.write_bytes(plain)
        record.write_text(rows)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("base", [None, "0.6.14"])
def test_pip_wheel(by_version: Path, repository: Path, tmp_path: Path, base: str | None) -> None:
    env = {**os.environ, "FLASHINFER_BASE": base or ""}
    if base is None:
        del env["FLASHINFER_BASE"]
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "-q", "-w", tmp_path]
    done = subprocess.run(
        command, cwd=repository, env=env, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == [name_of(base or BASE)]
    if base is None:
        assert (tmp_path / name_of(BASE)).read_bytes() == by_version.read_bytes()
    else:
        assert graft("verify", tmp_path / name_of(base), root=repository).returncode == 0


def test_pip_wheel_says_why_not(repository: Path, tmp_path: Path) -> None:
    env = {**os.environ, "FLASHINFER_BASE": "0.6.11"}
    # The build's own requirements are at hand here already.
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "-w", tmp_path],
        cwd=repository,
        env=env,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode
    assert "graft: flashinfer-python 0.6.11 is not supported" in done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("base", [None, "0.6.14"])
def test_setup_py(by_version: Path, repository: Path, tmp_path: Path, base: str | None) -> None:
    env = {**os.environ, "FLASHINFER_BASE": base or ""}
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "bdist_wheel", "--dist-dir", tmp_path],
        cwd=repository,
        env=env,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == [name_of(base or BASE)]
    if base is None:
        assert (tmp_path / name_of(BASE)).read_bytes() == by_version.read_bytes()


# -- the other commands ------------------------------------------------------------------------


def test_tree(by_version: Path, repository: Path, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "tree"
    done = graft("tree", BASE, "-o", folder, root=repository)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{folder}\n"
    members = read(by_version)
    del members[next(name for name in members if name.endswith(".dist-info/RECORD"))]
    files = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
    assert files == members
    assert list(folder.parent.iterdir()) == [folder]
    # Never over something.
    done = graft("tree", BASE, "-o", folder, root=repository)
    assert done.returncode == 2
    assert "is not an empty folder" in done.stderr


@pytest.mark.parametrize("version", [BASE, "0.7.2.post1"])
def test_diff_is_what_git_applies(
    repository: Path, release_wheel: WheelOf, tmp_path: Path, version: str
) -> None:
    done = graft("diff", version, root=repository)
    assert (done.returncode, done.stderr) == (0, "")
    checkout = tmp_path / "checkout"
    with zipfile.ZipFile(release_wheel(version)) as archive:
        archive.extractall(checkout, [n for n in archive.namelist() if n.endswith(".py")])
    command = ["git", "-c", "core.autocrlf=false", "apply", "--whitespace=nowarn", "-"]
    # A repository of its own: inside another one git would leave out what that ignores.
    subprocess.run(["git", "init", "-q"], cwd=checkout, check=True)
    subprocess.run(command, cwd=checkout, input=done.stdout.encode(), check=True)
    built = graft("build", version, "-o", tmp_path, root=repository)
    assert built.returncode == 0, built.stderr
    members = read(tmp_path / name_of(version))
    files = {
        path.relative_to(checkout).as_posix(): path.read_bytes()
        for path in checkout.rglob("*.py")
        if ".git" not in path.parts
    }
    assert files == {name: data for name, data in members.items() if name.endswith(".py")}


def test_build_fits_a_screen(repository: Path, tmp_path: Path) -> None:
    done = graft("build", BASE, "-o", tmp_path, root=repository)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) < 40
    assert lines[0] == f"{BASE} -> {BASE}+ws.{CURRENT}"
    assert "  grow-sites      10  gemm_base.py 8, gemm_bf16_fp4_cudnn.py 2" in lines
    assert any(line.startswith("  verified: growing sites left: 0") for line in lines)
    path = tmp_path / name_of(BASE)
    assert lines[-2:] == [str(path), f"sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}"]


def test_build_as_json(repository: Path, tmp_path: Path) -> None:
    done = graft("build", BASE, "-o", tmp_path, "--json", root=repository)
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    path = tmp_path / name_of(BASE)
    assert report["wheel"] == str(path)
    assert report["base"] == BASE
    assert report["version"] == f"{BASE}+ws.{CURRENT}"
    assert report["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert report["sites"] == RELEASES[BASE].family.counts
    total = report["files_changed"] + report["files_added"] + report["files_unchanged"]
    # METADATA and WHEEL change; RECORD, graft.json and the notice are new.
    assert total == len(read(path)) - 5
    assert {proof["what"]: proof["count"] for proof in report["proofs"]}["growing sites left"] == 0


def test_verify(by_version: Path, repository: Path) -> None:
    done = graft("verify", by_version, root=repository)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert all(line.startswith("verified: ") for line in lines)
    done = graft("verify", by_version, "--json", root=repository)
    report = json.loads(done.stdout)
    assert report["wheel"] == str(by_version)
    assert len(report["proofs"]) == len(lines)
    assert all(set(proof) == {"what", "count", "note"} for proof in report["proofs"])


def test_releases() -> None:
    done = graft("releases")
    assert (done.returncode, done.stderr) == (0, "")
    for version, release in RELEASES.items():
        assert f"{version:13} {release.state}\n" in done.stdout
        assert f"sha256 {release.sha256}\n" in done.stdout
    assert done.stdout.count("grow-sites 10 ") == 11
    order = [line.split()[0] for line in done.stdout.splitlines() if line[0] != " "]
    assert order == list(RELEASES)


def test_releases_as_json() -> None:
    done = graft("releases", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    rows = json.loads(done.stdout)
    assert [row["version"] for row in rows] == list(RELEASES)
    for row in rows:
        release = RELEASES[row["version"]]
        assert row["sha256"] == release.sha256
        assert row["record_sha256"] == release.record_sha256
        assert row["state"] == release.state
        assert row["sites"] == release.family.counts
        assert set(row["own_lengths"]) == release.family.own_lengths


def test_label(repository: Path) -> None:
    done = graft("label", root=repository)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == f"{CURRENT}: {LABELS[CURRENT]!r}"


def test_label_follows_the_delta(repository: Path, tmp_path: Path) -> None:
    before = graft("label", root=repository).stdout
    for path in (
        "flashinfer/gemm_workspace/names.py",
        "graft/edits/retries.py",
        "graft/delta.py",
        "graft/releases.py",
        "graft/writer.py",
    ):
        copy = copy_of_repository(tmp_path / path.replace("/", "-"))
        with (copy / path).open("a") as out:
            out.write("# more\n")
        assert graft("label", root=copy).stdout != before


def test_the_reader_of_a_patch_may_go_away(repository: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "graft", "diff"],
        cwd=repository,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 1
