"""A workspace is outgrown, replaced or cleared while graphs hold its address."""

from __future__ import annotations

import gc
import weakref

import torch

from .. import ops
from ..case import ALL, BLACKWELL, CUDNN, Absent, Outcome, case, outcome
from ..memory import MIB, Others, churn, tidy
from ..ops import Call, asking, cudnn_sibling, described, giant, is_typed, needed, runtime, user

DESCENDING = (256, 128, 64, 48, 32, 24, 16, 8, 1)


@case(
    "B1",
    "a graph is captured, an eager call outgrows the workspace, the graph is replayed",
    "A1 A4",
    ALL,
    known=("0.6",),
)
def moved(lane: str) -> Outcome:
    x = user(lane)
    reference = x.eager()
    address = x.workspace().data_ptr()
    graph = x.captured()
    big = giant(cudnn_sibling(lane))
    figures = {}
    fine = True
    for how, nbytes in (("a plan of this cuDNN", 0), ("a plan that asks for 300 MiB", 300 * MIB)):
        with asking(nbytes):
            right = big.right()
        others = Others()
        equal = torch.equal(x.replayed(graph), reference)
        overwritten = others.overwritten()
        moved = x.workspace().data_ptr() != address
        figures[how] = f"{overwritten} bytes of others overwritten"
        fine = fine and equal and right and not overwritten and not moved
        if moved:
            figures[how] += ", workspace moved"
        if not (equal and right):
            figures[how] += f", replay right {equal}, growing call right {right}"
        del others
    return outcome(fine, figures=figures)


