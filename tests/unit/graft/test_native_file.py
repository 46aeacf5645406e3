"""What is read from the native library, and what is refused."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import elf
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graft import native
from graft.errors import GraftError


def read(folder: Path, data: bytes) -> native.Native:
    path = folder / "_native.so"
    path.write_bytes(data)
    return native.read(path, folder)


def test_a_library_that_can_be_shipped(tmp_path: Path) -> None:
    found = read(tmp_path, elf.library())
    assert found.tag == "py3-none-manylinux_2_28_x86_64"
    assert found.data == elf.library()


@pytest.mark.parametrize(
    ("versions", "platform"),
    [
        ({"GLIBC_2.2.5"}, "manylinux_2_17_x86_64"),
        ({"GLIBC_2.34", "GLIBC_2.4"}, "manylinux_2_34_x86_64"),
        ({"GLIBC_2.5", "GLIBCXX_3.4.29"}, "manylinux_2_34_x86_64"),
        ({"GLIBC_2.5", "GLIBCXX_3.4.9"}, "manylinux_2_17_x86_64"),
        ({"GLIBC_2.5", "CXXABI_1.3.11"}, "manylinux_2_27_x86_64"),
    ],
)
def test_the_tag_says_what_the_symbols_ask_for(versions: set[str], platform: str) -> None:
    assert native.platform(versions) == platform


@pytest.mark.parametrize(
    "versions",
    [{"GLIBCXX_3.4.99"}, {"GLIBC_PRIVATE"}, {"OPENSSL_1.1"}, {"GLIBC_3.1"}, {"CXXABI_2.1"}],
)
def test_versions_that_no_tag_stands_for(versions: set[str]) -> None:
    with pytest.raises(GraftError):
        native.platform(versions)


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        ({"linked": ("libc.so.6", "libcudart.so.13")}, "links libcudart.so.13"),
        ({"linked": ("libcudnn.so.9",)}, "links libcudnn.so.9"),
        ({"exported": ("__tvm_ffi_abi", "_ZSt4cout")}, "exports _ZSt4cout"),
        ({"exported": ("__tvm_ffi_call",)}, "does not export __tvm_ffi_abi"),
        ({"runpath": "/home/me/lib"}, "looks for libraries in '/home/me/lib'"),
    ],
)
def test_a_library_that_is_not_to_be_shipped(
    how: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(GraftError) as raised:
        read(tmp_path, elf.library(**how))
    assert problem in raised.value.problems


def test_files_that_are_no_library_for_this_platform(tmp_path: Path) -> None:
    for data in (b"", b"\x7fELF", elf.library(machine=183), b"MZ" + bytes(200)):
        with pytest.raises(GraftError, match="not a shared library for x86-64 Linux"):
            read(tmp_path, data)
    with pytest.raises(GraftError, match="make native"):
        native.read(tmp_path / "none.so", tmp_path)


@given(data=st.data())
def test_a_damaged_file_is_read_or_refused(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = bytearray(elf.library())
    for _ in range(data.draw(st.integers(0, 8))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(whole)))
    folder = tmp_path_factory.getbasetemp()
    with contextlib.suppress(GraftError):
        read(folder, bytes(whole[: cut or None]))


def test_the_sources_are_those_of_the_checkout(tmp_path: Path) -> None:
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "a.cc").write_text("int a;")
    before = native.sources(tmp_path)
    (tmp_path / "csrc" / "a.cc").write_text("int b;")
    after = native.sources(tmp_path)
    (tmp_path / "CMakeLists.txt").write_text("project(a)")
    assert len({before, after, native.sources(tmp_path)}) == 3
