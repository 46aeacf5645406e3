"""``if w.numel() < n: w.resize_(n)`` becomes a request to the runtime, which moves nothing."""

from __future__ import annotations

import ast

from ..module import Found, Module, Site, calls
from .base import Edit, in_gemm

#: What the fork gives under names that upstream uses from 0.7.0 on.
OURS = frozenset(
    {
        "_gemm_workspace_at_least",
        "CudnnCaptureUnsafeError",
        "CudnnWorkspaceTooSmallInCaptureError",
    }
)
#: Where users and upstream's tests import these names from.
HOME = "flashinfer/gemm/gemm_base.py"


def grown(node: ast.AST) -> tuple[str, str] | None:
    """``(workspace, size)`` of a growth statement, or None if ``node`` is not one."""
    match node:
        case ast.If(
            test=ast.Compare(
                left=ast.Call(func=ast.Attribute(value=ast.Name(id=tested), attr="numel"), args=[]),
                ops=[ast.Lt()],
                comparators=[ast.Name(id=wanted)],
            ),
            body=[
                ast.Expr(
                    value=ast.Call(
                        func=ast.Attribute(value=ast.Name(id=resized), attr="resize_"),
                        args=[ast.Name(id=size)],
                        keywords=[],
                    )
                )
            ],
            orelse=[],
        ) if tested == resized and wanted == size:
            return tested, size
    return None


def find(module: Module, own_lengths: frozenset[str]) -> Found:
    found = Found()
    understood: set[int] = set()
    for node in module.nodes:
        pair = grown(node)
        if pair is None or not isinstance(node, ast.If):
            continue
        if not module.data.startswith(b"if", module.span(node)[0]):
            continue  # an elif: no statement of its own can stand there
        workspace, size = pair
        understood |= {call.lineno for call in calls(node, "resize_")}
        found.sites.append(Site(node.lineno, f"{workspace}.resize_({size})"))
        found.splices.append(
            module.replace(node, f"{workspace} = _gemm_workspace_at_least({workspace}, {size})")
        )
        found.imports.add("_gemm_workspace_at_least")
    for call in module.calls("resize_"):
        if call.lineno not in understood:
            found.not_understood.append(Site(call.lineno, ast.unparse(call)))
    if module.path == HOME:
        found.imports |= OURS
        for definition in module.definitions(OURS):
            found.sites.append(Site(definition.lineno, f"upstream's {definition.name}"))
            found.splices.append(module.remove_definition(definition))
    return found


EDIT = Edit(
    name="grow-sites",
    summary="a workspace that is too small is never resized: _gemm_workspace_at_least()",
    hazards=("A1", "A4"),
    upstream="flashinfer#4666, in 0.7.0",
    in_scope=in_gemm,
    marks=(b"resize_", *(name.encode() for name in OURS)),
    find=find,
)
