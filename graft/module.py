"""A Python file of a release: its bytes, its tree, and the way from one to the other."""

from __future__ import annotations

import ast
import functools
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field

from .errors import GraftError


@dataclass(frozen=True, order=True)
class Splice:
    """Replace ``data[start:end]`` by ``text``; an insertion has ``start == end``."""

    start: int
    end: int
    text: bytes


@dataclass(frozen=True, order=True)
class Site:
    """A place that an edit changes: its line in the release and what stands there."""

    line: int
    what: str


@dataclass
class Found:
    """What one edit found in one module."""

    sites: list[Site] = field(default_factory=list)
    splices: list[Splice] = field(default_factory=list)
    #: Names that the changed lines take from ``flashinfer.gemm_workspace``.
    imports: set[str] = field(default_factory=set)
    #: Looks like a site, has no shape that the edit knows. Stops the build.
    not_understood: list[Site] = field(default_factory=list)


Function = ast.FunctionDef | ast.AsyncFunctionDef


class Module:
    """Parsed source of one file. ``path`` is its path in the wheel.

    ``ast`` counts columns in UTF-8 bytes, so everything here works on bytes, and a file that
    ``ast`` and we count differently (another encoding, a BOM, a lone carriage return, a form
    feed) is refused.
    """

    def __init__(self, path: str, data: bytes) -> None:
        self.path = path
        self.data = data
        if data.startswith(b"\xef\xbb\xbf") or b"\x0c" in data or b"\r" in data:
            raise GraftError(f"{path}: has a byte order mark, form feed or carriage return")
        try:
            encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
            if encoding != "utf-8":
                raise GraftError(f"{path}: is in {encoding}, not UTF-8")
            self.tree = ast.parse(data, filename=path)
        except (SyntaxError, ValueError) as error:
            raise GraftError(f"{path}: does not parse as Python: {error}") from None
        self._starts = [0]
        for line in data.split(b"\n"):
            self._starts.append(self._starts[-1] + len(line) + 1)

    def line_start(self, line: int) -> int:
        """Offset in bytes of the first column of ``line`` (counted from 1)."""
        return min(self._starts[line - 1], len(self.data))

    def span(self, node: ast.stmt | ast.expr) -> tuple[int, int]:
        """Offsets in bytes of the node, decorators not included."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            self.line_start(node.lineno) + node.col_offset,
            self.line_start(node.end_lineno) + node.end_col_offset,
        )

    def replace(self, node: ast.stmt | ast.expr, text: str) -> Splice:
        """Put ``text`` in the place of ``node``."""
        return Splice(*self.span(node), text.encode())

    def insert_before(self, node: ast.stmt | ast.excepthandler, text: str) -> Splice:
        """Insert ``text`` as lines of their own before ``node``, at its indentation."""
        at = self.line_start(node.lineno)
        return Splice(at, at, self._indented(node, text))

    def insert_above(self, decorator: ast.expr, text: str) -> Splice:
        """Insert ``text`` as a line of its own above ``decorator``, at the indentation of its @."""
        at = self.line_start(decorator.lineno)
        line = self.data[at : self.span(decorator)[0]]
        pad = line[: len(line) - len(line.lstrip())]
        if line.strip() != b"@":
            raise GraftError(f"{self.path}:{decorator.lineno}: does not begin a line of its own")
        return Splice(at, at, pad + text.encode() + b"\n")

    def insert_after(self, node: ast.stmt, text: str) -> Splice:
        """Insert ``text`` as lines of their own after ``node``, at its indentation."""
        assert node.end_lineno is not None
        at = self.line_start(node.end_lineno + 1)
        unfinished = b"" if self.data[:at].endswith(b"\n") else b"\n"
        return Splice(at, at, unfinished + self._indented(node, text))

    def _indented(self, node: ast.stmt | ast.excepthandler, text: str) -> bytes:
        at = self.line_start(node.lineno)
        pad = self.data[at : at + node.col_offset]
        if pad.strip():
            raise GraftError(f"{self.path}:{node.lineno}: does not begin a line of its own")
        return b"".join(pad + line.encode() + b"\n" for line in text.splitlines())

    def remove_definition(self, node: Function | ast.ClassDef) -> Splice:
        """Take a definition out, leaving one line that says where its name comes from now."""
        assert node.end_lineno is not None
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        note = f"# {node.name}: imported from flashinfer.gemm_workspace.\n"
        return Splice(self.line_start(first), self.line_start(node.end_lineno + 1), note.encode())

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the tree, outer ones first."""
        return list(ast.walk(self.tree))

    @functools.cached_property
    def _calls(self) -> dict[str, list[ast.Call]]:
        index: dict[str, list[ast.Call]] = {}
        for node in self.nodes:
            if isinstance(node, ast.Call):
                index.setdefault(called_name(node), []).append(node)
        return index

    @functools.cached_property
    def _functions(self) -> list[Function]:
        return [node for node in self.nodes if isinstance(node, Function)]

    def calls(self, *names: str) -> list[ast.Call]:
        """Calls of one of ``names``, in source order."""
        found = [call for name in names for call in self._calls.get(name, [])]
        return sorted(found, key=lambda call: (call.lineno, call.col_offset))

    def function_of(self, node: ast.expr) -> Function | None:
        """The innermost function around ``node``."""
        around = [f for f in self._functions if f.lineno <= node.lineno <= (f.end_lineno or 0)]
        return max(around, key=lambda f: f.lineno, default=None)

    def by_function(self, calls: list[ast.Call]) -> list[tuple[Function | None, list[ast.Call]]]:
        """Group calls by the innermost function around them, in source order."""
        groups: dict[Function | None, list[ast.Call]] = {}
        for call in calls:
            groups.setdefault(self.function_of(call), []).append(call)
        return list(groups.items())

    def definitions(self, names: frozenset[str]) -> Iterator[Function | ast.ClassDef]:
        """Top-level functions and classes called one of ``names``."""
        for node in self.tree.body:
            if isinstance(node, Function | ast.ClassDef) and node.name in names:
                yield node

    def imported_names(self) -> set[str]:
        """Names that ``from ... import`` binds at the top level."""
        return {
            alias.asname or alias.name
            for node in self.tree.body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }

    def defined_names(self) -> set[str]:
        """Names that the module itself defines at its top level."""
        names: set[str] = set()
        for node in self.tree.body:
            if isinstance(node, Function | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Assign):
                names |= {t.id for t in node.targets if isinstance(t, ast.Name)}
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
        return names


