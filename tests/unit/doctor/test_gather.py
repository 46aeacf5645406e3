"""Facts of folders, of this machine, and of child processes that may die."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashinfer.gemm_workspace.doctor import children, gather, machine, packages, probe
from flashinfer.gemm_workspace.doctor.facts import FlashInfer, Fork, Library, Missing, asked
from flashinfer.gemm_workspace.doctor.gate import fork_is_active
from flashinfer.gemm_workspace.doctor.packages import Packages

from .given import distribution, provenance, site_packages

GEMM = "flashinfer/gemm/gemm_base.py"


def found(*folders: Path) -> FlashInfer:
    copy = packages.flashinfer(Packages(folders))
    assert isinstance(copy, FlashInfer), copy
    return copy


def test_a_release(tmp_path: Path) -> None:
    assert found(site_packages(tmp_path)) == FlashInfer(
        "0.6.16.post3", "0.6.16.post3", str(tmp_path), None
    )


def test_the_fork_and_what_was_done_to_it(tmp_path: Path) -> None:
    site = site_packages(tmp_path, fork=True)
    copy = found(site)
    assert copy.version == "0.6.16.post3+ws.1"
    assert copy.release == "0.6.16.post3"
    assert copy.fork == Fork("ws.1", "0.6.16.post3", {"grow-sites": 8})
    (site / GEMM).write_text("before = 1\n")
    assert found(site).fork == Fork("ws.1", "0.6.16.post3", {"grow-sites": 8}, reverted=(GEMM,))
    (site / GEMM).unlink()
    (site / "flashinfer/gemm_workspace/__init__.py").write_text("edited")
    fork = found(site).fork
    assert isinstance(fork, Fork)
    assert fork.altered == (GEMM, "flashinfer/gemm_workspace/__init__.py")
    assert not fork.whole


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", "null", "[" * 100_000, '{"label": 1, "base": 2, "edits": 3}'],
)
def test_provenance_that_cannot_be_read(tmp_path: Path, content: str) -> None:
    site = site_packages(tmp_path, fork=True)
    (next(site.glob("*.dist-info")) / "graft.json").write_text(content)
    fork = found(site).fork
    assert isinstance(fork, Missing)
    assert "graft.json" in fork.reason


@given(
    st.recursive(
        st.none() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    ),
    st.sampled_from(["label", "base", "edits", "changed", "added"]),
)
def test_any_provenance(
    tmp_path_factory: pytest.TempPathFactory, content: object, part: str
) -> None:
    site = site_packages(tmp_path_factory.mktemp("site"), fork=True)
    said = {**provenance("0.6.16.post3"), part: content}
    (next(site.glob("*.dist-info")) / "graft.json").write_text(json.dumps(said))
    assert found(site).fork is not None


def test_the_runtime_without_provenance(tmp_path: Path) -> None:
    site = site_packages(tmp_path, fork=True)
    (next(site.glob("*.dist-info")) / "graft.json").unlink()
    assert isinstance(found(site).fork, Missing)


def test_broken_metadata_hides_nothing_else(tmp_path: Path) -> None:
    site = site_packages(tmp_path, torch="2.11.0")
    (site / "broken-1.dist-info").mkdir()
    (site / "cut-1.dist-info").mkdir()
    (site / "cut-1.dist-info" / "METADATA").write_bytes(b"\xff\xfe\x00Name")
    listed = Packages([tmp_path / "none", site])
    assert listed.version("torch") == "2.11.0"
    assert listed.version("Torch") == "2.11.0"
    assert isinstance(listed.version("broken"), Missing)


def test_several_copies(tmp_path: Path) -> None:
    first = site_packages(tmp_path / "a", fork=True)
    distribution(first, "flashinfer_python", "0.6.16.post3")
    second = site_packages(tmp_path / "b", "0.6.14")
    copy = found(first, second)
    assert copy.version == "0.6.16.post3+ws.1"
    assert len(copy.others) == 2
    assert str(second) in copy.others[1]


def test_no_package_beside_its_metadata(tmp_path: Path) -> None:
    distribution(tmp_path, "flashinfer_python", "0.6.14")
    copy = packages.flashinfer(Packages([tmp_path]))
    assert isinstance(copy, Missing)
    assert "0.6.14" in copy.reason
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer" / "__init__.py").write_text("")
    for metadata in tmp_path.glob("*.dist-info/METADATA"):
        metadata.unlink()
    copy = found(tmp_path)
    assert isinstance(copy.version, Missing)
    assert isinstance(copy.own_version, Missing)
    assert copy.release is None


def test_another_image(tmp_path: Path) -> None:
    site = site_packages(
        tmp_path,
        fork=True,
        torch="2.11.0",
        nvidia_cudnn_cu13="9.19.0.56",
        nvidia_cudnn_frontend="1.20.0",
        cuda_bindings="13.3.1",
        flashinfer_cubin="0.6.16.post3",
        flashinfer_jit_cache="0.6.16.post3+cu130",
        vllm="0.28.0",
    )
    (site / "torch").mkdir()
    (site / "torch" / "version.py").write_text("cuda: Optional[str] = '13.0'\nhip = None\n")
    library = site / "nvidia/cudnn/lib/libcudnn.so.9"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"")
    header = site / "nvidia/cudnn/include/cudnn_version.h"
    header.parent.mkdir()
    header.write_text("#define CUDNN_MAJOR 9\n#define CUDNN_MINOR 19\n#define CUDNN_PATCHLEVEL 0\n")
    facts = gather.of_image([site], (12, 0))
    assert fork_is_active(facts)
    assert facts.cudnn == 91900
    assert facts.cudnn_found == (Library(str(library), "9.19.0"),)
    assert facts.torch_cuda == "13.0"
    assert facts.engines == {"vllm": "0.28.0"}
    assert facts.metadata == {
        "flashinfer_version": "0.6.16.post3",
        "cuda_version": "13.0",
        "cudnn_version": "91900",
        "cudnn_frontend_version": "1.20.0",
    }
    assert isinstance(gather.of_image([site], None).gpus, Missing)
    assert facts.environment == {}


def test_libraries_by_their_names(tmp_path: Path) -> None:
    folder = tmp_path / "lib"
    folder.mkdir()
    (folder / "libcudnn.so.9.23.1").write_bytes(b"")
    (folder / "libcudnn.so.9").symlink_to("libcudnn.so.9.23.1")
    (folder / "libcudnn_ops.so.9").write_bytes(b"")
    environment = {"LD_LIBRARY_PATH": f"{folder}:{tmp_path}/none:"}
    listed = machine.cudnn_libraries([], environment, of_system=True)
    assert Library(str(folder / "libcudnn.so.9.23.1"), "9.23.1") in listed
    assert not [each for each in listed if "ops" in each.path]


def test_the_driver(tmp_path: Path) -> None:
    path = tmp_path / "version"
    assert isinstance(machine.driver_version(path), Missing)
    path.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release")
    assert machine.driver_version(path) == "580.159.04"
    path.write_text("?")
    assert isinstance(machine.driver_version(path), Missing)


def test_compiled_ops(tmp_path: Path) -> None:
    package, base = tmp_path / "flashinfer", tmp_path / "base"
    environment = {"FLASHINFER_WORKSPACE_BASE": str(base), "CUDA_HOME": str(tmp_path)}
    assert isinstance(machine.jit_cache("0.6.14", package, environment), Missing)
    for name, time in (("old", 100), ("new", 300), ("newer", 400)):
        built = base / ".cache/flashinfer/0.6.14/120f/cached_ops" / name / f"{name}.so"
        built.parent.mkdir(parents=True)
        built.write_bytes(b"")
        os.utime(built, (time, time))
    source = package / "data" / "csrc" / "a.cu"
    source.parent.mkdir(parents=True)
    source.write_text("")
    os.utime(source, (200, 200))
    jit = machine.jit_cache("0.6.14", package, environment)
    assert not isinstance(jit, Missing)
    assert (jit.compiled, jit.older, jit.nvcc) == (3, 1, None)
    compiler = tmp_path / "bin" / "nvcc"
    compiler.parent.mkdir()
    compiler.write_text("")
    compiler.chmod(0o755)
    assert machine.nvcc(environment) == str(compiler)
    assert machine.nvcc({"FLASHINFER_NVCC": str(compiler)}) == str(compiler)
    assert machine.nvcc({"FLASHINFER_NVCC": "none-such"}) is None
    assert machine.nvcc({"PATH": str(compiler.parent)}) == str(compiler)


def test_a_fact_that_fails_is_missing() -> None:
    def fails() -> int:
        raise ZeroDivisionError("no")

    assert asked(fails) == Missing("ZeroDivisionError: no")


# Child processes --------------------------------------------------------------------------------

STEPS = ("first", "second", "third")


def ask(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str, timeout: float = 60) -> dict:
    path = tmp_path / "probe.py"
    path.write_text(
        f"import json, os, signal, sys\nM = {probe.MARK!r}\n"
        "def say(**f): print('noise\\n' + M + json.dumps(f), flush=True)\n" + program
    )
    monkeypatch.setattr(children, "PROBE", path)
    return children._ask("x", STEPS, dict(os.environ), timeout)


def test_the_mark_is_one() -> None:
    assert children._MARK == probe.MARK


def test_a_child_that_dies_tells_what_it_got_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = ask(
        monkeypatch,
        tmp_path,
        "say(step='first', value=1); say(step='second', begins=True)\n"
        "os.kill(os.getpid(), signal.SIGSEGV)",
    )
    assert said["first"] == {"value": 1}
    assert said["second"] == Missing("the child process was killed by SIGSEGV, in this step")
    assert said["third"] == Missing("the child process was killed by SIGSEGV, before this step")


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("sys.exit(3)", "ended with status 3, before this step"),
        ("", "ended without an answer"),
        ("say(step='first', error='ImportError: x')", "ImportError: x"),
        ('print(M + \'{"step": "fir\')', "ended without an answer"),
        ("print(M + '[1]')", "ended without an answer"),
        ("sys.stdout.buffer.write(b'\\xff\\xfe')", "ended without an answer"),
    ],
)
def test_other_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str, reason: str
) -> None:
    first = ask(monkeypatch, tmp_path, program)["first"]
    assert isinstance(first, Missing)
    assert reason in first.reason


def test_a_child_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Its own child holds the pipe open: the whole group has to go.
    said = ask(monkeypatch, tmp_path, "os.fork(); signal.pause()", timeout=0.5)
    assert isinstance(said["first"], Missing)
    assert "gave no answer" in said["first"].reason


@given(st.text())
def test_any_output_reads(output: str) -> None:
    assert set(children.read(output + probe.MARK + output, STEPS, "x")) >= set(STEPS)


# A wheel of the build ---------------------------------------------------------------------------


@pytest.mark.release
def test_a_grafted_wheel_and_its_release(
    tmp_path: Path,
    release_wheel: Callable[[str], Path],
    grafted: Callable[[str], Path],
) -> None:
    for name, wheel in (("up", release_wheel("0.6.16.post3")), ("fork", grafted("0.6.16.post3"))):
        with zipfile.ZipFile(wheel) as archive:
            names = [each for each in archive.namelist() if "/data/" not in each]
            archive.extractall(tmp_path / name, names)
    up, fork = (gather.of_image([tmp_path / name], (12, 0)) for name in ("up", "fork"))
    assert not fork_is_active(up)
    assert fork_is_active(fork)
    (tmp_path / "fork" / GEMM).write_bytes((tmp_path / "up" / GEMM).read_bytes())
    damaged = gather.of_image([tmp_path / "fork"], None).flashinfer
    assert isinstance(damaged, FlashInfer)
    assert isinstance(damaged.fork, Fork)
    assert damaged.fork.reverted == (GEMM,)
