"""A cuDNN plan build or a handle creation is refused while the stream captures."""

from __future__ import annotations

import ast

from ..module import Found, Function, Module, Site
from .base import Edit, in_gemm

#: The fork's versions of upstream's guard (0.7.0 on).
OURS = frozenset({"CudnnPlanBuildInCaptureError", "_check_cudnn_plan_build_not_capturing"})
HOME = "flashinfer/gemm/gemm_base.py"
#: Builds the plans of a graph that one of its callers, a builder, made.
FINISHER = "_finalize_cudnn_graph_for_tactic"
BUILDS = ("build_plans", "build_plan_at_index", FINISHER)


def is_cached(function: Function) -> bool:
    """True if ``functools.lru_cache`` remembers the function's results."""
    return any("lru_cache" in ast.unparse(d) for d in function.decorator_list)


def find(module: Module, own_lengths: frozenset[str]) -> Found:
    found = Found()
    for function, builds in module.by_function(module.calls(*BUILDS)):
        if function is not None and function.name == FINISHER:
            continue
        names = set() if function is None else {a.arg for a in function.args.args}
        if function is None or not is_cached(function) or not names & {"device", "handle"}:
            found.not_understood += [Site(call.lineno, ast.unparse(call)) for call in builds]
            continue
        # Below the cache: asked on a miss only, so a remembered plan costs nothing more.
        found.sites.append(Site(function.lineno, f"builder {function.name}"))
        found.splices.append(module.insert_before(function, "@guard_plan_build"))
        found.imports.add("guard_plan_build")
    for call in module.calls("create_handle"):
        function = module.function_of(call)
        match call:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="cudnn")), args=[], keywords=[]) if (
                function is not None and [a.arg for a in function.args.args][:1] == ["device"]
            ):
                found.sites.append(Site(call.lineno, "handle"))
                text = "create_cudnn_handle(cudnn.create_handle, device)"
                found.splices.append(module.replace(call, text))
                found.imports.add("create_cudnn_handle")
            case _:
                found.not_understood.append(Site(call.lineno, ast.unparse(call)))
    if module.path == HOME:
        found.imports |= OURS
        for definition in module.definitions(OURS):
            found.sites.append(Site(definition.lineno, f"upstream's {definition.name}"))
            found.splices.append(module.remove_definition(definition))
    return found


EDIT = Edit(
    name="plan-builds",
    summary="plan builds and handle creation are refused under capture, RELAXED otherwise",
    hazards=("A11", "A13"),
    upstream="flashinfer#4666 (plan builds), in 0.7.0",
    in_scope=in_gemm,
    marks=tuple(name.encode() for name in (*BUILDS, "create_handle", *OURS)),
    find=find,
)
