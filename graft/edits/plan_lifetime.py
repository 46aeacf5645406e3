"""A plan executed under capture is held, and execution has the device's handle to itself."""

from __future__ import annotations

import ast

from ..module import Found, Function, Module, Site, body_without_docstring, calls
from .base import Edit, in_gemm
from .plan_builds import is_cached

#: The fork's version of upstream's retention (0.7.2 on).
OURS = "_retain_cudnn_graph_if_capturing"
#: They return the handle that all threads of a device share, bound to the current stream.
HANDLE_GETTERS = ("_get_cudnn_handle", "_get_handle")


def executions(module: Module) -> list[ast.Call]:
    """Calls that run a cuDNN plan: an execute with a handle."""
    return [
        call
        for call in module.calls("execute", "execute_plan_at_index")
        if any(keyword.arg == "handle" for keyword in call.keywords)
    ]


def handle_users(module: Module) -> list[Function]:
    """Functions that fetch the shared handle and run no plan: fetching sets its stream."""
    return [
        function
        for function, _ in module.by_function(module.calls(*HANDLE_GETTERS))
        if function is not None
        and function.name not in HANDLE_GETTERS
        and not is_cached(function)  # a builder: the guard takes the lock
    ]


def made_here(function: Function) -> ast.Assign | None:
    """The statement ``graph, ... = builder(...)``, for functions that fetch their own plan."""
    for node in function.body:
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=[ast.Name(id="graph"), *_])]):
                return node
    return None


def find(module: Module, own_lengths: frozenset[str]) -> Found:
    found = Found()
    for function, calls_ in module.by_function(executions(module)):
        parameters = [] if function is None else [a.arg for a in function.args.args]
        made = None if function is None else made_here(function)
        if function is None or "a" not in parameters or not ("graph" in parameters or made):
            found.not_understood += [Site(call.lineno, ast.unparse(call)) for call in calls_]
            continue
        found.sites.append(Site(function.lineno, f"execute {function.name}"))
        found.splices.append(module.insert_before(function, "@device_locked"))
        found.imports.add("device_locked")
        if not calls(function, OURS):
            hold = f"{OURS}(graph)"
            found.imports.add(OURS)
            found.splices.append(
                module.insert_before(body_without_docstring(function)[0], hold)
                if made is None
                else module.insert_after(made, hold)
            )
    executing = {id(function) for function, _ in module.by_function(executions(module))}
    for function in handle_users(module):
        if id(function) in executing:
            continue
        if "a" not in [a.arg for a in function.args.args]:
            found.not_understood.append(Site(function.lineno, f"{function.name}: uses a handle"))
            continue
        found.sites.append(Site(function.lineno, f"handle in {function.name}"))
        found.splices.append(module.insert_before(function, "@device_locked"))
        found.imports.add("device_locked")
    for definition in module.definitions(frozenset({OURS})):
        found.sites.append(Site(definition.lineno, f"upstream's {OURS}"))
        found.splices.append(module.remove_definition(definition))
        found.imports.add(OURS)
    return found


EDIT = Edit(
    name="plan-lifetime",
    summary="a plan executed under capture is held for the graph; a lock per device around it",
    hazards=("A9", "A10", "A14", "A29"),
    upstream="flashinfer#4827 (keeps every plan for ever, 8 of 13 functions), in 0.7.2",
    in_scope=in_gemm,
    marks=(b".execute", OURS.encode(), *(name.encode() for name in HANDLE_GETTERS)),
    find=find,
)
