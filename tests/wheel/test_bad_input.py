"""Bad input: one clear line on stderr, exit status 2, nothing written, nothing left behind."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import distributions
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wheelfile import (
    Members,
    dist_info,
    graft,
    in_memory,
    minimal,
    read,
    reversioned,
    with_record,
    write,
)

from graft.build import build
from graft.errors import GraftError

KNOWN = "0.6.16.post3"
UNKNOWN = "0.6.16.post9"
GEMM = "flashinfer/gemm/gemm_base.py"


class Workplace:
    """Folders of one run: everything in them is looked at afterwards."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.temporary, self.out, self.cache = root / "tmp", root / "out", root / "cache"
        self.temporary.mkdir()
        #: Nothing cached, and pip gets no index, no folder and no settings of its own.
        self.env: dict[str, str | None] = {
            "TMPDIR": str(self.temporary),
            "FLASHINFER_GRAFT_CACHE": str(self.cache),
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": None,
            "PIP_CONFIG_FILE": os.devnull,
        }

    def refuses(self, *arguments: str | Path, says: str, **options: object) -> list[str]:
        """Run a command that must be refused; return the lines that it prints."""
        arguments = (*arguments, "-o", self.out) if arguments[0] == "build" else arguments
        done = graft(*arguments, env=self.env, **options)
        assert done.returncode == 2, done.stderr
        assert done.stdout == ""
        first, *others = done.stderr.splitlines()
        assert first.startswith("graft: ")
        assert says in first
        assert all(line.startswith("  ") for line in others)
        assert "Traceback" not in done.stderr
        assert list(self.temporary.iterdir()) == []
        for folder in (self.out, self.cache):
            assert not folder.is_dir() or list(folder.iterdir()) == []
        return [line.strip() for line in others]


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    return Workplace(tmp_path)


@pytest.fixture
def wheel(tmp_path: Path) -> Callable[[Members], Path]:
    """Write a wheel of these members."""

    def written(members: Members) -> Path:
        folder = dist_info(members)
        path = tmp_path / f"{folder.removesuffix('.dist-info')}-py3-none-any.whl"
        write(members, path)
        return path

    return written


Write = Callable[[Members], Path]
WheelOf = Callable[[str], Path]


# -- what is no archive, or not this one -------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"not a zip", b"PK\x03\x04" * 10])
def test_not_a_zip(workplace: Workplace, data: bytes) -> None:
    path = workplace.root / "a.whl"
    path.write_bytes(data)
    workplace.refuses("build", path, says=f"{path}: not a zip archive")


@pytest.mark.release
@pytest.mark.parametrize("part", [0.1, 0.9, 0.99, 1 - 1e-6])
def test_a_truncated_wheel(workplace: Workplace, release_wheel: WheelOf, part: float) -> None:
    path = workplace.root / "cut.whl"
    data = release_wheel(KNOWN).read_bytes()
    path.write_bytes(data[: int(len(data) * part)])
    workplace.refuses("build", path, says="not a zip archive, or a truncated one")


SMALL = in_memory(minimal(UNKNOWN)).read()


@given(st.integers(0, len(SMALL) - 1))
def test_every_cut(tmp_path_factory: pytest.TempPathFactory, length: int) -> None:
    refuse_bytes(tmp_path_factory, SMALL[:length])


@given(st.lists(st.tuples(st.integers(0, len(SMALL) - 1), st.integers(0, 255)), min_size=1))
def test_damage(tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]]) -> None:
    data = bytearray(SMALL)
    for at, byte in changes:
        data[at] = byte
    refuse_bytes(tmp_path_factory, bytes(data))


