"""The stand-in for a driver: compiled for libraries of our own making, and loaded."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest

from .test_scripts import script

driver = script("tests/gpu/stand_in_driver.py")
sizes = script("tests/gpu/plan_sizes.py")


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cudnn-frontend and a cuDNN that look for some functions, first on the path."""
    site = tmp_path / "site"
    frontend, cudnn = site / "cudnn", site / "nvidia" / "cudnn" / "lib"
    for folder in (frontend, cudnn):
        folder.mkdir(parents=True)
    (frontend / "__init__.py").touch()
    (frontend / "_compiled_module.x.so").write_bytes(b"ELF\0cudaMalloc\0cudaGetDevice\0cuCtxFoo\0")
    names = b"\0cuInit\0cuMemAlloc_v2\0cuMemAlloc\0notcuMine\0cudnnCreate\0cublasLtCreate\0"
    (cudnn / "libcudnn.so.9").write_bytes(names)
    for name in [name for name in sys.modules if name.split(".")[0] in ("cudnn", "nvidia")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(site))
    return site


def test_every_function_that_is_looked_for_is_there(packages: Path, tmp_path: Path) -> None:
    folder = tmp_path / "stand in"
    driver.build(folder)
    assert (folder / "libcudnn.so").resolve() == packages / "nvidia/cudnn/lib/libcudnn.so.9"
    cuda = ctypes.CDLL(str(folder / "libcuda.so.1"))
    version = ctypes.c_int()
    assert cuda.cuInit(0) == 0
    assert cuda.cuDriverGetVersion(ctypes.byref(version)) == 0
    assert version.value == 13000
    for name in ("cuMemAlloc_v2", "cuMemAlloc", "cuCtxFoo"):
        assert getattr(cuda, name)() == 100, name
    for name in ("cuMine", "cudnnCreate", "cublasLtCreate"):
        assert not hasattr(cuda, name), name


def test_a_function_is_found_by_name_in_its_newest_form(packages: Path, tmp_path: Path) -> None:
    folder = tmp_path / "driver"
    driver.build(folder)
    cuda = ctypes.CDLL(str(folder / "libcuda.so.1"))
    found, at = ctypes.c_int(), ctypes.c_void_p()

    def asked(name: bytes) -> int:
        places = ctypes.byref(at), 13000, ctypes.c_ulonglong(0), ctypes.byref(found)
        return int(cuda.cuGetProcAddress_v2(name, *places))

    assert asked(b"cuMemAlloc") == 0
    assert at.value == ctypes.cast(cuda.cuMemAlloc_v2, ctypes.c_void_p).value
    assert found.value == 0
    assert asked(b"cuNoSuchThing") == 500
    assert found.value == 1


def test_the_runtime_says_the_capability_of_the_description(
    packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.build(tmp_path)
    variables = driver.environment(tmp_path, 103)
    assert variables["LD_LIBRARY_PATH"].split(":")[0] == str(tmp_path)
    monkeypatch.setenv(driver.CAPABILITY, variables[driver.CAPABILITY])
    runtime = ctypes.CDLL(str(tmp_path / "libcudart.so.13"))
    value = ctypes.c_int()
    for attribute, wanted in ((75, 10), (76, 3), (16, 0)):
        assert runtime.cudaDeviceGetAttribute(ctypes.byref(value), attribute, 0) == 0
        assert value.value == wanted
    assert runtime.cudaMalloc() == 100


def test_what_is_missing_is_said(
    packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (packages / "nvidia/cudnn/lib/libcudnn.so.9").unlink()
    with pytest.raises(driver.NoStandIn, match="no cuDNN on the path: pip install"):
        driver.build(tmp_path / "one")
    (packages / "cudnn" / "_compiled_module.x.so").unlink()
    with pytest.raises(driver.NoStandIn, match="no cudnn-frontend on the path: pip install"):
        driver.build(tmp_path / "two")
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(driver.NoStandIn, match="no C compiler"):
        driver.build(tmp_path / "three")
    assert not any((tmp_path / name).exists() for name in ("one", "two", "three"))


def test_a_compiler_that_fails_is_said(
    packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "false")
    with pytest.raises(driver.NoStandIn, match=r"^false cannot make libcuda.so.1: no message$"):
        driver.build(tmp_path)


@pytest.mark.parametrize("text", ["", "1x2x3", "1x2x3x0", "1x2x3x4x5", "axbxcxd", "-1x2x3x4"])
def test_a_shape_that_is_none_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert sizes.main([f"--shape={text}"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"plan_sizes: --shape {text}, wanted four numbers above 0")
    assert said.count("\n") == 1


def test_without_a_frontend_the_command_says_so(
    packages: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (packages / "cudnn" / "_compiled_module.x.so").unlink()
    assert sizes.main(["--without-driver"]) == 2
    assert capsys.readouterr().err.startswith("plan_sizes: no cudnn-frontend on the path")
