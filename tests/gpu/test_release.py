"""A grafted release on a real device: results, replays and captures of its own GEMM ops."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("cudnn", reason="needs an installed FlashInfer with cudnn-frontend")
flashinfer: Any = pytest.importorskip("flashinfer")
if not hasattr(flashinfer, "bmm_fp8"):  # the runtime alone, as a namespace package
    pytest.skip("needs an installed graft", allow_module_level=True)

from gemms import DEVICE, SPLIT_K, Gemm, wrong_replays  # noqa: E402

import flashinfer.gemm_workspace as workspace  # noqa: E402

MIB = 1 << 20


@pytest.mark.parametrize("shape", SPLIT_K)
@pytest.mark.parametrize("backend", ["cudnn", "cublas"])
def test_four_graphs_replayed_at_once(backend: str, shape: Any) -> None:
    """B13: graphs with pools of their own share nothing: 0 wrong of 800."""
    gemms = [Gemm(shape, backend) for _ in range(4)]
    references = [gemm.eager() for gemm in gemms]
    graphs = [gemm.captured(20) for gemm in gemms]
    assert wrong_replays(gemms, graphs, references, 200) == 0


@pytest.mark.parametrize("sides", [1, 3])
def test_forked_captures(sides: int) -> None:
    """B27: one capture, forked to side streams with a split-K GEMM of another kind on each."""
    kinds = [
        Gemm((1, 64, 512, 65536), "cudnn"),
        Gemm((1, 64, 512, 65536), "cublas"),
        Gemm((1, 128, 256, 32768), "cudnn"),
        Gemm((1, 128, 256, 32768), "cublas"),
    ]
    gemms = kinds[: sides + 1]
    references = [gemm.eager() for gemm in gemms]
    side_streams = [torch.cuda.Stream() for _ in range(sides)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        for _ in range(20):
            for gemm, side in zip(gemms[1:], side_streams, strict=True):
                side.wait_stream(main)
                with torch.cuda.stream(side):
                    gemm()
            gemms[0]()
            for side in side_streams:
                main.wait_stream(side)
    wrong = 0
    for _ in range(200):
        for gemm in gemms:
            gemm.out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        wrong += sum(not torch.equal(g.out, r) for g, r in zip(gemms, references, strict=True))
    assert wrong == 0


def test_sixteen_threads() -> None:
    """B14: one handle a device, many threads, each with its own stream: every result right."""
    wrong: list[str] = []
    barrier = threading.Barrier(16)

    def work(number: int) -> None:
        backend = "cudnn" if number % 2 else "cublas"
        with torch.cuda.stream(torch.cuda.Stream()):
            gemm = Gemm((1, 16, 1024, 16384), backend)
            reference = gemm.eager()
            barrier.wait(120)
            for _ in range(200):
                gemm()
            torch.cuda.current_stream().synchronize()
            if not torch.equal(gemm.out, reference):
                wrong.append(f"thread {number}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def in_a_process(code: str, **environment: str) -> None:
    """Run a crash-prone case by itself; anything but exit 0 fails the test."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path]),
            **environment,
        },
        timeout=240,  # a hang is a failure
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_thread_that_captured_is_gone() -> None:
    """B15: warm and capture on a worker thread, join it, replay from the main thread."""
    in_a_process(
        """
        import threading, torch
        from gemms import Gemm
        made = {}
        def work():
            gemm = Gemm((1, 16, 1024, 16384), "cudnn")
            made["reference"] = gemm.eager()
            made["graph"] = gemm.captured()
            made["gemm"] = gemm
        thread = threading.Thread(target=work); thread.start(); thread.join()
        made["gemm"].out.zero_()
        made["graph"].replay()
        torch.cuda.synchronize()
        assert torch.equal(made["gemm"].out, made["reference"])
        """
    )


def test_a_sibling_graph_is_destroyed() -> None:
    """B16: G1 and G2 share a pool; G1 goes, memory is churned, G2 replays right."""
    in_a_process(
        """
        import gc, torch
        from gemms import DEVICE, Gemm
        first, second = (Gemm((1, 16, 1024, 16384), "cublas") for _ in range(2))
        references = first.eager(), second.eager()
        pool = torch.cuda.graph_pool_handle()
        one, two = (gemm.captured(pool=pool) for gemm in (first, second))
        del one
        gc.collect(); torch.cuda.empty_cache()
        others = [torch.full((32 << 20,), 7, dtype=torch.uint8, device=DEVICE) for _ in range(16)]
        second.out.zero_()
        two.replay(); torch.cuda.synchronize()
        assert torch.equal(second.out, references[1])
        assert all(int((other != 7).sum()) == 0 for other in others)
        """
    )


