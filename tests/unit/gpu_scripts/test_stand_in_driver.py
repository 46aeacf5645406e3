"""The stand-in for a driver: compiled for libraries of our own making, and loaded."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest
from catalogue.wheels import BadInput

from .test_scripts import script

driver = script("tests/gpu/stand_in_driver.py")
sizes = script("tests/gpu/plan_sizes.py")


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cudnn-frontend and a cuDNN that look for some functions, and what they load, first on the
    path."""
    site = tmp_path / "site"
    frontend, cudnn = site / "cudnn", site / "nvidia" / "cudnn" / "lib"
    for folder in (frontend, cudnn):
        folder.mkdir(parents=True)
    (frontend / "__init__.py").touch()
    (frontend / "_compiled_module.x.so").write_bytes(b"ELF\0cudaMalloc\0cudaGetDevice\0cuCtxFoo\0")
    names = b"\0cuInit\0cuMemAlloc_v2\0cuMemAlloc\0notcuMine\0cudnnCreate\0cublasLtCreate\0"
    (cudnn / "libcudnn.so.9").write_bytes(names)
    for library in ("cublas/lib/libcublasLt.so.13", "cuda_nvrtc/lib/libnvrtc.so.13"):
        (site / "nvidia" / library).parent.mkdir(parents=True)
        (site / "nvidia" / library).touch()
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
    for library, wanted in (
        (
            "nvidia/cuda_nvrtc/lib/libnvrtc.so.13",
            "no libnvrtc on the path: pip install nvidia-cuda",
        ),
        ("nvidia/cublas/lib/libcublasLt.so.13", "no libcublas on the path: pip install nvidia-cub"),
        ("nvidia/cudnn/lib/libcudnn.so.9", "no cuDNN on the path: pip install"),
        ("cudnn/_compiled_module.x.so", "no cudnn-frontend on the path: pip install"),
    ):
        (packages / library).unlink()
        with pytest.raises(BadInput, match=wanted):
            driver.build(tmp_path / "folder")
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(BadInput, match="no C compiler"):
        driver.build(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_a_library_that_cannot_be_read_is_said(packages: Path, tmp_path: Path) -> None:
    library = packages / "nvidia/cudnn/lib/libcudnn.so.9"
    library.write_bytes(b"")  # nothing is looked for in it
    driver.build(tmp_path)
    library.unlink()
    library.mkdir()
    with pytest.raises(BadInput, match=r"libcudnn.so.9 cannot be read \(Is a directory\): install"):
        driver.build(tmp_path)


def test_a_package_that_does_not_import_is_said(packages: Path, tmp_path: Path) -> None:
    (packages / "nvidia" / "__init__.py").write_text("raise OSError('broken')")
    with pytest.raises(BadInput, match=r"above nvidia.cudnn does not import: OSError\('broken'\)"):
        driver.build(tmp_path)


@pytest.mark.parametrize(
    ("compiler", "said"),
    [
        ("false", "^false cannot make libcuda.so.1: no message: set "),
        ("false --flag", "^false --flag cannot make libcuda.so.1: no message: set "),
        ("/no/such/cc", r"^/no/such/cc does not run \(No such file or directory\): set "),
        ("/", r"^/ does not run \(Permission denied\): set "),
    ],
)
def test_a_compiler_that_fails_is_said(
    packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, said: str
) -> None:
    monkeypatch.setenv("CC", compiler)
    with pytest.raises(BadInput, match=said):
        driver.build(tmp_path)


def test_a_compiler_may_have_flags(
    packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "cc -O1")
    driver.build(tmp_path)
    assert (tmp_path / "libcuda.so.1").is_file()


@pytest.mark.parametrize(
    "text", ["", "1x2x3", "1x2x3x0", "00x1x1x1", "1x2x3x4x5", "axbxcxd", "-1x2x3x4", "\u0661x2x3x4"]
)
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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-j", "0"], "-j is 0, wanted at least 1"),
        (["--seconds", "nan"], "--seconds is nan, wanted a number above 0"),
        (["--seconds", "inf"], "--seconds is inf, wanted a number above 0"),
        (["--seconds", "-1"], "--seconds is -1, wanted a number above 0"),
        (["-o", __file__], f"-o {__file__}: {__file__} is no folder, name another"),
        (["-o", f"{__file__}/a/b"], f"-o {__file__}/a/b: {__file__} is no folder, name another"),
        (["--child", "77.fp4"], "--sm 77 --op fp4, wanted some of 90,100"),
        (["--child", "120"], "--sm 120 --op , wanted some of 90,100"),
    ],
)
def test_bad_input_is_one_line_before_any_work(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sizes.main(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"plan_sizes: {said}")
    assert err.count("\n") == 1


def test_a_run_without_a_plan_leaves_the_last_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"shape": [1, 1, 1, 1], "plan": 0, "name": "m_eng7", "bytes": 8}]
    answer = {"90.fp8": {"cudnn": 1, "rows": rows}}
    monkeypatch.setattr(sizes, "run", lambda *_: answer)
    arguments = ["-o", str(tmp_path), "--sm", "90", "--op", "fp8"]
    assert sizes.main(arguments) == 0
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert sorted(before) == ["plan-sizes.json", "plan-sizes.md"]
    assert sizes.main([*arguments[2:], "-o", "/proc/plan sizes"]) == 2
    said = "/proc/plan sizes/plan-sizes.json cannot be written (No such file or directory)"
    assert capsys.readouterr().err == f"plan_sizes: {said}: name another folder\n"
    answer["90.fp8"] = {"error": "SIGABRT: no message"}
    assert sizes.main(arguments) == 2
    out, err = capsys.readouterr()
    assert "SIGABRT" in out
    assert err.startswith("plan_sizes: no plan was built, for the reasons above; without a driver")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before


def test_a_child_that_is_killed_is_said_by_its_signal() -> None:
    assert [sizes._ended(status) for status in (2, -6, -8)] == [
        "exit status 2",
        "SIGABRT",
        "SIGFPE",
    ]
