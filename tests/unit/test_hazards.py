"""Every hazard has a row that says what closes it."""

from __future__ import annotations

import re
from pathlib import Path

from graft.edits import EDITS

ROWS = re.findall(
    r"^\| (A\d+) \| (.+?) \| (.+?) \| (.+?) \|$",
    Path(__file__).parents[2].joinpath("docs", "hazards.md").read_text(),
    flags=re.MULTILINE,
)


def test_no_hazard_is_left_out() -> None:
    assert [row[0] for row in ROWS] == [f"A{number}" for number in range(1, 38)]


def test_what_is_not_ours_says_why_and_the_rest_is_shown() -> None:
    for code, _, closed_by, shown_by in ROWS:
        if shown_by == "nothing":
            assert re.match(r"not ours: \w+", closed_by), code


def test_every_edit_closes_rows_that_name_it() -> None:
    closed = {code: closed_by for code, _, closed_by, _ in ROWS}
    for edit in EDITS:
        assert any(edit.name in closed[hazard] for hazard in edit.hazards), edit.name
