"""Splices, spans and the doctests of the build."""

from __future__ import annotations

import ast
import doctest
import importlib
import pkgutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

import graft
from graft.errors import GraftError
from graft.module import Module, Splice, apply


@st.composite
def spliced(draw: st.DrawFn) -> tuple[bytes, list[Splice]]:
    """Data and splices of it that do not overlap, in any order."""
    data = draw(st.binary(max_size=30))
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=8, unique=True)))
    pairs = zip(cuts[::2], cuts[1::2], strict=False)
    splices = [Splice(start, end, draw(st.binary(max_size=3))) for start, end in pairs]
    return data, draw(st.permutations(splices))


@given(spliced())
def test_apply_is_one_replacement_after_another(case: tuple[bytes, list[Splice]]) -> None:
    data, splices = case
    model = data
    for splice in sorted(splices, reverse=True):
        model = model[: splice.start] + splice.text + model[splice.end :]
    assert apply(data, list(splices)) == model


@given(st.binary(min_size=2, max_size=20), st.data())
def test_apply_refuses_an_overlap(data: bytes, more: st.DataObject) -> None:
    at = more.draw(st.integers(0, len(data) - 1))
    one = Splice(more.draw(st.integers(0, at)), more.draw(st.integers(at + 1, len(data))), b"x")
    other = Splice(more.draw(st.integers(0, at)), more.draw(st.integers(at + 1, len(data))), b"y")
    with pytest.raises(GraftError, match="overlap"):
        apply(data, [one, other])


def test_insertions_at_one_place_keep_their_order() -> None:
    splices = [Splice(1, 1, b"second"), Splice(1, 1, b"third"), Splice(0, 1, b"first")]
    assert apply(b"ab", splices) == b"firstsecondthirdb"


@given(st.text(st.sampled_from("aß語😀 #"), max_size=12), st.integers(0, 3))
def test_spans_count_bytes(text: str, lines: int) -> None:
    source = "# ü\n" * lines + f"x = {text!r}, wanted\n"
    module = Module("m.py", source.encode())
    (name,) = [n for n in module.nodes if isinstance(n, ast.Name) and n.id == "wanted"]
    start, end = module.span(name)
    assert module.data[start:end] == b"wanted"
    changed = apply(module.data, [module.replace(name, "größer")])
    assert changed.decode() == source.replace("wanted", "größer")


def test_insertions_keep_the_indentation() -> None:
    module = Module("m.py", "if 'ü':\n\tx = 1\n\ty = 2".encode())
    (first, last) = [n for n in module.nodes if isinstance(n, ast.Assign)]
    splices = [module.insert_before(first, "a\nb"), module.insert_before(last, "c")]
    assert apply(module.data, splices).decode() == ("if 'ü':\n\ta\n\tb\n\tx = 1\n\tc\n\ty = 2")


def test_nothing_is_inserted_into_the_middle_of_a_line() -> None:
    module = Module("m.py", b"def f(a): return a\n")
    (found,) = [n for n in module.nodes if isinstance(n, ast.Return)]
    with pytest.raises(GraftError, match=r"m\.py:1: "):
        module.insert_before(found, "hold(a)")


def test_insertion_after_an_unfinished_last_line() -> None:
    module = Module("m.py", b"import a")
    (node,) = module.tree.body
    assert isinstance(node, ast.Import)
    changed = apply(module.data, [module.insert_after(node, "import b")])
    assert [n.names[0].name for n in ast.parse(changed).body] == ["a", "b"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "data",
    [
        b"\xef\xbb\xbfx = 1\n",
        b"x = 1\r\ny = 2\r\n",
        b"x = 1\ry = 2\n",
        b"x = 1\n\x0cy = 2\n",
        b"x = \n",
        b"x = '\x00'\n",
        b"x = '\xff'\n",
        # The columns of ast are those of the decoded text, in UTF-8.
        b"# coding: latin-1\nx = '\xe9', y\n",
        "# coding: latin-1\nx = 'é', y\n".encode(),
        b"# coding: no-such-thing\nx = 1\n",
    ],
)
def test_a_file_that_is_counted_otherwise_is_refused(data: bytes) -> None:
    with pytest.raises(GraftError, match=r"^m\.py: "):
        Module("m.py", data)


def test_calls_come_in_source_order_with_the_innermost_function() -> None:
    module = Module(
        "m.py",
        b"f(1)\ndef outer():\n    o.f(2)\n    def inner():\n        g(f(3))\n    f(4)\n",
    )
    groups = [
        (function and function.name, [call.lineno for call in calls])
        for function, calls in module.by_function(module.calls("f", "g"))
    ]
    assert groups == [(None, [1]), ("outer", [3, 6]), ("inner", [5, 5])]


def test_doctests() -> None:
    tried = 0
    for info in pkgutil.walk_packages(graft.__path__, "graft."):
        if info.name == "graft.__main__":
            continue
        failed, attempted = doctest.testmod(importlib.import_module(info.name))
        assert not failed, info.name
        tried += attempted
    assert tried
