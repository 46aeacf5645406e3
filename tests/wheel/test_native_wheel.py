"""A wheel with the native launch: its names and tags, the same bytes each time, and what the
verifier says of a wrong one. The library is a stand-in: only what it asks for matters here."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import elf
import pytest
from wheelfile import Members, dist_info, graft, in_memory, read, with_provenance, with_record

from graft.build import build
from graft.errors import GraftError
from graft.label import CURRENT
from graft.native import PATH
from graft.verify import verify

pytestmark = pytest.mark.release

BASE = "0.6.16.post3"
TAG = "py3-none-manylinux_2_28_x86_64"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("library") / "_native.so"
    path.write_bytes(elf.library())
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, library: Path) -> Path:
    return build(BASE, tmp_path_factory.mktemp("native"), native=library).wheel


@pytest.fixture(scope="module")
def good(wheel: Path) -> Members:
    return read(wheel)


def test_it_is_a_wheel_for_its_platform(
    wheel: Path, good: Members, grafted: Callable[[str], Path]
) -> None:
    assert wheel.name == f"flashinfer_python-{BASE}+ws.{CURRENT}.native-{TAG}.whl"
    folder = dist_info(good)
    lines = good[f"{folder}/WHEEL"].decode().splitlines()
    assert f"Tag: {TAG}" in lines
    assert "Root-Is-Purelib: false" in lines
    assert good[PATH] == elf.library()
    assert b"Niels Lohmann" in good[f"{folder}/licenses/NOTICE.gemm_workspace"]
    provenance = json.loads(good[f"{folder}/graft.json"])
    assert provenance["native"]["platform"] == "manylinux_2_28_x86_64"
    # But for that, it is the pure wheel.
    pure = read(grafted(BASE))
    own = dist_info(pure)
    rest = {path: data for path, data in pure.items() if not path.startswith(own)}
    assert rest == {p: d for p, d in good.items() if not p.startswith(folder) and p != PATH}
    assert "Tag: py3-none-any" in pure[f"{own}/WHEEL"].decode().splitlines()
    assert b"Lohmann" not in pure[f"{own}/licenses/NOTICE.gemm_workspace"]


def test_the_same_bytes_by_the_command(wheel: Path, library: Path, tmp_path: Path) -> None:
    done = graft("build", BASE, "-o", tmp_path, "--native", library)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / wheel.name).read_bytes() == wheel.read_bytes()


def test_pip_takes_it(wheel: Path, tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "-q"]
    done = subprocess.run(
        [*pip, "--target", str(tmp_path), str(wheel)], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / PATH).read_bytes() == elf.library()


def test_a_wrong_file_gives_one_line_and_no_wheel(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.so"
    wrong.write_bytes(b"not a library")
    done = graft("build", BASE, "-o", tmp_path / "dist", "--native", wrong)
    assert done.returncode == 2
    assert "not a shared library" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "dist").exists()


def problems(members: Members) -> list[str]:
    with pytest.raises(GraftError) as caught:
        verify(in_memory(members))
    return caught.value.problems


def changed(good: Members, library: bytes, tag: bytes = TAG.encode()) -> Members:
    """Another library or tag, everything else made to agree."""
    folder = dist_info(good)
    wheel = good[f"{folder}/WHEEL"].replace(TAG.encode(), tag)
    members = with_provenance({**good, PATH: library, f"{folder}/WHEEL": wheel}, good)
    provenance = json.loads(members[f"{folder}/graft.json"])
    provenance["native"]["sha256"] = hashlib.sha256(library).hexdigest()
    return with_record({**members, f"{folder}/graft.json": json.dumps(provenance).encode()})


def test_the_verifier_finds_what_is_wrong(good: Members) -> None:
    assert problems(changed(good, elf.library(linked=("libc.so.6", "libcudart.so.13")))) == [
        f"{PATH}: links libcudart.so.13"
    ]
    assert problems(changed(good, b"text")) == [
        f"{PATH}: is not a shared library (no 64-bit ELF file)"
    ]
    newer = elf.library(versions=("GLIBC_2.39",))
    (problem,) = problems(changed(good, newer))
    assert problem.endswith("wanted py3-none-manylinux_2_39_x86_64 or newer")
    assert len(problems(changed(good, elf.library(), b"py3-none-any"))) == 1
    assert len(problems(changed(good, elf.library(), b"py3-none-linux_x86_64"))) == 1
    assert len(problems(changed(good, elf.library(), TAG.encode() + b"\nTag: py3-none-any"))) == 1


def test_the_verifier_misses_it(good: Members, grafted: Callable[[str], Path]) -> None:
    members = {path: data for path, data in good.items() if path != PATH}
    assert any("is missing" in each for each in problems(with_provenance(members, good)))
    # One that is in the wheel, and not listed as native.
    pure = read(grafted(BASE))
    added = with_provenance({**pure, PATH: elf.library()}, pure)
    assert f"{PATH}: not the one that graft.json lists" in problems(added)
