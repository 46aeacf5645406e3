"""The delta of a made-up release: what is edited, what stops it, and the patch of it."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graft import delta, record
from graft.delta import Delta, EditedFile, edit_module, edit_release
from graft.errors import GraftError
from graft.patch import patch
from graft.releases import Family, Release
from graft.source import Packed, Source, pack

GEMM = "flashinfer/gemm/gemm_base.py"
OTHER = "flashinfer/gemm/other.py"

GOOD = '''\
"""Größe."""
import a
from b import (
    c,  # ü
)

LATER = 1
import d


def run(w, n):
    # grows
    if w.numel() < n:
        w.resize_(n)
    return _get_cache_buf("mm_fp4_workspace", n, w.device)


from e import f
'''

EDITED = f'''\
# Changed by {delta.TOOL} (unofficial build, see flashinfer/gemm_workspace): \
grow-sites, gemm-buffers.
"""Größe."""
import a
from b import (
    c,  # ü
)

LATER = 1
import d
from ..gemm_workspace import (
    _gemm_workspace_at_least,
    lane_workspace,
)


def run(w, n):
    # grows
    w = _gemm_workspace_at_least(w, n)
    return lane_workspace("mm_fp4_workspace", n, w.device)


from e import f
'''


class Dict:
    """A store of plain bytes."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files

    def read(self, path: str) -> bytes:
        return self.files[path]

    def packed(self, path: str) -> Packed:
        return pack(self.files[path])

    def executable(self, path: str) -> bool:
        return path not in self.files


def release_of(files: dict[str, str], counts: dict[str, dict[str, int]]) -> Source:
    release = Release("1.0", "made up", Family(counts), "", "")
    data = {path: text.encode() for path, text in files.items()}
    rows = tuple(record.row_of(path, text) for path, text in sorted(data.items()))
    return Source("1.0", release, None, "", rows, Dict(data))


def test_an_edited_module_has_a_notice_and_one_import() -> None:
    file, problems = edit_module(OTHER, GOOD.encode(), frozenset())
    assert problems == []
    assert file.after.decode() == EDITED
    assert {name: [s.line for s in sites] for name, sites in file.sites.items()} == {
        "grow-sites": [13],
        "gemm-buffers": [15],
    }


def test_edited_output_has_no_sites_left() -> None:
    assert edit_module(OTHER, EDITED.encode(), frozenset())[0].after == EDITED.encode()


def test_a_module_without_sites_stays_as_it_is() -> None:
    data = b"# resize_ is only named here\n"
    assert edit_module(OTHER, data, frozenset()) == (EditedFile(OTHER, data, data, {}), [])


def test_a_name_that_is_imported_already_is_not_imported_again() -> None:
    text = GOOD.replace("import d\n", "from .gemm_base import _gemm_workspace_at_least\n")
    file, problems = edit_module(OTHER, text.encode(), frozenset())
    assert problems == []
    assert file.after.count(b"_gemm_workspace_at_least") == 2
    assert b"import (\n    lane_workspace,\n)" in file.after


@pytest.mark.parametrize(
    "line", ["lane_workspace = 1", "lane_workspace: int = 1", "def lane_workspace():\n    pass"]
)
def test_a_name_of_the_forks_that_the_module_defines_itself(line: str) -> None:
    text = GOOD.replace("LATER = 1", line)
    _, problems = edit_module(OTHER, text.encode(), frozenset())
    assert problems == [f"{OTHER}: defines lane_workspace itself"]


def test_a_module_without_imports_is_refused() -> None:
    text = "def f(w, n):\n    if w.numel() < n:\n        w.resize_(n)\n"
    with pytest.raises(GraftError, match=OTHER):
        edit_module(OTHER, text.encode(), frozenset())


def test_the_expected_counts_let_it_pass() -> None:
    counts = {"grow-sites": {OTHER: 1}, "gemm-buffers": {OTHER: 1}}
    (file,) = edit_release(release_of({OTHER: GOOD, "flashinfer/x.py": "w.resize_(n)"}, counts))
    assert file.after.decode() == EDITED


def test_everything_that_is_not_understood_is_listed() -> None:
    files = {
        OTHER: GOOD + "x.resize_(1)\nx.resize_(2)\n_get_cache_buf(name, 1, d)\n",
        GEMM: "import a\nDEFAULT_WORKSPACE_SIZE = 1\ncudnn.create_handle()\n",
    }
    counts = {"grow-sites": {OTHER: 1, GEMM: 8}, "gemm-buffers": {OTHER: 2}, "retries": {GEMM: 5}}
    with pytest.raises(GraftError) as caught:
        edit_release(release_of(files, counts))
    assert "1.0" in caught.value.headline
    assert sorted(caught.value.problems) == sorted(
        [
            f"{OTHER}:19: grow-sites: x.resize_(1)",
            f"{OTHER}:20: grow-sites: x.resize_(2)",
            f"{OTHER}:21: gemm-buffers: _get_cache_buf(name, 1, d)",
            f"{GEMM}:2: default-size: DEFAULT_WORKSPACE_SIZE = 1",
            f"{GEMM}:3: plan-builds: cudnn.create_handle()",
            f"{GEMM}: grow-sites: 0 sites found, 8 expected",
            f"{OTHER}: gemm-buffers: 1 sites found, 2 expected",
            f"{GEMM}: retries: 0 sites found, 5 expected",
        ]
    )
    for problem in caught.value.problems:
        assert f"\n  {problem}" in str(caught.value)


