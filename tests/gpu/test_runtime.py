"""The runtime alone on a real device: arenas, lanes, holds. No FlashInfer release is needed."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import flashinfer.gemm_workspace as workspace

MIB = 1 << 20
NAME = "bmm_fp8_workspace"
MODES = ("global", "thread_local", "relaxed")


@pytest.fixture(autouse=True)
def fresh() -> Any:
    """Lanes of one test are not those of another."""
    from flashinfer.gemm_workspace.device import CudaDevice

    with workspace.use_device(CudaDevice()) as state:
        yield state
        torch.cuda.synchronize()


def lane(nbytes: int = 32 * MIB, name: str = NAME) -> torch.Tensor:
    return workspace.lane_workspace(name, nbytes, torch.device("cuda:0"))


def mapped() -> int:
    """Bytes that the driver has handed out, of any allocator."""
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.mark.parametrize("mode", MODES)
def test_growth_under_capture_in_place(mode: str) -> None:
    """The lane grows in place; an earlier graph and this one replay right; new bytes are zero."""
    first = torch.cuda.CUDAGraph()
    pool = torch.cuda.graph_pool_handle()
    with torch.cuda.graph(first, pool=pool, capture_error_mode=mode):
        small = lane()
        small[:1024].add_(1)
    second = torch.cuda.CUDAGraph()
    with torch.cuda.graph(second, pool=pool, capture_error_mode=mode):
        again = lane()
        grown = workspace._gemm_workspace_at_least(again, 300 * MIB)
        grown[-1024:].fill_(9)
        grown[:1024].add_(1)
    assert grown.numel() == 300 * MIB
    assert small.data_ptr() == again.data_ptr() == grown.data_ptr()
    for graph in (first, second, first):
        graph.replay()
    torch.cuda.synchronize()
    assert (int(small[0]), int(grown[0]), int(grown[-1])) == (3, 3, 9)
    assert int(grown[64 * MIB : 299 * MIB].max()) == 0


def test_address_unchanged_over_a_hundred_growths() -> None:
    view = lane()
    address = view.data_ptr()
    view.fill_(7)
    size = view.numel()
    for _ in range(100):
        size += 3 * MIB
        view = workspace._gemm_workspace_at_least(view, size)
        assert view.data_ptr() == address
        assert view.numel() == size
    assert int(view[: 32 * MIB].min()) == 7  # what was there is there
    assert int(view[40 * MIB :].max()) == 0  # what came is zero


def test_a_graph_releases_what_it_held(fresh: Any) -> None:
    plan = type("Plan", (), {})()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lane()[:8].add_(1)
        workspace._retain_cudnn_graph_if_capturing(plan)
    graph.replay()
    torch.cuda.synchronize()
    assert workspace.stats()["plans_held"] == 1
    del graph
    gc.collect()
    torch.cuda.synchronize()
    for size in range(1, 5000):  # the driver runs destructors of user objects in its own time
        torch.cuda.synchronize()
        lane(size, "mm_fp4_workspace")  # a new length: the slow path, which collects
        if workspace.stats()["plans_held"] == 0:
            break
    assert workspace.stats()["plans_held"] == 0


def test_an_aborted_capture_releases_too() -> None:
    def aborted() -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            lane()[:8].add_(1)
            raise KeyError("the engine's own")

    for _ in range(20):
        with pytest.raises(KeyError):
            aborted()
        gc.collect()
        torch.cuda.synchronize()
    lane()
    assert len(workspace.stats()["lanes"]) <= 4


def test_ten_thousand_captures_leave_no_trace() -> None:
    """Re-capturing, as training loops do: lanes, plans and bytes stay as after the first."""

    def capture() -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            lane()[:8].add_(1)
            workspace._retain_cudnn_graph_if_capturing(object())
        return graph

    graph = capture()
    for _ in range(50):
        graph = capture()
    torch.cuda.synchronize()
    lanes, bytes_before = len(workspace.stats()["lanes"]), mapped()
    for _ in range(10_000):
        graph = capture()
    graph.replay()
    torch.cuda.synchronize()
    assert len(workspace.stats()["lanes"]) <= lanes + 1
    assert mapped() - bytes_before <= 64 * MIB
    assert workspace.stats()["plans_held"] <= 64


def test_graphs_of_one_pool_share_a_lane_and_others_do_not() -> None:
    pool = torch.cuda.graph_pool_handle()
    mem_pool = torch.cuda.MemPool()
    seen: dict[str, set[int]] = {}
    graphs = []
    for how, arguments in {
        "tuple": {"pool": pool},
        "tuple again": {"pool": pool},
        "MemPool": {"pool": mem_pool.id},
        "none": {},
        "none again": {},
    }.items():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, **arguments):
            seen[how] = {lane().data_ptr()}
            lane()[:8].add_(1)
        graphs.append(graph)
    with_pool_of = torch.cuda.CUDAGraph()
    with torch.cuda.graph(with_pool_of, pool=graphs[3].pool()):
        seen["pool of none"] = {lane().data_ptr()}
    assert seen["tuple"] == seen["tuple again"]
    assert seen["none"] == seen["pool of none"]
    different = [seen[how] for how in ("tuple", "MemPool", "none", "none again")]
    assert len(set.union(*different)) == 4


def test_the_graph_of_the_accelerator() -> None:
    """torch.accelerator.Graph names its pool when it is made."""
    graph_class: Any = getattr(torch.accelerator, "Graph", None)
    if graph_class is None:
        pytest.skip(f"torch {torch.__version__} has no torch.accelerator.Graph")
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream()
    seen, graphs = [], []
    for given in (pool, pool, None):
        graph = graph_class(pool=given)
        with torch.cuda.stream(stream), graph:
            assert workspace.captures.registry.running() == 1
            seen.append(lane().data_ptr())
            lane()[:8].add_(1)
        graphs.append(graph)
    assert seen[0] == seen[1] != seen[2]


def test_a_capture_that_the_driver_began(fresh: Any) -> None:
    """Nobody saw it begin: it has lanes of its own, and they go with its graph."""
    from cuda.bindings import driver

    def captured() -> tuple[int, Any]:
        with torch.cuda.stream(torch.cuda.Stream()) as _:
            stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
            mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
            (status,) = driver.cuStreamBeginCapture(stream, mode)
            assert int(status) == 0
            view = lane()
            view[:8].add_(1)
            status, graph = driver.cuStreamEndCapture(stream)
            assert int(status) == 0
            return view.data_ptr(), graph

    eager = lane().data_ptr()
    first, graph = captured()
    second, other = captured()
    assert len({eager, first, second}) == 3
    assert workspace.stats()["graphs_alive"] == 2
    for each in (graph, other):
        (status,) = driver.cuGraphDestroy(each)
        assert int(status) == 0
    assert workspace.stats()["graphs_alive"] == 0
    assert captured()[0] in (first, second)


def test_several_captures_at_once_and_several_threads_in_one() -> None:
    """Each capture has its own lanes; a thread that takes its turn in one has that one's."""
    started, go_on = threading.Barrier(2, timeout=60), threading.Barrier(2, timeout=60)
    seen: dict[str, int] = {}

    def own_capture() -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.Stream()):
            # torch.cuda.graph would wait for the device first, and another capture runs.
            graph.capture_begin(capture_error_mode="thread_local")
            started.wait()
            seen["other"] = lane().data_ptr()
            lane()[:8].add_(1)
            go_on.wait()
            graph.capture_end()

    def guest(stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            seen["guest"] = lane().data_ptr()

    graph = torch.cuda.CUDAGraph()
    worker = threading.Thread(target=own_capture)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        worker.start()
        started.wait()
        seen["this"] = lane().data_ptr()
        visitor = threading.Thread(target=guest, args=(torch.cuda.current_stream(),))
        visitor.start()
        visitor.join()
        assert workspace.captures.registry.running() == 2
        lane()[:8].add_(1)
        go_on.wait()
        worker.join()
    graph.replay()
    torch.cuda.synchronize()
    assert seen["this"] == seen["guest"]
    assert seen["this"] != seen["other"]


@pytest.mark.parametrize("mode", MODES)
def test_another_thread_grows_while_this_one_captures(mode: str) -> None:
    """B29: first use, growth and a guarded build on thread B leave A's capture right."""
    target = torch.zeros(8, device="cuda")
    failures: list[BaseException] = []

    def other() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                view = lane(50 * MIB, "mm_fp4_workspace")
                workspace._gemm_workspace_at_least(view, 200 * MIB)
                workspace.guard_plan_build(lambda device: torch.cuda.mem_get_info())(
                    torch.device("cuda:0")
                )
        except BaseException as failure:
            failures.append(failure)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        target.add_(1)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        lane()[:8].add_(1)
        target.add_(1)
    graph.replay()
    torch.cuda.synchronize()
    assert failures == []
    assert int(target[0]) == 2


def test_growth_with_idle_blocks_in_torch(fresh: Any) -> None:
    """B28: served outside a capture; inside, a typed error that says what to do."""
    view = lane()
    free, _ = torch.cuda.mem_get_info()
    hog = torch.empty(free - 700 * MIB, dtype=torch.uint8, device="cuda")
    idle = torch.empty(500 * MIB, dtype=torch.uint8, device="cuda")
    del idle
    graph = torch.cuda.CUDAGraph()
    try:
        with (
            pytest.raises(workspace.CudnnWorkspaceTooSmallInCaptureError, match="reserve"),
            torch.cuda.graph(graph),
        ):
            workspace._gemm_workspace_at_least(lane(), 1024 * MIB)
        bigger = workspace._gemm_workspace_at_least(view, 400 * MIB)
        assert bigger.data_ptr() == view.data_ptr()
        with pytest.raises(workspace.GemmWorkspaceError, match="needs"):
            workspace._gemm_workspace_at_least(view, 4096 * MIB)
        assert lane().data_ptr() == view.data_ptr()
    finally:
        del hog
        torch.cuda.empty_cache()  # the tests after this one need the memory


EXIT = """
import torch
import flashinfer.gemm_workspace as workspace
graphs = []
for _ in range(4):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        workspace.lane_workspace("bmm_fp8_workspace", 1 << 25, "cuda")[:8].add_(1)
        workspace._retain_cudnn_graph_if_capturing(object())
    graph.replay()
    graphs.append(graph)
"""


def test_fifty_exits_with_live_graphs() -> None:
    """B32: user objects are destroyed at teardown; memory is perturbed on free."""
    environment = {**os.environ, "MALLOC_PERTURB_": "165", "PYTHONPATH": os.pathsep.join(sys.path)}

    def run(_: int) -> int:
        # A hang at exit is a failure, not a reason to wait.
        return subprocess.run(
            [sys.executable, "-c", EXIT], env=environment, timeout=120, check=False
        ).returncode

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(run, range(50))) == [0] * 50
