"""RECORD: what is written is what is read, whatever the names are."""

from __future__ import annotations

import contextlib
import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graft import record
from graft.errors import GraftError

NAMES = st.text(st.sampled_from("ab,\"'; /.é語😀\n"), min_size=1, max_size=12)
CONTENTS = st.dictionaries(NAMES, st.binary(max_size=5), max_size=6)
OWN = "x-1.dist-info/RECORD"


@given(CONTENTS)
def test_round_trip(contents: dict[str, bytes]) -> None:
    rows = [record.row_of(path, data) for path, data in contents.items()]
    text = record.render(rows, OWN).decode()
    assert record.parse(text) == [*sorted(rows), record.Row(OWN, "", "")]
    # As every other reader has it.
    assert [row[0] for row in csv.reader(io.StringIO(text, newline=""))] == [
        *sorted(contents),
        OWN,
    ]


@given(st.text(st.sampled_from('a,"\n\r\0 '), max_size=20))
def test_junk_is_refused_or_read(text: str) -> None:
    with contextlib.suppress(GraftError):
        assert all(row.by_installer in (True, False) for row in record.parse(text))


@pytest.mark.parametrize("text", ["a,b\n", "a,b,c\nd,e,f,g\n", "a\rb,c,d\n"])
def test_a_row_that_is_none(text: str) -> None:
    with pytest.raises(GraftError, match="RECORD line"):
        record.parse(text)


INSTALLED = [
    "x-1.dist-info/INSTALLER",
    "x-1.dist-info/REQUESTED",
    "x-1.dist-info/direct_url.json",
    "flashinfer/__pycache__/a.cpython-311.pyc",
    "../../../bin/flashinfer",
    "/usr/local/bin/flashinfer",
]


@given(CONTENTS, st.permutations(INSTALLED))
def test_the_digest_leaves_out_what_an_installer_adds(
    contents: dict[str, bytes], installed: list[str]
) -> None:
    rows = [
        row
        for path, data in contents.items()
        if not (row := record.row_of(path, data)).by_installer
    ]
    added = [record.row_of(path, b"by pip") for path in installed]
    own = record.Row(OWN, "", "")
    assert record.digest([*added, *reversed(rows), own]) == record.digest(rows)


@given(CONTENTS, NAMES, st.binary(max_size=5))
def test_the_digest_sees_every_other_file(
    contents: dict[str, bytes], path: str, data: bytes
) -> None:
    before = [record.row_of(*item) for item in contents.items()]
    after = [record.row_of(*item) for item in {**contents, path: data}.items()]
    if record.row_of(path, data).by_installer:
        return
    same = contents.get(path) == data
    assert (record.digest(before) == record.digest(after)) is same


def test_installer_names_elsewhere_are_ordinary_files() -> None:
    assert not record.Row("flashinfer/INSTALLER", "", "").by_installer