@case(
    "B2",
    "a cached buffer is outgrown; a graph that writes to the old one is replayed",
    "A2",
    ("fp8-cudnn", "bf16-cudnn", "other-name"),
    known=("0.6",),
)
def outgrown_buffer(lane: str) -> Outcome:
    name = ops.WORKSPACES.get(lane, "catalogue_other_workspace")
    device = torch.device("cuda:0")
    figures, fine = {}, True
    for getter_name in ("_get_cache_buf", "_get_stream_cache_buf"):
        getter = getattr(ops.utils, getter_name, None)
        if getter is None:
            continue
        buffer = getter(name, 8 * MIB, device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            buffer.fill_(0x5A)
        getter(name, 16 * MIB, device)
        del buffer
        probes = [torch.zeros(8 * MIB, dtype=torch.uint8, device=device) for _ in range(3)]
        graph.replay()
        torch.cuda.synchronize()
        hit = sum(int(probe.count_nonzero()) for probe in probes)
        figures[getter_name] = f"{hit} bytes of others overwritten"
        fine = fine and hit == 0
        del probes, graph
        tidy()
    return outcome(fine, figures=figures)


@case(
    "B3",
    "a workspace of the caller's own is too small for the plan",
    "A1 A4",
    CUDNN,
    known=("0.6",),
)
def callers_own(lane: str) -> Outcome:
    call = Call(lane, (1, 48, 80, 64))
    own = torch.zeros(1024, dtype=torch.uint8, device="cuda")
    address = own.data_ptr()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        own.fill_(0x5A)
    if call.op == "fp8":
        run = needed(ops.gemm_base, "fp8_gemm_sm100")
        run(call.a, call.b, call.scale, call.scale, call.out, own, ["cudnn"])
    else:
        run = needed(ops.gemm_base, "bf16_gemm_sm100")
        run(call.a, call.b, None, False, call.out, own, ["cudnn"])
    torch.cuda.synchronize()
    error = call.error()
    probes = [torch.zeros(1024, dtype=torch.uint8, device="cuda") for _ in range(512)]
    graph.replay()
    torch.cuda.synchronize()
    hit = sum(int(probe.count_nonzero()) for probe in probes)
    writes = int((own[:1024] == 0x5A).sum())
    same = own.data_ptr() == address and own.numel() == 1024
    return outcome(
        same and hit == 0 and writes == 1024 and error < call.tolerance,
        figures={
            "relative error": round(error, 5),
            "length after": own.numel(),
            "same address": same,
            "graph still writes to it, bytes": writes,
            "bytes of others overwritten": hit,
        },
    )


@case(
    "B4",
    "nine captures in a row in one pool; the eighth outgrows the workspace",
    "A1 A25 A30",
    (*CUDNN, *BLACKWELL),
)
def eighth_outgrows(lane: str) -> Outcome:
    calls = [Call(lane, (1, m, 1024, 16384), seed=m) for m in DESCENDING]
    references = [call.eager() for call in calls]
    pool = torch.cuda.graph_pool_handle()
    graphs: list[torch.cuda.CUDAGraph | None] = []
    refused = ""
    for number, call in enumerate(calls):
        try:
            with asking(300 * MIB if number == 7 else 0):
                graphs.append(call.captured(pool=pool))
        except Exception as error:
            if not is_typed(error):
                raise
            graphs.append(None)
            refused = described(error)
    tidy()
    others = Others(16)
    wrong = sum(
        not torch.equal(call.replayed(graph), reference)
        for call, graph, reference in zip(calls, graphs, references, strict=True)
        if graph is not None
    )
    overwritten = others.overwritten()
    return outcome(
        wrong == 0 and overwritten == 0,
        note=f"the eighth capture refused ({refused})" if refused else "",
        figures={
            "wrong replays": wrong,
            "bytes of others overwritten": overwritten,
            "captured": sum(graph is not None for graph in graphs),
        },
    )


@case(
    "B21",
    "captures in descending batches, each warmed first; small batches need more and more",
    "A25",
    (*CUDNN, *BLACKWELL),
    known=("0.6",),
)
def descending(lane: str) -> Outcome:
    pool = torch.cuda.graph_pool_handle()
    kept, refused, overwritten = [], 0, 0
    others = []
    for number, m in enumerate(DESCENDING):
        call = Call(lane, (1, m, 1024, 16384), seed=m)
        with asking((64 + 48 * number) * MIB if m <= 32 else 0):
            reference = call.eager()
            try:
                graph = call.captured(pool=pool)
            except Exception as error:
                if not is_typed(error):
                    raise
                refused += 1
                continue
        kept.append((call, graph, reference))
        others.append(Others(2))
    wrong = 0
    for _ in range(3):
        for call, graph, reference in kept:
            wrong += not torch.equal(call.replayed(graph), reference)
    overwritten = sum(each.overwritten() for each in others)
    return outcome(
        wrong == 0 and overwritten == 0,
        note=f"{refused} small batches could not be captured (typed refusal)" if refused else "",
        figures={
            "graphs": len(kept),
            "wrong replays": wrong,
            "bytes of others overwritten": overwritten,
        },
    )


@case(
    "B24",
    "first call under inference mode, a later one outside it that outgrows the workspace",
    "A31",
    (*CUDNN, *BLACKWELL),
)
def inference_mode(lane: str) -> Outcome:
    with torch.inference_mode():
        first = user(lane).eager()
    big = giant(lane)
    with asking(96 * MIB):
        right = big.right()
        again = big.right()
    again = again and user(lane).right()
    with torch.inference_mode():
        inside = big.right()
    return outcome(
        right and again and inside,
        figures={
            "right outside": right and again,
            "right inside again": inside,
            "rows": first.shape[-2],
        },
    )


@case("B25", "caches are cleared while a graph lives; it is replayed", "A3", ALL, known=("0.6",))
def cleared(lane: str) -> Outcome:
    x = user(lane)
    reference = x.eager()
    graph = x.captured()
    clear = getattr(ops.gemm_base, "clear_cudnn_graph_cache", None)
    if clear is not None:
        clear()
    ops.clear_plan_caches()
    ops.forget_workspaces()
    tidy()
    churn()
    others = Others(16)
    equal = all(torch.equal(x.replayed(graph), reference) for _ in range(20))
    overwritten = others.overwritten()
    later = Call(lane, (1, 64, 512, 4096), seed=9)
    usable = later.right()
    return outcome(
        equal and overwritten == 0 and usable,
        figures={
            "replays right": equal,
            "bytes of others overwritten": overwritten,
            "ops right afterwards": usable,
        },
    )


@case(
    "B25-plans",
    "thirty-two graphs die and the plan cache is cleared: how many plans are left",
    "A29",
    CUDNN,
    known=("0.7",),
)
def plans_of_dead_graphs(lane: str) -> Outcome:
    seen: list[weakref.ref[object]] = []

    def one(m: int) -> None:
        call = Call(lane, (1, m, 512, 1024), seed=m)
        call.eager()
        ops.local.plans = []
        graph = call.captured()
        seen.extend(weakref.ref(plan) for plan in ops.local.plans)
        ops.local.plans = None
        call.replayed(graph)

    for m in range(1, 33):
        one(m)
    if not seen:
        raise Absent("this version's ops execute no plan under capture")
    gc.collect()
    held = sum(ref() is not None for ref in seen)
    ops.clear_plan_caches()
    tidy()
    fork = runtime()
    left = len(seen)
    for _ in range(2000):  # the driver runs destructors of user objects in its own time
        torch.cuda.synchronize()
        if fork is not None:
            fork.collect()
        gc.collect(0)
        left = sum(ref() is not None for ref in seen)
        if left == 0 or fork is None:
            break
    return outcome(left == 0, figures={"plans executed": len(seen), "before": held, "left": left})
