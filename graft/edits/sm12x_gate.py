"""``bmm_fp8`` auto leaves the cuDNN runner out on SM12x below cuDNN 9.23.1."""

from __future__ import annotations

import ast

from ..module import Found, Function, Module, Site, Splice, body_without_docstring
from .base import Edit

HOME = "flashinfer/gemm/gemm_base.py"
HEURISTIC = "_heuristic_func_bmm_fp8"
DISPATCH = "fp8_gemm_sm100"


def upstream_gate(function: Function) -> tuple[ast.If, ast.stmt] | None:
    """Upstream's own gate (0.6.18 on): the outer ``if`` and the statement that adds cuDNN."""
    for node in ast.walk(function):
        match node:
            case ast.If(
                test=ast.BoolOp(),
                body=[ast.If(orelse=[ast.Expr() as adds])],
            ) if "CUDNN_AVAILABLE" in ast.unparse(node.test) and "'cudnn'" in ast.unparse(adds):
                return node, adds
    return None


def find(module: Module, own_lengths: frozenset[str]) -> Found:
    found = Found()
    for node in module.definitions(frozenset({HEURISTIC, DISPATCH})):
        if not isinstance(node, Function):
            found.not_understood.append(Site(node.lineno, f"{node.name} is no function"))
            continue
        names = [argument.arg for argument in node.args.args]
        if node.name == DISPATCH:
            if names[:1] != ["a"] or "runner_names" not in names:
                found.not_understood.append(Site(node.lineno, f"{node.name}{tuple(names)}"))
                continue
            found.sites.append(Site(node.lineno, node.name))
            text = "runner_names = gate_sm12x_cudnn(runner_names, a)"
            found.splices.append(module.insert_before(body_without_docstring(node)[0], text))
        else:
            returns = [n for n in ast.walk(node) if isinstance(n, ast.Return)]
            if len(returns) != 1 or not isinstance(returns[0].value, ast.Name) or "A" not in names:
                found.not_understood.append(Site(node.lineno, f"{node.name}: its returns"))
                continue
            value = returns[0].value
            found.sites.append(Site(returns[0].lineno, node.name))
            found.splices.append(module.replace(value, f"gate_sm12x_cudnn({value.id}, A)"))
            gate = upstream_gate(node)
            if gate is not None:
                # Upstream's gate also drops the only runner, and is not in fp8_gemm_sm100.
                outer, adds = gate
                found.sites.append(Site(outer.body[0].lineno, "upstream's gate"))
                assert outer.body[0].end_lineno is not None
                start = module.line_start((outer.test.end_lineno or outer.lineno) + 1)
                end = module.line_start(outer.body[0].end_lineno + 1)
                first, last = module.span(adds)
                pad = b" " * outer.body[0].col_offset
                found.splices.append(Splice(start, end, pad + module.data[first:last] + b"\n"))
        found.imports.add("gate_sm12x_cudnn")
    return found


EDIT = Edit(
    name="sm12x-gate",
    summary="bmm_fp8 auto drops the cuDNN runner on SM12x below cuDNN 9.23.1",
    hazards=("A23", "A36"),
    upstream="flashinfer#4165 (heuristic only), in 0.6.18; flashinfer#4426 (dispatch), open",
    in_scope=lambda path: path == HOME,
    marks=(b"bmm_fp8",),
    find=find,
)
