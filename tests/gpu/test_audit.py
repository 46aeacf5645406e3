"""The graph audit on a real device: what it must find, and where it must be silent."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import flashinfer.gemm_workspace as workspace
from flashinfer.gemm_workspace import audit, driver_graph
from flashinfer.gemm_workspace.state import State

HERE = Path(__file__).parent
MIB = 1 << 20
BAD = ("stale", "suspect")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[State]:
    """Lanes of one test are not those of another, and nobody watches after it."""
    from flashinfer.gemm_workspace.device import CudaDevice

    torch.cuda.empty_cache()
    with workspace.use_device(CudaDevice()) as state:
        yield state
        torch.cuda.synchronize()
        audit.watch().stop()


def fill(tensor: torch.Tensor) -> None:
    """A memset node on the capturing stream, which no op of torch's surely makes."""
    driver = pytest.importorskip("cuda.bindings.driver")
    stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
    (status,) = driver.cuMemsetD8Async(tensor.data_ptr(), 7, tensor.numel(), stream)
    assert int(status) == 0


def captured(call: Any, watched: bool, history: int = 0) -> torch.cuda.CUDAGraph:
    """A graph of ``call()`` that can be audited."""
    if not watched:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            call()
        return graph
    watch = audit.watch(history)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    if not history:
        watch.stop()
    return graph


def said(graph: torch.cuda.CUDAGraph, address: int, nbytes: int) -> set[str]:
    """Verdicts on the addresses in that range; nothing may be said against any other."""
    report = audit.audit(graph)
    inside = [
        each
        for each in report.findings
        if each.address is not None and address <= each.address < address + nbytes
    ]
    others = [each for each in report.of(*BAD) if each not in inside]
    assert others == [], report.text(everything=True)
    assert report.nodes > 0
    return {str(each.verdict) for each in inside}


def test_tensor_maps_can_be_read() -> None:
    with driver_graph.reading(0):
        assert driver_graph.tensor_maps_unread(0) == ""


def test_the_driver_tells_device_memory_from_the_hosts_and_from_none() -> None:
    mine = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
    address = mine.data_ptr()
    pinned = torch.zeros(4096, dtype=torch.uint8, pin_memory=True)
    with driver_graph.reading(0) as reader:
        place = reader.lookup(address + 5)
        assert place is not None
        assert place.on_device
        assert place.address <= address < place.address + place.nbytes
        host = reader.lookup(pinned.data_ptr())
        assert host is not None
        assert not host.on_device
        assert reader.lookup(12345) is None
        del mine
        torch.cuda.empty_cache()
        assert reader.lookup(address + 5) is None


@pytest.mark.parametrize("watched", [False, True])
def test_a_memset_node_on_a_freed_block(watched: bool) -> None:
    held = [torch.zeros(8 * MIB, dtype=torch.uint8, device="cuda")]
    place = held[0].data_ptr(), held[0].numel()
    graph = captured(lambda: fill(held[0]), watched)
    assert said(graph, *place) == {"live"}
    assert {each.kind for each in audit.audit(graph).findings} == {"memset"}
    held.clear()
    assert said(graph, *place) == {"stale" if watched else "suspect"}
    assert audit.audit(graph).exit_status == 1


#: What became of the memory -> the verdict without, with a watch, with its history too.
FATES = {
    "alive": ("live", "live", "live"),
    "free": ("suspect", "stale", "stale"),
    "given back": ("suspect", "stale", "stale"),
    "another size": ("live", "suspect", "stale"),
    "same place and size": ("live", "live", "stale"),
}