def apply(data: bytes, splices: list[Splice]) -> bytes:
    """Return ``data`` with every splice made; two that overlap are an error.

    >>> apply(b"abcd", [Splice(1, 2, b"XX"), Splice(4, 4, b"!")])
    b'aXXcd!'
    """
    out, at = [], 0
    for splice in sorted(splices, key=lambda s: (s.start, s.end)):
        if splice.start < at:
            raise GraftError(f"two edits overlap at byte {splice.start}")
        out += [data[at : splice.start], splice.text]
        at = splice.end
    return b"".join([*out, data[at:]])


def called_name(call: ast.Call) -> str:
    """Last part of what is called: ``a.b.c(...)`` and ``c(...)`` both give ``c``.

    >>> called_name(ast.parse("torch.cuda.f(1)", mode="eval").body)
    'f'
    """
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def calls(node: ast.AST, *names: str) -> list[ast.Call]:
    """Calls of one of ``names`` anywhere under ``node``, in source order."""
    found = [n for n in ast.walk(node) if isinstance(n, ast.Call) and called_name(n) in names]
    return sorted(found, key=lambda n: (n.lineno, n.col_offset))


def body_without_docstring(function: Function) -> list[ast.stmt]:
    """Statements of a function after its docstring."""
    first = function.body[0]
    if (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    ):
        return function.body[1:]
    return function.body
