"""What the editor finds in every known release, against the table that was made by reading them."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from packaging.version import Version

from graft.delta import EditedFile, edit_release
from graft.releases import DEFAULT_BASE, FAMILIES, FIRST_AFFECTED, RELEASES, state_of
from graft.source import open_wheel

GEMM = "flashinfer/gemm/gemm_base.py"
BF16_FP4 = "flashinfer/gemm/gemm_bf16_fp4_cudnn.py"
UTILS = "flashinfer/utils.py"

#: Lines of the `resize_` calls in gemm_base.py: fp4, fp4 override, mxfp8, mxfp8 override, fp8,
#: fp8 override, bf16, bf16 override; then those in gemm_bf16_fp4_cudnn.py.
GROWTH = {
    "0.6.12": ([2375, 2611, 2645, 2825, 2954, 3083, 3359, 3532], []),
    "0.6.13": ([2412, 2648, 2682, 2902, 3038, 3181, 3462, 3635], []),
    "0.6.14": ([2484, 2720, 2754, 2974, 3110, 3253, 3534, 3707], [269, 325]),
    **dict.fromkeys(
        ["0.6.15", "0.6.15.post1"],
        ([2595, 2831, 2865, 3085, 3221, 3364, 3645, 3818], [269, 325]),
    ),
    **dict.fromkeys(
        ["0.6.16", "0.6.16.post1", "0.6.16.post2", "0.6.16.post3", "0.6.16.post4", "0.6.17"],
        ([2684, 2919, 3003, 3226, 3345, 3484, 3779, 3955], [271, 334]),
    ),
    **dict.fromkeys(
        ["0.6.18", "0.6.18.post1"],
        ([3089, 3324, 3408, 3631, 3750, 3889, 4184, 4360], [271, 334]),
    ),
}
#: Lines of the handlers that retry, in 0.6.18.post1.
RETRIES = {GEMM: [4054, 4570, 5521, 5995, 9604], BF16_FP4: [507]}
GROUPED = "flashinfer/grouped_mm/cudnn/core.py"

BF16 = {"mm_bf16_workspace", "bmm_bf16_workspace"}
MXFP8 = {"mm_mxfp8_workspace", "bmm_mxfp8_workspace"}


def own_lengths(version: Version) -> set[str]:
    """Names whose length is in the autotuner's key and is not the 40 MiB of a lane."""
    if version >= Version("0.7.0"):
        return set()  # the release's own length is 40 MiB
    if version < Version("0.6.13"):
        return BF16 | MXFP8 | {"mm_fp4_workspace", "bmm_fp8_workspace"}
    if version < Version("0.6.14"):
        return BF16 | MXFP8
    return BF16 | MXFP8 | {"mm_bf16_fp4_workspace"}


def lanes(version: Version) -> int:
    """Calls of the workspace cache that become lanes."""
    count = 6 + 1  # bf16, mxfp8, fp4 and fp8; groupwise fp8
    count += 3 * 2  # an int and a float part for each of three group GEMMs
    count += 3 + 1  # grouped_mm, low latency
    count += version >= Version("0.6.14")  # bf16_fp4
    count += version >= Version("0.6.16")  # svdquant
    return count


@pytest.fixture(scope="module", params=RELEASES)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def edited(version: str, release_wheel: Callable[[str], Path]) -> Iterator[dict[str, EditedFile]]:
    with open_wheel(release_wheel(version)) as source:
        yield {file.path: file for file in edit_release(source)}


def lines(edited: dict[str, EditedFile], path: str, edit: str) -> list[int]:
    return [site.line for site in edited[path].sites.get(edit, ())] if path in edited else []


@pytest.mark.release
def test_growth_sites_are_where_they_were_read(version: str, edited: dict[str, EditedFile]) -> None:
    # From 0.7.0 on what is replaced is upstream's own helper and error types.
    if version not in GROWTH:
        whats = [site.what for site in edited[GEMM].sites["grow-sites"]]
        assert all(what.startswith("upstream's ") for what in whats)
        return
    base, bf16_fp4 = GROWTH[version]
    # The statement begins one line above its call.
    assert lines(edited, GEMM, "grow-sites") == [line - 1 for line in base]
    assert lines(edited, BF16_FP4, "grow-sites") == [line - 1 for line in bf16_fp4]
    for path, wanted in ((GEMM, base), (BF16_FP4, bf16_fp4)):
        if wanted:
            text = edited[path].before.split(b"\n")
            assert all(b".resize_(" in text[line - 1] for line in wanted)