@pytest.mark.parametrize("how", [0, 1, 2], ids=["bare", "watched", "with history"])
@pytest.mark.parametrize("fate", FATES)
def test_a_plain_op_of_torch(fate: str, how: int) -> None:
    tensors = [torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda") for _ in range(5)]
    # The middle one: when it is gone, there is memory of torch's on both sides of it.
    tensors.sort(key=lambda tensor: tensor.data_ptr())
    held = [tensors.pop(2)]
    place = held[0].data_ptr(), held[0].numel()
    graph = captured(lambda: held[0].add_(1), how > 0, 10_000 if how == 2 else 0)
    graph.replay()
    torch.cuda.synchronize()
    assert int(held[0][0]) == 1
    assert said(graph, *place) == {"live"}
    successor = None
    if fate != "alive":
        held.clear()
    if fate == "given back":
        torch.cuda.empty_cache()
    if fate in ("another size", "same place and size"):
        size = 64 * MIB if fate == "same place and size" else 48 * MIB
        successor = torch.empty(size, dtype=torch.uint8, device="cuda")
        assert successor.data_ptr() == place[0], "the allocator took another block"
    assert said(graph, *place) == {FATES[fate][how]}, audit.audit(graph).text(True)
    del successor


def test_a_copy_node_from_a_freed_block() -> None:
    held = [torch.ones(8 * MIB, dtype=torch.uint8, device="cuda")]
    target = torch.zeros(8 * MIB, dtype=torch.uint8, device="cuda")
    place = held[0].data_ptr(), held[0].numel()
    graph = captured(lambda: target.copy_(held[0]), watched=True)
    assert said(graph, *place) == {"live"}
    held.clear()
    assert said(graph, *place) == {"stale"}
    sides = {each.where: each.verdict for each in audit.audit(graph).findings}
    assert sides == {"source": "stale", "destination": "live"}


@pytest.mark.parametrize("watched", [False, True])
def test_a_triton_kernel_on_a_freed_buffer(watched: bool) -> None:
    pytest.importorskip("triton", reason="needs Triton")
    if not (shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")):
        pytest.skip("Triton needs a C compiler for its launcher")
    from triton_kernel import add_one

    count = 8 * MIB
    held = [torch.zeros(count, dtype=torch.int32, device="cuda")]
    place = held[0].data_ptr(), 4 * count

    def call() -> None:
        add_one[(count // 1024,)](held[0], count, BLOCK=1024)

    call()  # compiled outside the capture
    torch.cuda.synchronize()
    graph = captured(call, watched)
    assert said(graph, *place) == {"live"}
    assert "add_one" in {each.name for each in audit.audit(graph).findings}
    held.clear()
    assert said(graph, *place) == {"stale" if watched else "suspect"}


def test_memory_of_the_graphs_own_pool() -> None:
    source = torch.ones(MIB, device="cuda")
    kept: list[torch.Tensor] = []

    def call() -> None:
        temporary = source + 1  # freed within the capture: its pool keeps it
        kept.append(temporary * 2)

    graph = captured(call, watched=True)
    report = audit.audit(graph)
    assert report.of(*BAD) == [], report.text(True)
    assert report.counts["own pool"] > 0
    assert report.counts["live"] > 0


def test_lanes_are_live_and_named() -> None:
    graph = captured(
        lambda: workspace.lane_workspace("bmm_fp8_workspace", 32 * MIB, "cuda")[:1024].fill_(3),
        watched=True,
    )
    report = audit.audit(graph)
    owners = {each.owner for each in report.of("live")}
    assert any(owner.startswith("lane ") for owner in owners), report.text(True)
    assert report.of(*BAD) == []


def test_a_raw_handle_and_a_watched_graph_that_replays() -> None:
    target = torch.zeros(8, device="cuda")
    graph = captured(lambda: target.add_(1), watched=True)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert int(target[0]) == 3
    driver = pytest.importorskip("cuda.bindings.driver")
    by_object = audit.audit(graph)
    for handle in (graph.raw_cuda_graph(), driver.CUgraph(graph.raw_cuda_graph())):
        report = audit.audit(handle, pool=graph.pool())
        assert report.findings == by_object.findings


def test_a_graph_that_torch_dropped() -> None:
    graph = torch.cuda.CUDAGraph()
    target = torch.zeros(8, device="cuda")
    with torch.cuda.graph(graph):
        target.add_(1)
    with pytest.raises(audit.AuditError, match="keep_graph=True"):
        audit.audit(graph)


def test_silent_on_the_fork() -> None:
    """Sixty captures that share a pool, largest first, then growth; nothing is stale."""
    flashinfer: Any = pytest.importorskip("flashinfer")
    pytest.importorskip("cudnn", reason="needs cudnn-frontend")
    if not hasattr(flashinfer, "bmm_fp8"):
        pytest.skip("needs an installed graft: this is the runtime alone")
    from gemms import Gemm

    pool = torch.cuda.graph_pool_handle()
    graphs, gemms = [], []
    with audit.watch():
        for m in range(480, 0, -8):
            calls = [Gemm((1, m, 1024, 16384), backend) for backend in ("cudnn", "cublas")]
            calls.append(Gemm((1, m, 512, 512), "cudnn", "mm_bf16"))
            for call in calls:
                call.eager()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                for call in calls:
                    call()
            graphs.append(graph)
            gemms.append(calls)
    assert len(graphs) == 60
    # A later plan needs more than a lane has, in eager calls and in one more capture.
    Gemm((1, 512, 5120, 5120), "cudnn")()
    late = torch.cuda.CUDAGraph()
    with torch.cuda.graph(late, pool=pool):
        view = workspace.lane_workspace("bmm_fp8_workspace", 40 * MIB, "cuda")
        workspace._gemm_workspace_at_least(view, 300 * MIB)[-8:].fill_(1)
    torch.cuda.synchronize()
    on_lanes = 0
    total: dict[str, int] = {}
    for graph in graphs:
        report = audit.audit(graph)
        assert report.of(*BAD) == [], report.text()
        assert report.counts["live"] >= len(gemms[0]), "each call has at least an output"
        on_lanes += any(each.owner.startswith("lane ") for each in report.findings)
        for verdict, count in report.counts.items():
            total[verdict] = total.get(verdict, 0) + count
    print(audit.audit(graphs[0]).text(everything=True))
    print("60 graphs:", total, "graphs with a lane's address:", on_lanes)
    assert on_lanes > 0


def release(case: str) -> dict[str, Any]:
    """The audit beside an unmodified release, in a process of its own."""
    site = os.environ.get("RELEASE_SITE")
    if not site:
        pytest.skip("needs RELEASE_SITE, the folder into which the release is installed")
    fork = Path(audit.__file__).parent.parent  # .../flashinfer
    done = subprocess.run(
        [sys.executable, str(HERE / "audit_release.py"), case, str(fork)],
        # First of all, so that its flashinfer is the one that is imported.
        env={**os.environ, "PYTHONPATH": os.pathsep.join([site, os.environ.get("PYTHONPATH", "")])},
        timeout=480,  # the first call compiles for a while; a hang is a failure
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_the_workspace_that_the_release_moved_under_cublas() -> None:
    result = release("cublas")
    assert result["moved"]
    assert result["before"]["verdicts"] == ["live"], result["before"]["text"]
    assert result["after"]["verdicts"] == ["stale"], result["after"]["text"]
    assert result["after, not watched"]["verdicts"] == ["suspect"]
    for when in ("after", "after, not watched"):
        assert result[when]["exit status"] == 1
        assert result[when]["elsewhere"] == []
    print(result["after"]["text"])


def test_the_workspace_that_moves_under_each_cudnn_plan() -> None:
    plans = release("cudnn")
    assert all(plan["moved"] for plan in plans.values())
    using = {name for name, plan in plans.items() if plan["uses"]}
    assert using, "no plan of these shapes uses its workspace: nothing was tested"
    for name, plan in plans.items():
        # A plan that does not write there may still be given the address.
        if name in using or plan["after"]["places"]:
            assert plan["before"]["verdicts"] == ["live"], (name, plan["before"]["text"])
            assert plan["after"]["verdicts"] == ["stale"], (name, plan["after"]["text"])
        assert plan["after"]["elsewhere"] == [], (name, plan["after"]["text"])
        print(name, "uses" if plan["uses"] else "does not use", plan["after"]["places"])
