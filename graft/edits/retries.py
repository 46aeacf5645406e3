"""A runner's retry with the default tactic lets a capture error through."""

from __future__ import annotations

import ast

from ..module import Found, Module, Site
from .base import Edit, in_gemm

PASSED = "CudnnCaptureUnsafeError"
#: In another handler than a plain ``except Exception``, these would catch it too.
SWALLOWS = ("Exception", "RuntimeError", PASSED)


def retries_with_default(handler: ast.ExceptHandler) -> bool:
    """True if the handler runs something again with ``tactic=-1``."""
    return any(
        isinstance(node, ast.keyword) and node.arg == "tactic" and ast.unparse(node.value) == "-1"
        for node in ast.walk(handler)
    )


def find(module: Module, own_lengths: frozenset[str]) -> Found:
    found = Found()
    for node in module.nodes:
        if not isinstance(node, ast.Try):
            continue
        passed = False
        for handler in node.handlers:
            caught = "" if handler.type is None else ast.unparse(handler.type)
            if passed or not retries_with_default(handler):
                # Not a retry: another plan is not run in the place of the one asked for.
                passed |= PASSED in caught
                continue
            if caught not in ("", "Exception", "BaseException"):
                if any(name in caught for name in SWALLOWS):
                    found.not_understood.append(Site(handler.lineno, f"retry after {caught}"))
                continue
            found.sites.append(Site(handler.lineno, "retry with tactic=-1"))
            found.splices.append(module.insert_before(handler, f"except {PASSED}:\n    raise"))
            found.imports.add(PASSED)
    return found


EDIT = Edit(
    name="retries",
    summary="a runner's retry no longer swallows a capture error",
    hazards=("A22",),
    upstream="flashinfer#4666, in 0.7.0",
    in_scope=in_gemm,
    marks=(b"tactic=-1",),
    find=find,
)