def refuse_bytes(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    """In this process, for speed: nothing but GraftError may come out of it."""
    path = tmp_path_factory.getbasetemp() / "damaged.whl"
    path.write_bytes(data)
    with pytest.raises(GraftError):
        build(str(path), path.parent / "damaged-out", allow_unknown=True)
    assert not (path.parent / "damaged-out").exists()


def test_a_part_missing_in_the_middle(workplace: Workplace) -> None:
    path = workplace.root / "a.whl"
    path.write_bytes(SMALL[:40] + SMALL[90:])
    workplace.refuses("build", path, says=str(path))


def test_another_distribution(workplace: Workplace, wheel: Write) -> None:
    path = wheel(minimal("0.6.14", name="flashinfer-cubin"))
    says = "is a wheel of flashinfer-cubin, wanted flashinfer-python"
    workplace.refuses("build", path, says=says)


@pytest.mark.parametrize("missing", ["METADATA", "RECORD", "WHEEL"])
def test_no_metadata(workplace: Workplace, wheel: Write, missing: str) -> None:
    members = minimal(UNKNOWN)
    del members[f"{dist_info(members)}/{missing}"]
    workplace.refuses("build", wheel(members), says=f"has no {dist_info(members)}/{missing}")


def test_no_dist_info(workplace: Workplace) -> None:
    path = workplace.root / "a.whl"
    write({"flashinfer/__init__.py": b""}, path)
    workplace.refuses("build", path, says="has 0 dist-info folders, a wheel has one")


def test_a_version_that_metadata_does_not_have(workplace: Workplace, wheel: Write) -> None:
    members = minimal(UNKNOWN)
    path = f"{dist_info(members)}/METADATA"
    members[path] = members[path].replace(UNKNOWN.encode(), b"0.6.14")
    workplace.refuses("build", wheel(with_record(members)), says="METADATA says 0.6.14")


# -- RECORD ------------------------------------------------------------------------------------


def test_altered_files(workplace: Workplace, wheel: Write) -> None:
    members = {**minimal(UNKNOWN, a=b"1", b=b"2", c=b"3")}
    members["flashinfer/a.py"] = b"x"
    members["flashinfer/c.py"] = b"x"
    told = workplace.refuses("build", wheel(members), says="RECORD and the files disagree")
    assert told == [
        f"flashinfer/{name}.py: altered (its sha256 is not the one in RECORD)" for name in "ac"
    ]


def test_missing_and_extra_files(workplace: Workplace, wheel: Write) -> None:
    members = minimal(UNKNOWN, a=b"1")
    del members["flashinfer/a.py"]
    members["flashinfer/b.py"] = b"2"
    told = workplace.refuses("build", wheel(members), says="RECORD and the files disagree")
    assert told == ["flashinfer/b.py: not in RECORD", "flashinfer/a.py: in RECORD, but missing"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("flashinfer/a.py,,1\n", "RECORD and the files disagree"),
        ("flashinfer/a.py,md5=abc,1\n", "RECORD and the files disagree"),
        ("flashinfer/a.py\n", "RECORD line"),
        ("flashinfer/a.py,sha256=x,1,more\n", "RECORD line"),
        ("flashinfer/a.py\r,x,1\n", "RECORD"),
        (",sha256=x,1\n", "RECORD and the files disagree"),
        ("\udcff,sha256=x,1\n", "damaged archive ('utf-8' codec"),
    ],
)
def test_a_malformed_record(workplace: Workplace, wheel: Write, line: str, says: str) -> None:
    members = minimal(UNKNOWN)
    members["flashinfer/a.py"] = b"1"
    members[f"{dist_info(members)}/RECORD"] += line.encode(errors="surrogateescape")
    workplace.refuses("build", wheel(members), says=says)


@pytest.mark.parametrize(
    "name", ["../x", "flashinfer/../../x", "/etc/x", "a\\..\\x", "C:/x", "c:x", "flashinfer/.."]
)
def test_paths_that_escape(workplace: Workplace, wheel: Write, name: str) -> None:
    members = with_record({**minimal(UNKNOWN), name: b"x"})
    told = workplace.refuses(
        "build", wheel(members), "--unknown-release", says="paths that no wheel may have"
    )
    assert told == [f"{name}: escapes the folder it is unpacked to"]
    told = workplace.refuses(
        "tree", wheel(members), "-o", workplace.out, "--unknown-release", says="paths that no"
    )
    assert len(told) == 1
    assert not (workplace.root.parent / "x").exists()