def test_no_alias_with_temporaries_of_the_graph() -> None:
    """B17: a temporary is freed in the capture, then the workspace is used for the first time."""
    in_a_process(
        """
        import torch
        import flashinfer.gemm_workspace as workspace
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            temporary = torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
            temporary.fill_(0xEE)
            del temporary
            view = workspace.lane_workspace("bmm_fp8_workspace", 32 << 20, "cuda")
        view.fill_(0x5A); torch.cuda.synchronize()
        graph.replay(); torch.cuda.synchronize()
        assert int((view != 0x5A).sum()) == 0
        """
    )


def test_expandable_segments_and_teardown() -> None:
    """B18: first use in a capture, the graph goes, the op goes on, another capture, exit."""
    in_a_process(
        """
        import gc, torch
        from gemms import Gemm
        gemm = Gemm((1, 16, 1024, 16384), "cublas")
        Gemm((1, 16, 512, 512), "cublas")()
        graph = gemm.captured()
        graph.replay(); torch.cuda.synchronize()
        del graph; gc.collect(); torch.cuda.empty_cache()
        reference = gemm.eager()
        graph = gemm.captured(); gemm.out.zero_(); graph.replay(); torch.cuda.synchronize()
        assert torch.equal(gemm.out, reference)
        """,
        PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True",
    )


def build_plans(count: int, first: int = 1) -> None:
    for m in range(first, first + count):
        Gemm((1, m, 9216, 2048), "cudnn")()


@pytest.mark.parametrize("how", ["clear", "overflow"])
def test_captured_plans_survive_their_cache(how: str) -> None:
    """B5, B6: a graph of a plan; its cache is cleared, or overflows; the replay is bit-equal."""
    import flashinfer.gemm.gemm_base as gemm_base

    gemm = Gemm((1, 16, 12288, 2048), "cudnn")
    reference = gemm.eager()
    graph = gemm.captured()
    assert workspace.stats()["plans_held"] >= 1
    builders: list[Callable[..., Any]] = [
        value
        for name, value in vars(gemm_base).items()
        if name.startswith("build_cudnn") and hasattr(value, "cache_clear")
    ]
    if how == "clear":
        for builder in builders:
            builder.cache_clear()  # type: ignore[attr-defined]
        build_plans(8)
    else:
        build_plans(300)
        for builder in builders:
            builder.cache_clear()  # type: ignore[attr-defined]
    gc.collect()
    gemm.out.zero_()
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(gemm.out, reference)


def test_descending_batches_and_a_late_giant() -> None:
    """B4, B21: nine captures share a pool, the eighth asks for 300 MiB; all replay right."""
    pool = torch.cuda.graph_pool_handle()
    gemms = [Gemm((1, m, 1024, 16384), "cublas") for m in (256, 128, 64, 48, 32, 24, 16, 8, 1)]
    references = [gemm.eager() for gemm in gemms]
    graphs = []
    for number, gemm in enumerate(gemms):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            gemm()
            if number == 7:
                view = workspace.lane_workspace("bmm_fp8_workspace", 40 * MIB, DEVICE)
                workspace._gemm_workspace_at_least(view, 300 * MIB)[-8:].fill_(1)
        graphs.append(graph)
    for gemm, graph, reference in zip(gemms, graphs, references, strict=True):
        gemm.out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(gemm.out, reference)


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_another_thread_calls_a_new_shape(mode: str) -> None:
    """B29: while A captures, B builds a plan, has its first lane, and launches; A's is right."""
    mine = Gemm((1, 16, 1024, 16384), "cudnn")
    other = Gemm((1, 40 + len(mode), 1536, 8192), "cudnn")  # a shape that nobody called
    side = torch.cuda.Stream()
    reference = mine.eager()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with torch.cuda.stream(side):
                other()
        except BaseException as failure:
            failures.append(failure)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        mine()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        mine()
    assert failures == []
    mine.out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(mine.out, reference)
    assert other.error() < 0.05


@pytest.mark.parametrize("backend", ["cudnn", "cublas"])
def test_ten_thousand_captures_of_a_gemm(backend: str) -> None:
    """Re-capturing the same shape, as training loops do: plans, lanes and bytes stay."""

    def mapped() -> int:
        free, total = torch.cuda.mem_get_info()
        return total - free

    gemm = Gemm((1, 16, 1024, 16384), backend)
    reference = gemm.eager()
    for _ in range(20):
        graph = gemm.captured()
    torch.cuda.synchronize()
    before, bytes_before = workspace.stats(), mapped()
    for _ in range(10_000):
        graph = gemm.captured()
    gemm.out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    after = workspace.stats()
    print(backend, {key: (before[key], after[key]) for key in ("plans_held", "lane_bytes")})
    assert torch.equal(gemm.out, reference)
    assert after["plans_held"] <= before["plans_held"]
    assert len(after["lanes"]) <= len(before["lanes"]) + 1
    assert after["lane_bytes"] <= before["lane_bytes"] + 2 * 40 * MIB
    assert mapped() - bytes_before <= 128 * MIB
