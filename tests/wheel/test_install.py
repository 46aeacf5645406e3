"""The grafted wheel in a real environment: over the base, back again, and gone."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess

import packaging
import pytest
from wheelfile import ROOT, graft, read, with_record, write

from graft.label import CURRENT

pytestmark = pytest.mark.release

BASE = "0.6.16.post3"
FORK = f"{BASE}+ws.{CURRENT}"
WheelOf = Callable[[str], Path]


class Environment:
    """A virtual environment without this one's packages, without an index and without torch."""

    def __init__(self, folder: Path, wheels: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        self.python = folder / "bin" / "python"
        self.bin = folder / "bin"
        (self.site,) = folder.glob("lib/python*/site-packages")
        #: What is there before anything of flashinfer is.
        self.empty: set[str] = set()
        self.env: dict[str, str | None] = {
            "PYTHONPATH": None,
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(wheels),
            "PIP_NO_COMPILE": "1",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }

    def run(self, *command: str | Path, status: int = 0, **more: str) -> str:
        env = {k: v for k, v in {**os.environ, **self.env, **more}.items() if v is not None}
        done = subprocess.run(
            [self.python, *command],
            cwd=self.site.parent,
            env=env,
            check=False,
            capture_output=True,
            text=True,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout

    def pip(self, *arguments: str | Path, status: int = 0) -> str:
        return self.run("-m", "pip", *arguments, status=status)

    def version(self) -> str:
        code = "import importlib.metadata as m; print(m.version('flashinfer-python'))"
        return self.run("-c", code).strip()

    def files(self) -> set[str]:
        """Everything that an installation can leave: below site-packages, and the scripts."""
        found = {*self.site.rglob("*"), *self.bin.iterdir()}
        # pip's own byte code comes and goes as it runs.
        return {str(p) for p in found if "__pycache__" not in p.parts or "flashinfer" in p.parts}

    def is_the_base(self, base: Path) -> bool:
        return self.version() == BASE and self.holds(base)

    def holds(self, wheel: Path) -> bool:
        """Every file of the wheel is there as it is in the wheel, and no other module is."""
        members = {name: data for name, data in read(wheel).items() if "/RECORD" not in name}
        modules = {
            p.relative_to(self.site).as_posix() for p in self.site.glob("flashinfer/**/*.py")
        }
        assert modules == {n for n in members if n.startswith("flashinfer/") and n.endswith(".py")}
        return all((self.site / name).read_bytes() == data for name, data in members.items())


@pytest.fixture(scope="module")
def base(release_wheel: WheelOf) -> Path:
    return release_wheel(BASE)


@pytest.fixture(scope="module")
def fork(grafted: WheelOf) -> Path:
    return grafted(BASE)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Environment:
    """With a package beside it that pins the base; used by all tests in turn."""
    folder = tmp_path_factory.mktemp("install")
    environment = Environment(folder / "venv", base.parent)
    dummy = folder / "engine-1-py3-none-any.whl"
    info = "engine-1.dist-info"
    members = {
        "engine.py": b"",
        f"{info}/METADATA": (
            "Metadata-Version: 2.1\nName: engine\nVersion: 1\n"
            f"Requires-Dist: flashinfer-python=={BASE}\n"
        ).encode(),
        f"{info}/WHEEL": (
            b"Wheel-Version: 1.0\nGenerator: by hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        ),
        f"{info}/RECORD": b"",
    }
    write(with_record(members), dummy)
    environment.pip("install", "-q", "--no-deps", dummy)
    environment.empty = environment.files()
    return environment


@pytest.fixture
def based(bare: Environment, base: Path) -> Environment:
    """The environment with the base in it."""
    return with_wheel(bare, BASE, base)


@pytest.fixture
def forked(bare: Environment, fork: Path) -> Environment:
    """The environment with the fork in it."""
    return with_wheel(bare, FORK, fork)


def with_wheel(bare: Environment, version: str, wheel: Path) -> Environment:
    # An installation takes seconds, so what an earlier test has left is taken as it is.
    if not bare.site.joinpath(f"flashinfer_python-{version}.dist-info").is_dir():
        bare.pip("install", "-q", "--no-deps", "--force-reinstall", wheel)
    return bare


def test_back_by_file(forked: Environment, base: Path) -> None:
    forked.pip("install", "-q", "--force-reinstall", "--no-deps", base)
    assert forked.is_the_base(base)


def test_over_the_base(based: Environment, base: Path, fork: Path) -> None:
    assert based.is_the_base(base)
    # Its own requirements are not here, so pip is not happy; it must not be less so.
    unhappy = based.pip("check", status=1)
    assert "engine" not in unhappy

    based.pip("install", "-q", "--no-deps", fork)
    assert based.version() == FORK
    assert based.holds(fork)
    assert not list(based.site.glob(f"flashinfer_python-{BASE}.dist-info"))
    assert based.pip("check", status=1).replace(FORK, BASE) == unhappy

    # What flashinfer.__version__ is taken from; cubin and jit-cache compare with it.
    meta = (based.site / "flashinfer" / "_build_meta.py").read_bytes()
    assert meta == read(base)["flashinfer/_build_meta.py"]
    scope: dict[str, str] = {}
    exec(meta, scope)
    assert scope["__version__"] == BASE

    script = based.bin / "flashinfer"
    assert os.access(script, os.X_OK)
    assert "from flashinfer.__main__ import cli" in script.read_text()


def test_pip_check_still_sees_a_requirement_of_another_base(forked: Environment) -> None:
    metadata = forked.site / "engine-1.dist-info" / "METADATA"
    text = metadata.read_text()
    metadata.write_text(text.replace(f"=={BASE}", "==0.6.14"))
    try:
        told = forked.pip("check", status=1)
    finally:
        metadata.write_text(text)
    assert "engine 1 has requirement flashinfer-python==0.6.14, but you have" in told


def test_back_by_name(forked: Environment, base: Path) -> None:
    # Without --force-reinstall the fork counts as ==BASE and stays.
    pinned = f"flashinfer-python=={BASE}"
    assert "already satisfied" in forked.pip("install", "--no-deps", pinned)
    assert forked.version() == FORK
    forked.pip("install", "-q", "--force-reinstall", "--no-deps", pinned)
    assert forked.is_the_base(base)


@pytest.fixture
def command(bare: Environment, base: Path) -> Iterator[Callable[..., CompletedProcess[str]]]:
    """``python -m graft install`` of that environment, with the one package that it needs."""
    target = bare.site / "packaging"
    target.symlink_to(Path(packaging.__file__).parent)
    cache = {"FLASHINFER_GRAFT_CACHE": str(base.parent), "TMPDIR": str(bare.site.parent)}
    try:
        yield functools.partial(graft, "install", python=bare.python, env={**bare.env, **cache})
    finally:
        target.unlink()
    assert not list(bare.site.parent.glob("graft-*"))


def test_install_command(based: Environment, command: Callable[..., CompletedProcess[str]]) -> None:
    done = command()
    # `flashinfer show-config` needs torch, which is not here: said, and no failure of ours.
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ModuleNotFoundError: No module named" in done.stderr
    assert done.stderr.splitlines()[-1] == (
        "graft: installed and verified; `flashinfer show-config` ended with 1"
    )
    assert done.stdout.startswith(f"{BASE} -> {FORK}\n")
    assert "\n  verified: growing sites left: 0" in done.stdout
    assert "\nverified: installed files as in RECORD: " in done.stdout
    assert based.version() == FORK


def test_install_command_over_the_fork(
    forked: Environment, command: Callable[..., CompletedProcess[str]]
) -> None:
    """The release comes from the cache then; and where the script runs the exit status is 0."""
    witness = forked.site / "flashinfer" / "gemm_workspace" / "names.py"
    witness.write_bytes(b"")
    fake = forked.site / "sitecustomize.py"
    fake.write_text(
        "import os, sys\n"
        "if sys.orig_argv[-1] == 'show-config':\n"
        "    print('shown', flush=True)\n"
        "    os._exit(0)\n"
    )
    try:
        done = command()
    finally:
        fake.unlink()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("shown\n")
    assert witness.stat().st_size


def test_install_command_with_another_base(
    forked: Environment, command: Callable[..., CompletedProcess[str]]
) -> None:
    done = command("0.6.14")
    assert done.returncode == 2
    assert f"{FORK} is installed here, the build is of 0.6.14" in done.stderr
    assert forked.version() == FORK


def test_uninstalling_leaves_nothing(forked: Environment) -> None:
    package = forked.site / "flashinfer"
    forked.run("-m", "compileall", "-q", package / "gemm", package / "gemm_workspace")
    assert list(package.glob("gemm_workspace/__pycache__/*.pyc"))
    forked.pip("uninstall", "-q", "-y", "flashinfer-python")
    assert forked.files() == forked.empty


def test_the_repository_is_no_distribution() -> None:
    # The install command runs from here: nothing may pose as the installed one.
    assert not list(ROOT.glob("*.dist-info"))
    assert not list(ROOT.glob("*.egg-info"))
