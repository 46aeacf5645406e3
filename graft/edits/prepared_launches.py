"""The public ops remember what a call resolved, and what is remembered is watched when it runs."""

from __future__ import annotations

import ast

from ..module import Found, Function, Module, Site, called_name
from .base import Edit
from .plan_lifetime import executions

HOME = "flashinfer/gemm/gemm_base.py"
#: A module up to 0.6.14, a package later.
TUNERS = ("flashinfer/autotuner.py", "flashinfer/autotuner/autotuner.py")
#: The public ops that are prepared.
OPS = ("bmm_fp8", "mm_bf16", "bmm_bf16", "mm_fp8", "mm_fp4", "mm_mxfp8", "bmm_mxfp8")
#: Functions of compiled modules that are called again themselves: cuBLASLt's launches, and
#: CUTLASS's for the one op that calls it without a runner. By the names that hold the modules.
LAUNCHES = {
    "bmm_fp8": "module",
    "bmm_fp8_run_with_algo": "module",
    "mm_bf16_cublaslt_run_with_algo": "module",
    "mxfp8_gemm": "raw_module",
}
#: The base class of all runners; the tuner's callers call its instances.
RUNNER = "TunableRunner"


def find(module: Module, own_lengths: frozenset[str]) -> Found:
    found = Found()
    if module.path in TUNERS:
        find_runner(module, found)
    else:
        find_ops(module, found)
        find_launches(module, found)
    return found


def find_runner(module: Module, found: Found) -> None:
    """``__call__`` of the base class, which every chosen runner goes through."""
    for definition in module.definitions(frozenset({RUNNER})):
        for node in definition.body:
            if not (isinstance(node, Function) and node.name == "__call__"):
                continue
            if ast.unparse(node.args) != "self, inputs, **kwargs" or node.decorator_list:
                found.not_understood.append(Site(node.lineno, f"{RUNNER}.__call__"))
                continue
            found.sites.append(Site(node.lineno, f"runner {RUNNER}"))
            found.splices.append(module.insert_before(node, "@noted_runner"))
            found.imports.add("noted_runner")


def find_ops(module: Module, found: Found) -> None:
    """The public ops: the decorator goes outside of the release's own."""
    for definition in module.definitions(frozenset(OPS)):
        api = [called_name(d) for d in definition.decorator_list if isinstance(d, ast.Call)]
        if not isinstance(definition, Function) or "flashinfer_api" not in api:
            found.not_understood.append(Site(definition.lineno, f"op {definition.name}"))
            continue
        found.sites.append(Site(definition.lineno, f"op {definition.name}"))
        found.splices.append(
            module.insert_above(definition.decorator_list[0], "@prepared_launches")
        )
        found.imports.add("prepared_launches")


def find_launches(module: Module, found: Found) -> None:
    """``graph.execute(...)`` and ``module.launch(...)``: what they are called on is watched."""
    calls = [
        *executions(module),
        *(call for call in module.calls(*LAUNCHES) if is_launch(call)),
    ]
    for call in calls:
        match call.func:
            case ast.Attribute(value=ast.Name(id=owner) as name):
                found.sites.append(Site(call.lineno, f"launch {ast.unparse(call.func)}"))
                found.splices.append(module.replace(name, f"watched({owner})"))
                found.imports.add("watched")
            case _:
                found.not_understood.append(Site(call.lineno, ast.unparse(call.func)))


def is_launch(call: ast.Call) -> bool:
    """True for a function of a compiled module, of one of :data:`LAUNCHES`."""
    match call.func:
        case ast.Attribute(value=ast.Name(id=owner), attr=name):
            return LAUNCHES[name] == owner
    return False


EDIT = Edit(
    name="prepared-launches",
    summary="a call of a signature seen before makes the same launch without deciding again",
    hazards=("A14",),
    upstream="none: 0.7.x decides at each call",
    in_scope=lambda path: path in (HOME, *TUNERS),
    marks=(b"def __call__", *(f"def {op}(".encode() for op in OPS)),
    find=find,
)
