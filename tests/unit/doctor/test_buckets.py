"""Buckets of token counts."""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashinfer.gemm_workspace.doctor.buckets import Tokens, bucket, parse
from graft.releases import RELEASES


def test_the_example_of_the_crash_reports() -> None:
    assert parse("405-482") == [Tokens(405, 482)]
    assert parse("405-482")[0].buckets() == [512]


@given(st.integers(1, 1 << 20), st.integers(0, 5000))
def test_a_range_has_the_buckets_of_its_numbers(first: int, more: int) -> None:
    wanted = sorted({bucket(number) for number in range(first, first + more + 1)})
    assert Tokens(first, first + more).buckets() == wanted


@given(st.integers(1, 1 << 30))
def test_a_bucket_is_no_smaller_and_its_own(tokens: int) -> None:
    assert tokens <= bucket(tokens) < 2 * tokens + 256
    assert bucket(bucket(tokens)) == bucket(tokens)


@pytest.mark.parametrize(
    "text",
    ["", "0", "-3", "5-4", "a", "1,", "1--2", "1-2-3", "1.5", "٣", "9" * 30, "1-99999999999"],
)
def test_what_is_no_range(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no number of tokens, wanted 1 to"):
        parse(text)


def test_several() -> None:
    assert [str(each) for each in parse(" 1, 5 - 7 ")] == ["1", "5-7"]


@pytest.mark.release
@pytest.mark.parametrize("version", sorted(RELEASES))
def test_the_releases_round_so(version: str, release_wheel: Callable[[str], Path]) -> None:
    """Against the release's own function, taken out of its wheel."""
    with zipfile.ZipFile(release_wheel(version)) as wheel:
        tree = ast.parse(wheel.read("flashinfer/fused_moe/utils.py"))
    wanted = {"map_to_hybrid_bucket_uncapped", "_ceil_to_step"}
    tree.body = [
        node
        for node in tree.body
        if (isinstance(node, ast.FunctionDef) and node.name in wanted)
        or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("_PHASE"))
    ]
    scope: dict[str, Any] = {
        "next_positive_power_of_2": lambda n: 1 << (n - 1).bit_length() if n > 1 else 1
    }
    exec(compile(tree, version, "exec"), scope)
    theirs = scope["map_to_hybrid_bucket_uncapped"]
    assert [bucket(n) for n in range(1, 20_000)] == [theirs(n) for n in range(1, 20_000)]
