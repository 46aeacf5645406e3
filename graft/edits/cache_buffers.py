"""``flashinfer.utils._get_cache_buf`` keeps what it outgrows."""

from __future__ import annotations

import ast

from ..module import Found, Module, Site, Splice, body_without_docstring
from .base import Edit

HOME = "flashinfer/utils.py"


def parameters(node: ast.stmt) -> list[str]:
    """Names of a plain function's parameters; none for what is called in another way."""
    match node:
        case ast.FunctionDef(args=ast.arguments(vararg=None, kwonlyargs=[], kwarg=None)):
            return [argument.arg for argument in node.args.args]
    return []


def find(module: Module, own_lengths: frozenset[str]) -> Found:
    found = Found()
    for function in module.definitions(frozenset({"_get_cache_buf", "_get_stream_cache_buf"})):
        names = parameters(function)
        if len(names) != 4 or names[0] != "name" or names[2:] != ["device", "zero_init"]:
            found.not_understood.append(Site(function.lineno, f"{function.name}{tuple(names)}"))
            continue
        assert isinstance(function, ast.FunctionDef)
        size = names[1]  # "bytes", called "num_bytes" from 0.7.0 on
        body = body_without_docstring(function)
        found.sites.append(Site(function.lineno, function.name))
        if function.name == "_get_cache_buf":
            start, _ = module.span(body[0])
            _, end = module.span(body[-1])
            text = f"return cache_buffer(_cache_buf, name, {size}, device, zero_init)"
            found.splices.append(Splice(start, end, text.encode()))
            found.imports.add("cache_buffer")
        else:
            # Only a lane's name changes hands; the stateful buffers stay with upstream's own.
            text = f"if is_lane(name):\n    return reserve_lane(name, {size}, device)"
            found.splices.append(module.insert_before(body[0], text))
            found.imports |= {"is_lane", "reserve_lane"}
    return found


EDIT = Edit(
    name="cache-buffers",
    summary="the buffer cache keeps what it outgrows; a lane's name reserves that lane",
    hazards=("A2", "A6"),
    upstream="flashinfer#4666 (keeps every buffer), in 0.7.0",
    in_scope=lambda path: path == HOME,
    marks=(b"_cache_buf",),
    find=find,
)
