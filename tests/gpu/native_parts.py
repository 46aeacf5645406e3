"""What a release launches, taken apart on a GPU: for the native launch's tests and benchmark."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from gemms import DEVICE, Gemm

import flashinfer.gemm_workspace as workspace
from flashinfer.gemm_workspace import native, prepared
from flashinfer.gemm_workspace import state as _state

# The length of the lane that bmm_fp8 is handed on releases without it in the tuner's key.
WORKSPACE_BYTES = 40 << 20


class Execution(NamedTuple):
    """``graph.execute(pack, workspace, handle=handle)``, or its plan at ``index``."""

    graph: Any
    pack: dict[int, Any]
    workspace: torch.Tensor
    index: int | None
    handle: Any


@contextmanager
def executions() -> Any:
    """A list that fills with the cuDNN executions that are made meanwhile, by one thread."""
    import cudnn._pygraph as frontend

    made: list[Execution] = []
    kind = frontend.pygraph
    execute, at_index = kind.execute, kind.execute_plan_at_index

    def noted(graph: Any, pack: Any, space: Any = None, *args: Any, **kwargs: Any) -> Any:
        made.append(Execution(graph, dict(pack), space, None, kwargs["handle"]))
        return execute(graph, pack, space, *args, **kwargs)

    def noted_at(graph: Any, pack: Any, space: Any, index: int, *args: Any, **kwargs: Any) -> Any:
        made.append(Execution(graph, dict(pack), space, index, kwargs["handle"]))
        return at_index(graph, pack, space, index, *args, **kwargs)

    kind.execute, kind.execute_plan_at_index = noted, noted_at
    try:
        yield made
    finally:
        kind.execute, kind.execute_plan_at_index = execute, at_index


def execution(gemm: Gemm) -> Execution:
    """The one that ``gemm`` makes."""
    gemm()
    prepared.forget()  # or it would be served from memory, where nobody sees it
    with executions() as made:
        gemm()
    (one,) = made
    return one


def plan(made: Execution) -> native.Plan:
    """Its plan, rebuilt."""
    return native.cudnn(_state.current, DEVICE.index, made.graph, made.index, made.handle)


def addresses(made: Execution, rebuilt: native.Plan) -> tuple[int, ...]:
    """Of the operands, in the order of the launcher."""
    return tuple(made.pack[uid].data_ptr() for uid in rebuilt.uids)


def roles(gemm: Gemm, made: Execution, rebuilt: native.Plan) -> tuple[str, ...]:
    """Which attribute of ``gemm`` each operand of the launcher is."""
    names = {getattr(gemm, name).data_ptr(): name for name in ("a", "b", "scale", "out")}
    return tuple(names[address] for address in addresses(made, rebuilt))


def lane() -> torch.Tensor:
    """The workspace of the current stream."""
    return workspace.lane_workspace("bmm_fp8_workspace", WORKSPACE_BYTES, DEVICE)


def gemm_module() -> Any:
    """The release's compiled module with cuBLASLt's launches of FP8; compiled at the first call."""
    from flashinfer.gemm import gemm_base

    runner = gemm_base.get_gemm_module().cublas_fp8_gemm_runner()
    forward = runner.forward.__func__
    cells = dict(zip(forward.__code__.co_freevars, forward.__closure__, strict=True))
    return cells["module"].cell_contents


def algorithms(gemm: Gemm, space: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Those that cuBLASLt names for ``gemm``, 64 bytes each, and how many."""
    buffer = torch.empty(100 * 64, dtype=torch.uint8)
    count = gemm_module().bmm_fp8_get_algos(*operands(gemm, space), buffer)
    return buffer, int(count)


def operands(gemm: Gemm, space: torch.Tensor) -> tuple[Any, ...]:
    """The arguments of the release's compiled functions."""
    blas = torch.cuda.current_blas_handle()
    return (gemm.a, gemm.b, gemm.out, gemm.scale, gemm.scale, space, blas)


def launch(
    launcher: native.Launcher, addresses: tuple[int, ...], space: torch.Tensor, stream: int
) -> None:
    """One native launch, by number and addresses."""
    found = native.library()
    assert found is not None
    found.launch(launcher.number, stream, space.data_ptr(), space.numel(), *addresses)
