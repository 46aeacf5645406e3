"""The default workspace grows from 32 to 40 MiB."""

from __future__ import annotations

import ast

from ..module import Found, Module, Site
from .base import Edit, in_gemm

MIB = 1 << 20


def evaluate(node: ast.expr) -> int | None:
    """Value of a product of integer literals, or None.

    >>> evaluate(ast.parse("32 * 1024 * 1024", mode="eval").body)
    33554432
    """
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        left, right = evaluate(node.left), evaluate(node.right)
        return None if left is None or right is None else left * right
    return None


def find(module: Module, own_lengths: frozenset[str]) -> Found:
    found = Found()
    read: set[int] = set()
    for node in module.tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="DEFAULT_WORKSPACE_SIZE")], value=value):
                read.add(node.lineno)
                size = evaluate(value)
                if size == 32 * MIB:
                    found.sites.append(Site(node.lineno, "32 MiB"))
                    found.splices.append(module.replace(value, "40 * 1024 * 1024"))
                elif size != 40 * MIB:
                    found.not_understood.append(Site(node.lineno, ast.unparse(node)))
    for name in module.nodes:
        match name:
            case ast.Name(id="DEFAULT_WORKSPACE_SIZE", ctx=ast.Store()) if name.lineno not in read:
                found.not_understood.append(Site(name.lineno, "bound in another way"))
    return found


EDIT = Edit(
    name="default-size",
    summary="DEFAULT_WORKSPACE_SIZE is 40 MiB (cuDNN's cuBLASLt engine asks for 32 MiB + 256 B)",
    hazards=("A1", "A5"),
    upstream="flashinfer#4666, in 0.7.0 (gemm_base.py; gemm_svdquant.py still has 32 MiB in 0.7.4)",
    in_scope=in_gemm,
    marks=(b"DEFAULT_WORKSPACE_SIZE",),
    find=find,
)