@pytest.mark.release
def test_grouped_mm_takes_its_workspace_where_it_was_read(
    version: str, edited: dict[str, EditedFile]
) -> None:
    found = lines(edited, GROUPED, "gemm-buffers")
    if Version(version) < Version("0.6.15"):
        assert found == [287, 498, 603]
    elif version in GROWTH:
        assert found == [286, 497, 602]
    else:
        assert len(found) == 3


@pytest.mark.release
def test_retries_are_where_they_were_read(version: str, edited: dict[str, EditedFile]) -> None:
    found = {path: lines(edited, path, "retries") for path in RETRIES}
    if version == "0.6.18.post1":
        assert found == RETRIES
    modern = Version("0.6.16") <= Version(version) < Version("0.7.0")
    assert [len(places) for places in found.values()] == ([5, 1] if modern else [0, 0])


@pytest.mark.release
def test_counts_are_those_of_the_tables(version: str, edited: dict[str, EditedFile]) -> None:
    def count(edit: str) -> int:
        return sum(len(file.sites.get(edit, ())) for file in edited.values())

    at = Version(version)
    bf16_fp4 = at >= Version("0.6.14")
    if version in GROWTH:
        assert count("grow-sites") == (10 if bf16_fp4 else 8)
        assert count("plan-lifetime") == (13 if bf16_fp4 else 11)
        assert count("default-size") == (2 if at >= Version("0.6.16") else 1)
        assert count("cache-buffers") == 1
    if version in GROWTH and at < Version("0.6.18"):
        assert count("gemm-buffers") == lanes(at)
        assert count("sm12x-gate") == 2
    if at >= Version("0.6.18"):
        assert count("sm12x-gate") == 3  # upstream's own gate goes
    # Every count of the release table is one that the editor found, and the other way round.
    wanted = {
        (edit, path): n
        for edit, files in RELEASES[version].family.counts.items()
        for path, n in files.items()
    }
    found = {
        (edit, path): len(sites)
        for path, file in edited.items()
        for edit, sites in file.sites.items()
    }
    assert found == wanted


@pytest.mark.release
def test_every_name_stays_bound(edited: dict[str, EditedFile]) -> None:
    for path, file in edited.items():
        lost = bound(file.before) - bound(file.after)
        assert not lost, path
        # And nothing that an engine may have imported from another place is shadowed by us.
        assert bound(file.after) - bound(file.before) <= hooks(file.after), path


@pytest.mark.release
def test_every_edited_file_says_so_in_its_first_line(edited: dict[str, EditedFile]) -> None:
    for path, file in edited.items():
        head, _, rest = file.after.partition(b"\n")
        assert head.startswith(b"# Changed by flashinfer-gemm-workspace (unofficial build"), path
        assert head.endswith(f": {', '.join(file.sites)}.".encode()), path
        # And the release's own head stands below it as it was.
        assert rest.startswith(file.before[:200]), path


@pytest.mark.release
def test_the_pinned_wheel_is_the_one_in_the_cache(
    version: str, release_wheel: Callable[[str], Path]
) -> None:
    data = release_wheel(version).read_bytes()
    assert hashlib.sha256(data).hexdigest() == RELEASES[version].sha256


def bound(data: bytes) -> set[str]:
    """Every name that a module binds at its top level, inside ``if`` and ``try`` too."""
    names: set[str] = set()
    todo: list[ast.AST] = list(ast.parse(data).body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        else:
            todo += ast.iter_child_nodes(node)
    return names


def hooks(data: bytes) -> set[str]:
    """Names that a module takes from the runtime."""
    return {
        alias.name
        for node in ast.parse(data).body
        if isinstance(node, ast.ImportFrom) and node.module == "gemm_workspace"
        for alias in node.names
    }


# -- the table itself --------------------------------------------------------------------------


@pytest.mark.parametrize("version", RELEASES)
def test_lengths_that_are_in_the_tuners_key(version: str) -> None:
    assert RELEASES[version].family.own_lengths == own_lengths(Version(version))


def test_the_table_is_whole() -> None:
    assert len(RELEASES) == 19
    assert len(GROWTH) == 13
    assert DEFAULT_BASE in GROWTH
    assert min(map(Version, RELEASES)) == FIRST_AFFECTED
    assert {version for version in RELEASES if RELEASES[version].state.startswith("affected")} == (
        set(GROWTH)
    )
    assert {id(release.family) for release in RELEASES.values()} == set(map(id, FAMILIES))
    for column in ("sha256", "record_sha256"):
        assert len({getattr(release, column) for release in RELEASES.values()}) == 19


def test_states_in_words() -> None:
    assert state_of("0.6.14") == RELEASES["0.6.14"].state
    assert "not affected" in state_of("0.6.11.post3")
    assert state_of("0.7.3") == state_of("9.9") == "unknown"