def test_every_path_that_escapes_is_listed(workplace: Workplace, wheel: Write) -> None:
    members = with_record({**minimal(UNKNOWN), "../x": b"", "/y": b""})
    assert len(workplace.refuses("build", wheel(members), says="paths")) == 2


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_path_that_comes_twice(workplace: Workplace) -> None:
    path = workplace.root / "a.whl"
    write(minimal(UNKNOWN), path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("flashinfer/__init__.py", b"other")
    told = workplace.refuses("build", path, says="paths that no wheel may have")
    assert told == ["flashinfer/__init__.py: is there twice"]


# -- which release -----------------------------------------------------------------------------


@pytest.mark.release
def test_a_grafted_wheel(workplace: Workplace, grafted: WheelOf) -> None:
    workplace.refuses("build", grafted(KNOWN), says="is grafted already")


def test_a_grafted_wheel_without_its_provenance(workplace: Workplace, wheel: Write) -> None:
    members = minimal(UNKNOWN, **{"gemm_workspace/__init__": b""})
    workplace.refuses("build", wheel(members), "--unknown-release", says="is grafted already")


def test_a_local_version(workplace: Workplace, wheel: Write) -> None:
    says = "has a local version label"
    workplace.refuses("build", wheel(minimal("0.6.14+cu130")), "--unknown-release", says=says)


def test_a_version_that_is_none(workplace: Workplace, wheel: Write) -> None:
    workplace.refuses("build", wheel(minimal("x.y")), says="'x.y' is not a version")


def test_an_unknown_version(workplace: Workplace, wheel: Write) -> None:
    says = f"flashinfer-python {UNKNOWN} is not in the table of known releases"
    workplace.refuses("build", wheel(minimal(UNKNOWN)), says=says)
    # By its number nothing is fetched either.
    workplace.refuses("build", UNKNOWN, says=f"{UNKNOWN} is not supported (unknown)")


def test_a_known_version_with_another_sha256(workplace: Workplace, wheel: Write) -> None:
    says = f"flashinfer-python {KNOWN} is known with sha256 caf686b9"
    workplace.refuses("build", wheel(minimal(KNOWN)), says=says)
    workplace.refuses("build", wheel(minimal(KNOWN)), "--unknown-release", says=says)


@pytest.mark.parametrize("flag", [[], ["--unknown-release"]])
@pytest.mark.parametrize("version", ["0.6.11.post3", "0.6.0", "0.5.3"])
def test_a_base_below_the_first_supported(
    workplace: Workplace, wheel: Write, version: str, flag: list[str]
) -> None:
    state = "older shape: workspaces are allocated per call; not affected by resize_()"
    says = f"flashinfer-python {version} is not supported ({state})"
    workplace.refuses("build", version, *flag, says=says)
    workplace.refuses("build", wheel(minimal(version)), *flag, says=says)


@pytest.mark.parametrize("word", ["nonsense", "0.6.16.post3x y"])
def test_words(workplace: Workplace, word: str) -> None:
    workplace.refuses("build", word, says="is neither a version")


@pytest.mark.parametrize("path", ["nowhere.whl", "no/where", "/dev/null/x.whl"])
def test_a_path_that_is_not_there(workplace: Workplace, path: str) -> None:
    workplace.refuses("build", path, says=f"{path}: N")


def test_a_folder(workplace: Workplace) -> None:
    workplace.refuses("build", workplace.temporary, says=f"{workplace.temporary}: Is a directory")


@pytest.mark.skipif(list(distributions(name="flashinfer-python")), reason="it is, here")
@pytest.mark.parametrize("command", ["build", "diff", "install"])
def test_not_installed(workplace: Workplace, command: str) -> None:
    base = [] if command == "install" else ["installed"]
    workplace.refuses(command, *base, says="flashinfer-python is not installed")


def test_verify_without_a_wheel(workplace: Workplace) -> None:
    workplace.refuses("verify", "nowhere.whl", says="nowhere.whl: no such file")


def test_a_wrong_command() -> None:
    for arguments in (["frobnicate"], [], ["build", "a", "b"]):
        done = graft(*arguments)
        assert done.returncode == 2
        assert "usage: python -m graft" in done.stderr


# -- the sites ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(release_wheel: WheelOf) -> Members:
    return read(release_wheel(KNOWN))


@pytest.mark.release
def test_an_unknown_release_with_the_same_sites(
    workplace: Workplace, wheel: Write, real: Members
) -> None:
    path = wheel(reversioned(real, UNKNOWN))
    workplace.refuses("build", path, says="pass --unknown-release")
    done = graft("build", path, "--unknown-release", "-o", workplace.out, env=workplace.env)
    assert done.returncode == 0, done.stderr
    assert f"files as in unknown release {UNKNOWN}" in done.stdout
    (built,) = workplace.out.iterdir()
    assert graft("verify", built).returncode == 0
    assert list(workplace.temporary.iterdir()) == []


@pytest.mark.release
def test_an_unknown_release_with_other_sites(
    workplace: Workplace, wheel: Write, real: Members
) -> None:
    text = real[GEMM].decode() + "\ndef _one_more(w):\n    w.resize_(1)\n    w.resize_(2)\n"
    text = text.replace("@functools.lru_cache", "@remembered", 1)
    last = text.count("\n")
    path = wheel(with_record({**reversioned(real, "0.6.19"), GEMM: text.encode()}))
    told = workplace.refuses(
        "build", path, "--unknown-release", says="0.6.19: the sites are not the ones expected"
    )
    assert f"{GEMM}:{last - 1}: grow-sites: w.resize_(1)" in told
    assert f"{GEMM}:{last}: grow-sites: w.resize_(2)" in told
    assert f"{GEMM}: plan-builds: 8 sites found, 9 expected" in told
    assert any(line.startswith(f"{GEMM}:") and ": plan-builds: " in line for line in told)


@pytest.mark.release
def test_a_release_that_has_a_file_of_ours(
    workplace: Workplace, wheel: Write, real: Members
) -> None:
    members = {**reversioned(real, UNKNOWN), "flashinfer/gemm_workspace/lanes.py": b""}
    path = wheel(with_record(members))
    told = workplace.refuses("build", path, "--unknown-release", says="files of the same name")
    assert told == ["flashinfer/gemm_workspace/lanes.py"]


# -- the output folder -------------------------------------------------------------------------


@pytest.mark.release
def test_a_file_in_the_place_of_the_folder(workplace: Workplace, release_wheel: WheelOf) -> None:
    workplace.out.write_bytes(b"mine")
    workplace.refuses("build", release_wheel(KNOWN), says="cannot write")
    assert workplace.out.read_bytes() == b"mine"
    workplace.refuses("tree", release_wheel(KNOWN), "-o", workplace.out, says="is there already")


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    """A small file system of its own at ``folder``; needs the right to mount one."""
    folder.mkdir()
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if mount is None or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("may not mount a file system here")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.release
@pytest.mark.parametrize(
    ("options", "says"), [("ro", "Read-only file system"), ("size=4m", "No space left on device")]
)
def test_a_read_only_or_full_folder(
    workplace: Workplace, release_wheel: WheelOf, options: str, says: str
) -> None:
    with mounted(workplace.out, options):
        workplace.refuses("build", release_wheel(KNOWN), says=says)
        shutil.rmtree(workplace.out / "none", ignore_errors=True)
        workplace.refuses("tree", release_wheel(KNOWN), "-o", workplace.out / "none", says=says)


@pytest.mark.release
@pytest.mark.skipif(os.geteuid() == 0, reason="everything is writable for root")
def test_a_folder_that_is_not_writable(workplace: Workplace, release_wheel: WheelOf) -> None:
    workplace.out.mkdir(mode=0o555)
    workplace.refuses("build", release_wheel(KNOWN), says="Permission denied")


@pytest.mark.release
def test_a_folder_that_cannot_be_made(workplace: Workplace, release_wheel: WheelOf) -> None:
    workplace.out = Path("/proc/none")
    workplace.refuses("build", release_wheel(KNOWN), says="cannot write /proc/none/")


@pytest.mark.release
@pytest.mark.parametrize("most", [0, 1 << 20, 15 << 20])
def test_a_file_that_may_not_grow(workplace: Workplace, release_wheel: WheelOf, most: int) -> None:
    def limit() -> None:
        # Python leaves SIGXFSZ ignored, so the write fails like on a full disk.
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    workplace.refuses("build", release_wheel(KNOWN), says="File too large", preexec_fn=limit)


# -- fetching ----------------------------------------------------------------------------------


def test_no_network_and_nothing_cached(workplace: Workplace) -> None:
    workplace.refuses("build", KNOWN, says=f"cannot fetch flashinfer-python {KNOWN}")
    workplace.refuses("diff", KNOWN, says=f"put it into {workplace.cache}")


@pytest.mark.release
def test_a_damaged_cache_is_not_used(workplace: Workplace, release_wheel: WheelOf) -> None:
    name = release_wheel(KNOWN).name
    workplace.cache.mkdir()
    (workplace.cache / name).write_bytes(release_wheel(KNOWN).read_bytes()[:-1])
    done = graft("build", KNOWN, "-o", workplace.out, env=workplace.env)
    assert done.returncode == 2
    assert "cannot fetch" in done.stderr
    assert not workplace.out.exists()
    # Where it can be fetched, it is, and the damaged one is replaced.
    env = {**workplace.env, "PIP_FIND_LINKS": str(release_wheel(KNOWN).parent)}
    done = graft("build", KNOWN, "-o", workplace.out, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert [path.name for path in workplace.cache.iterdir()] == [name]
    assert (workplace.cache / name).read_bytes() == release_wheel(KNOWN).read_bytes()


@pytest.mark.release
def test_a_cached_wheel_needs_no_network(workplace: Workplace, release_wheel: WheelOf) -> None:
    workplace.cache.mkdir()
    shutil.copy(release_wheel(KNOWN), workplace.cache)
    done = graft("build", KNOWN, "-o", workplace.out, env=workplace.env)
    assert done.returncode == 0, done.stderr


def test_a_cache_that_cannot_be_made(workplace: Workplace) -> None:
    workplace.env["FLASHINFER_GRAFT_CACHE"] = "/proc/none"
    workplace.refuses("build", KNOWN, says="cannot keep a wheel in /proc/none")
