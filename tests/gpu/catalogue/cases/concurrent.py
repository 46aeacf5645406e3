"""Launches that may run at once: replays, branches of one graph, threads."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import torch

from .. import ops
from ..case import ALL, BLACKWELL, CUDNN, Absent, Outcome, case, outcome
from ..memory import MIB, Others, churn, tidy
from ..ops import SPLIT_K, Call, asking, described


@case(
    "B13",
    "four graphs with pools of their own are replayed at once on four streams",
    "A16",
    ALL,
    seconds=150,
    known=("0.6", "0.7"),
)
def replayed_at_once(lane: str) -> Outcome:
    figures, wrong_at_all, rounds = {}, 0, 250
    for shape in SPLIT_K:
        calls = [Call(lane, shape, seed=number) for number in range(4)]
        references = [call.eager() for call in calls]
        graphs = [call.captured(20) for call in calls]
        streams = [torch.cuda.Stream() for _ in calls]
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(rounds):
            for call in calls:
                call.out.zero_()
            torch.cuda.synchronize()
            for stream, graph in zip(streams, graphs, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
            torch.cuda.synchronize()
            for call, reference in zip(calls, references, strict=True):
                wrong += (call.out != reference).any()
        figures["x".join(map(str, shape))] = f"{int(wrong)} of {4 * rounds} wrong"
        wrong_at_all += int(wrong)
    return outcome(wrong_at_all == 0, figures=figures)


@case(
    "B14",
    "eight threads, each with a stream of its own, 200 GEMMs each",
    "A14 A16",
    ALL,
    seconds=150,
)
def eight_threads(lane: str) -> Outcome:
    shape = (1, 64, 512, 16384)
    kinds, turns = 4, 200
    wrong: list[int] = []
    failures: list[str] = []
    barrier = threading.Barrier(8)

    def work(number: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                call = Call(lane, shape, seed=10 * number)
                inputs = [Call(lane, shape, seed=10 * number + kind).a for kind in range(kinds)]
                references = []
                for each in inputs:
                    call.a.copy_(each)
                    call()
                    torch.cuda.current_stream().synchronize()
                    references.append(call.out.clone())
                count = torch.zeros((), dtype=torch.int64, device="cuda")
                torch.cuda.current_stream().synchronize()
                barrier.wait(100)
                for turn in range(turns):
                    # Late on this stream: a launch on any other would read the old input.
                    torch.cuda._sleep(20_000)
                    call.a.copy_(inputs[turn % kinds])
                    call()
                    count += (call.out != references[turn % kinds]).any()
                torch.cuda.current_stream().synchronize()
                wrong.append(int(count))
        except Exception as error:
            failures.append(described(error))
            barrier.abort()

    if lane in BLACKWELL:
        raise Absent("the inputs of block-scaled ops are not swapped by this case")
    # One at a time first: plans and modules are built, references are nobody else's.
    Call(lane, shape).eager()
    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcome(
        not failures and sum(wrong) == 0,
        note="; ".join(sorted(set(failures)))[:300],
        figures={"wrong of": f"{sum(wrong)} of {8 * turns}", "threads that failed": len(failures)},
    )


def _still_right(call: Call, graph: torch.cuda.CUDAGraph, reference: torch.Tensor) -> Outcome:
    """Memory is churned and taken by others; twenty replays are right and touch none of them."""
    tidy()
    churn()
    others = Others(16)
    equal = all(torch.equal(call.replayed(graph), reference) for _ in range(20))
    overwritten = others.overwritten()
    return outcome(
        equal and overwritten == 0,
        figures={"replays right": equal, "bytes of others overwritten": overwritten},
    )


@case("B15", "a worker thread warms, captures and ends; the main thread replays", "A17", ALL)
def thread_gone(lane: str) -> Outcome:
    made: dict[str, object] = {}

    def work() -> None:
        call = Call(lane, (1, 16, 1024, 16384))
        made["reference"] = call.eager()
        made["graph"] = call.captured()
        made["call"] = call

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if "call" not in made:
        return outcome(False, note="the worker thread raised")
    call, graph, reference = made["call"], made["graph"], made["reference"]
    assert isinstance(call, Call)
    assert isinstance(graph, torch.cuda.CUDAGraph)
    assert isinstance(reference, torch.Tensor)
    return _still_right(call, graph, reference)


@case(
    "B16",
    "two graphs of one pool and stream; one dies, memory is churned, the other is replayed",
    "A6 A17",
    ALL,
    finishes=True,
)
def sibling_destroyed(lane: str) -> Outcome:
    first, second = (Call(lane, (1, 16, 1024, 16384), seed=seed) for seed in (1, 2))
    first.eager()
    reference = second.eager()
    # As after a reload: the first use of a workspace is then in the first capture.
    ops.forget_workspaces()
    pool = torch.cuda.graph_pool_handle()
    one, two = first.captured(pool=pool), second.captured(pool=pool)
    first.replayed(one)
    del one
    return _still_right(second, two, reference)


@case(
    "B27",
    "one capture forks to one and to two more streams, a split-K GEMM on each, 20 times",
    "A16",
    ALL,
    known=("0.6",),
)
def forked(lane: str) -> Outcome:
    figures, wrong_at_all, rounds = {}, 0, 200
    shapes = [(1, 64, 512, 65536), (1, 128, 256, 32768), (1, 64, 512, 65536)]
    for branches in (2, 3):
        calls = [Call(lane, shape, seed=seed) for seed, shape in enumerate(shapes[:branches])]
        references = [call.eager() for call in calls]
        sides = [torch.cuda.Stream() for _ in calls[1:]]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            main = torch.cuda.current_stream()
            for _ in range(20):
                for call, side in zip(calls[1:], sides, strict=True):
                    side.wait_stream(main)
                    with torch.cuda.stream(side):
                        call()
                calls[0]()
                for side in sides:
                    main.wait_stream(side)
        wrong = 0
        for _ in range(rounds):
            for call in calls:
                call.out.zero_()
            graph.replay()
            torch.cuda.synchronize()
            wrong += sum(
                not torch.equal(call.out, reference)
                for call, reference in zip(calls, references, strict=True)
            )
        figures[f"{branches} streams"] = f"{wrong} of {rounds * branches} wrong"
        wrong_at_all += wrong
        del graph
        gc.collect()
    return outcome(wrong_at_all == 0, figures=figures)


def _another_thread(lane: str, mode: str, work: Callable[[Call], None]) -> tuple[str, str, bool]:
    """(how A's capture ended, how B ended, whether A's replay is right)."""
    mine = Call(lane, (1, 16, 1024, 16384), seed=1)
    reference = mine.eager()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        other = Call(lane, (1, 40, 2048, 8192), seed=2)
        torch.cuda.current_stream().synchronize()
    said: list[str] = []

    def run() -> None:
        try:
            with torch.cuda.stream(stream):
                work(other)
            said.append("served")
        except Exception as error:
            said.append(described(error))

    graph = torch.cuda.CUDAGraph()
    how, equal = "right", False
    try:
        with torch.cuda.graph(graph, capture_error_mode=mode):
            mine()
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
            mine()
    except Exception as error:
        how = described(error)
        torch.cuda.synchronize()
    else:
        equal = torch.equal(mine.replayed(graph), reference)
        how = "right" if equal else "wrong result"
    return how, said[0] if said else "nothing", equal


@case(
    "B29",
    "while thread A captures, thread B uses a workspace for the first time, grows it and builds",
    "A13",
    (*CUDNN, *BLACKWELL),
)
def another_thread(lane: str) -> Outcome:
    figures: dict[str, object] = {}
    fine = True

    def work(other: Call) -> None:
        other()
        with asking(300 * MIB):
            other()

    for mode in ("thread_local", "relaxed", "global"):
        how, said, equal = _another_thread(lane, mode, work)
        figures[mode] = f"A: {how}; B: {said}"
        fine = fine and equal and said == "served"
        ops.clear_plan_caches()
        ops.forget_workspaces()
    after = Call(lane, (1, 24, 1024, 4096), seed=5)
    try:
        figures["usable afterwards"] = after.right()
    except Exception as error:
        figures["usable afterwards"] = described(error)
        fine = False
    return outcome(fine and figures["usable afterwards"] is True, figures=figures)