def test_a_site_too_many_is_refused() -> None:
    counts = {"grow-sites": {OTHER: 1}}
    with pytest.raises(GraftError) as caught:
        edit_release(release_of({OTHER: GOOD}, counts))
    assert caught.value.problems == [f"{OTHER}: gemm-buffers: 1 sites found, 0 expected"]


def test_an_unknown_release_is_the_newest_family_that_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts = {"grow-sites": {OTHER: 1}, "gemm-buffers": {OTHER: 1}}
    own = frozenset({"mm_fp4_workspace"})
    text = GOOD.replace('"mm_fp4_workspace", n', '"mm_fp4_workspace", DEFAULT_WORKSPACE_SIZE')
    source = replace(release_of({OTHER: text}, counts), release=None)

    def lengths_kept(*families: Family) -> bool:
        monkeypatch.setattr(delta, "FAMILIES", families)
        (file,) = edit_release(source)
        return b"32 * 1024 * 1024" in file.after

    assert lengths_kept(Family(counts), Family(counts, own))
    assert not lengths_kept(Family(counts, own), Family(counts))
    assert lengths_kept(Family(counts, own), Family({}))
    monkeypatch.setattr(delta, "FAMILIES", (Family({"retries": {GEMM: 5}}), Family({})))
    with pytest.raises(GraftError) as caught:
        edit_release(source)
    assert len(caught.value.problems) == 2  # those of the family that comes closest


@pytest.mark.parametrize(
    "text", [b"Name: x\nVersion: 1.0\nVersion: 1.0\n\n", b"Name: x\n\nVersion: 1.0\n"]
)
def test_metadata_without_exactly_one_version(text: bytes) -> None:
    with pytest.raises(GraftError, match="METADATA"):
        delta._metadata(text, "1.0", "1.0+ws.1")


def test_metadata_changes_two_lines() -> None:
    text = (
        b"Name: x\nVersion: 1.0\nLicense-File: A\nLicense-File: B\n"
        b"Requires-Dist: y\n\nVersion: 1.0\n"
    )
    assert delta._metadata(text, "1.0", "1.0+ws.1") == (
        b"Name: x\nVersion: 1.0+ws.1\nLicense-File: A\nLicense-File: B\n"
        b"License-File: NOTICE.gemm_workspace\nRequires-Dist: y\n\nVersion: 1.0\n"
    )


def test_wheel_gets_a_second_generator() -> None:
    text = b"Wheel-Version: 1.0\nGenerator: a\nTag: py3-none-any\n"
    changed = delta._wheel(text, "ws.1").decode().splitlines()
    assert changed == [
        "Wheel-Version: 1.0",
        "Generator: a",
        f"Generator: {delta.TOOL} (ws.1)",
        "Tag: py3-none-any",
    ]
    with pytest.raises(GraftError, match="Generator"):
        delta._wheel(b"Wheel-Version: 1.0\n", "ws.1")


def test_a_file_of_the_releases_that_has_our_name_is_refused() -> None:
    source = release_of({"flashinfer/gemm_workspace/lanes.py": ""}, {})
    with pytest.raises(GraftError, match="same name") as caught:
        delta.make(source)
    assert caught.value.problems == ["flashinfer/gemm_workspace/lanes.py"]


TEXT = st.text(st.sampled_from("ab\n\n\n\u2028\x85\x1c\x0bü"), max_size=12)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkout")


@given(before=TEXT, after=TEXT, new=TEXT)
def test_git_applies_the_patch(checkout: Path, before: str, after: str, new: str) -> None:
    (checkout / "pkg").mkdir(exist_ok=True)
    (checkout / "pkg" / "a.py").write_bytes(before.encode())
    (checkout / "pkg" / "new.py").unlink(missing_ok=True)
    changed = EditedFile("pkg/a.py", before.encode(), after.encode(), {})
    lines = patch(Delta("1", (changed,) if before != after else (), {"pkg/new.py": new.encode()}))
    done = subprocess.run(
        ["git", "apply", "-"],
        cwd=checkout,
        input="".join(lines).encode(),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (checkout / "pkg" / "a.py").read_bytes() == after.encode()
    assert (checkout / "pkg" / "new.py").read_bytes() == new.encode()
