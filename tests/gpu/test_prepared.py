"""Prepared launches of a grafted release on a real device: the same bits as the release's path."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("cudnn", reason="needs an installed FlashInfer with cudnn-frontend")
flashinfer: Any = pytest.importorskip("flashinfer")
if not hasattr(flashinfer, "bmm_fp8"):  # the runtime alone, as a namespace package
    pytest.skip("needs an installed graft", allow_module_level=True)

import flashinfer.gemm.gemm_base as gemm_base  # noqa: E402
from flashinfer.gemm_workspace import prepared  # noqa: E402

DEVICE = torch.device("cuda:0")
#: (batch, m, n, k), split-K ones among them.
SHAPES = [(1, 1, 512, 512), (1, 16, 1024, 16384), (1, 64, 512, 65536), (4, 48, 256, 512)]
CASES = [
    ("bmm_fp8", "cudnn"),
    ("bmm_fp8", "cublas"),
    ("bmm_fp8", "auto"),
    ("mm_bf16", "cudnn"),
    ("mm_bf16", "cublaslt"),
    ("mm_bf16", "auto"),
    ("bmm_bf16", "cudnn"),
]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Nothing is remembered from another test."""
    prepared.forget()
    yield
    torch.cuda.synchronize()


def hits() -> int:
    """Calls served from memory, natively or not."""
    report = prepared.report()
    return int(report["hits"]) + int(report["native"]["launches"])


def operands(op: str, shape: tuple[int, ...], seed: int = 0) -> tuple[Any, ...]:
    """Two operands, for ``bmm_fp8`` with their scales, which differ."""
    b, m, n, k = shape
    torch.manual_seed(seed)
    left = torch.randn(b, m, k, device=DEVICE) * 0.5
    right = torch.randn(b, n, k, device=DEVICE) * 0.5
    if op == "bmm_fp8":
        fp8 = torch.float8_e4m3fn
        scales = torch.full((1,), 0.5, device=DEVICE), torch.full((1,), 3.0, device=DEVICE)
        return left.to(fp8), right.to(fp8).transpose(-2, -1), *scales
    left, right = left.bfloat16(), right.bfloat16().transpose(-2, -1)
    return (left[0], right[0]) if op == "mm_bf16" else (left, right)


def call(op: str, backend: str, given: tuple[Any, ...], **more: Any) -> torch.Tensor:
    if op == "bmm_fp8":
        more.setdefault("dtype", torch.bfloat16)
    return getattr(flashinfer, op)(*given, backend=backend, **more)  # type: ignore[no-any-return]


def supported(op: str, backend: str, shape: tuple[int, ...]) -> None:
    """Skip, with the release's own reason, what it does not do here."""
    if op == "mm_bf16" and shape[0] > 1:
        pytest.skip("has no batches")
    try:
        call(op, backend, operands(op, shape))
    except Exception as error:
        pytest.skip(f"the release itself: {type(error).__name__}: {error}"[:200])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("op", "backend"), CASES)
def test_bit_equal(op: str, backend: str, shape: tuple[int, ...]) -> None:
    """Other tensors of a signature: what the release's path gives, and the prepared launch."""
    supported(op, backend, shape)
    for out_given in (False, True):
        prepared.forget()
        results = []
        for seed in range(4):
            given = operands(op, shape, seed)
            out = torch.full_like(call(op, backend, given), 7.0)
            more = {"out": out} if out_given else {}
            prepared.forget()
            slow = call(op, backend, given, **more).clone()
            if seed == 0:
                first = given
            results.append((given, slow))
        prepared.forget()
        call(op, backend, first, **({"out": out} if out_given else {}))
        before = hits()
        for given, slow in results:
            target = torch.full_like(slow, 7.0)
            fast = call(op, backend, given, **({"out": target} if out_given else {}))
            assert (fast is target) == out_given
            assert torch.equal(fast, slow)
        assert hits() - before == len(results)


@pytest.mark.parametrize(("op", "backend"), [("bmm_fp8", "cudnn"), ("mm_bf16", "cudnn")])
def test_plans_are_launched_by_address(op: str, backend: str) -> None:
    """With a frontend that can; else this says which one is here."""
    given = operands(op, (1, 16, 512, 512))
    call(op, backend, given)
    call(op, backend, given)
    memory = prepared._current_memory()
    (known,) = memory.table.values()
    assert known.call is not None
    import cudnn

    if not hasattr(cudnn, "Handle"):
        pytest.skip(f"cudnn-frontend {cudnn.__version__} executes plans by its public call only")
    assert "by_address" in known.call.__code__.co_freevars  # type: ignore[attr-defined]


def test_one_scale_for_both_and_then_two() -> None:
    """A tensor that is two arguments at once says nothing of a call with two tensors."""
    a, b, one, three = operands("bmm_fp8", (1, 16, 512, 512))
    for backend in ("cudnn", "cublas"):
        prepared.forget()
        wanted = {}
        for scales in ((one, one), (one, three), (three, one), (three, three)):
            prepared.forget()
            wanted[scales] = call("bmm_fp8", backend, (a, b, *scales)).clone()
        prepared.forget()
        call("bmm_fp8", backend, (a, b, one, one))
        before = hits()
        for scales, result in wanted.items():
            assert torch.equal(call("bmm_fp8", backend, (a, b, *scales)), result)
        assert hits() - before == 4


@pytest.mark.parametrize(("op", "backend"), [*CASES[:2], *CASES[3:5]])
def test_each_stream_has_its_workspace(op: str, backend: str) -> None:
    """Learnt on one stream, launched on others at once."""
    shape = (1, 16, 1024, 16384)
    supported(op, backend, shape)
    given = [operands(op, shape, seed) for seed in range(6)]
    wanted = []
    for each in given:
        prepared.forget()
        wanted.append(call(op, backend, each).clone())
    streams = [torch.cuda.Stream() for _ in given]
    torch.cuda.synchronize()
    before, wrong = hits(), 0
    for _ in range(50):
        results = []
        for stream, each in zip(streams, given, strict=True):
            with torch.cuda.stream(stream):
                results.append(call(op, backend, each))
        torch.cuda.synchronize()
        wrong += sum(not torch.equal(x, y) for x, y in zip(results, wanted, strict=True))
    assert wrong == 0
    assert hits() - before == 300


def test_a_side_stream_waits_for_nobody_else() -> None:
    """The handle is bound to the stream of each call: work that waits on another stream, which
    is held up, is not what a call on a free stream waits for."""
    shape = (1, 16, 512, 512)
    given = operands("bmm_fp8", shape)
    wanted = call("bmm_fp8", "cudnn", given).clone()
    call("bmm_fp8", "cudnn", given)
    slow, free = torch.cuda.Stream(), torch.cuda.Stream()
    for stream in (slow, free):
        with torch.cuda.stream(stream):
            call("bmm_fp8", "cudnn", given)
    torch.cuda.synchronize()
    with torch.cuda.stream(slow):
        torch.cuda._sleep(400_000_000)
        call("bmm_fp8", "cudnn", given)
    with torch.cuda.stream(free):
        result = call("bmm_fp8", "cudnn", given)
    free.synchronize()
    assert not slow.query()
    assert torch.equal(result, wanted)


def test_sixteen_threads() -> None:
    """Each on a stream of its own, all on the same signatures, learnt and launched at once."""
    wrong: list[str] = []
    barrier = threading.Barrier(16)
    shape = (1, 16, 1024, 16384)

    def work(number: int) -> None:
        op, backend = (("bmm_fp8", "cudnn"), ("bmm_fp8", "cublas"), ("mm_bf16", "cudnn"))[
            number % 3
        ]
        with torch.cuda.stream(torch.cuda.Stream()):
            given = operands(op, shape, number)
            reference = call(op, backend, given).clone()
            torch.cuda.current_stream().synchronize()
            barrier.wait(120)
            for _ in range(100):
                result = call(op, backend, given)
                torch.cuda.current_stream().synchronize()
                if not torch.equal(result, reference):
                    wrong.append(f"{number} {op} {backend}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
    assert hits() > 0


@pytest.mark.parametrize(("op", "backend"), [*CASES[:2], *CASES[3:5]])
def test_under_capture_the_release_runs(op: str, backend: str) -> None:
    """A captured call is not a prepared one; its graph is right, also when plans are evicted."""
    shape = (1, 16, 1024, 16384)
    supported(op, backend, shape)
    given = operands(op, shape)
    out = torch.empty_like(call(op, backend, given))
    wanted = call(op, backend, given, out=out).clone()
    call(op, backend, given, out=out)
    before = hits()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            call(op, backend, given, out=out)
    assert hits() == before
    gemm_base.clear_cudnn_graph_cache()
    gc.collect()
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, wanted)
    assert torch.equal(call(op, backend, given, out=out), wanted)


def test_an_evicted_plan_is_built_again() -> None:
    given = operands("bmm_fp8", (1, 16, 512, 512))
    wanted = call("bmm_fp8", "cudnn", given).clone()
    call("bmm_fp8", "cudnn", given)
    before = prepared.report()
    builder = gemm_base.build_cudnn_gemm_fp8_graph
    builder.cache_clear()
    getattr(gemm_base, "build_cudnn_gemm_fp8_graph_override_shape", builder).cache_clear()
    gc.collect()
    assert torch.equal(call("bmm_fp8", "cudnn", given), wanted)
    assert prepared.report()["failures"] == before["failures"] + 1
    assert (
        builder.cache_info().currsize
        + getattr(gemm_base, "build_cudnn_gemm_fp8_graph_override_shape", builder)
        .cache_info()
        .currsize
    )
    call("bmm_fp8", "cudnn", given)
    assert torch.equal(call("bmm_fp8", "cudnn", given), wanted)


@pytest.mark.parametrize(("op", "backend"), [("bmm_fp8", "cudnn"), ("bmm_fp8", "cublas")])
def test_tuning_changes_the_launch(op: str, backend: str) -> None:
    """After tuning, and after clearing, each call gives the bits of the release's own choice."""
    given = operands(op, (1, 16, 1024, 16384))
    call(op, backend, given)
    call(op, backend, given)

    def same() -> None:
        prepared.forget()
        wanted = call(op, backend, given).clone()
        before = hits()
        assert torch.equal(call(op, backend, given), wanted)
        assert hits() == before + 1

    same()
    with flashinfer.autotune(True):
        call(op, backend, given)
    same()
    from flashinfer.autotuner import AutoTuner

    AutoTuner.get().clear_cache()
    same()


def test_nothing_of_the_callers_is_held() -> None:
    for op, backend in CASES[:5]:
        given = operands(op, (1, 16, 512, 512))
        try:
            results = [call(op, backend, given) for _ in range(3)]
        except Exception:
            continue
        watched = [weakref.ref(each) for each in (*given, *results)]
        del given, results
        gc.collect()
        assert [each() for each in watched] == [None] * len(watched), (op, backend)


def test_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "SIGNATURES", 64)
    for rows in range(1, 200):
        given = operands("bmm_fp8", (1, rows, 512, 512))
        call("bmm_fp8", "cublas", given)
        call("bmm_fp8", "cublas", given)
    assert prepared.report()["remembered"] == 64


def test_compiled_code_sees_the_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under FakeTensors, and for tensors of another class, the release's path runs."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    given = operands("bmm_fp8", (1, 16, 512, 512))
    call("bmm_fp8", "cublas", given)
    call("bmm_fp8", "cublas", given)
    before = prepared.report()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(each) for each in given]
        with contextlib.suppress(Exception):  # what the release makes of them is its own affair
            call("bmm_fp8", "cublas", tuple(fake))
    after = prepared.report()
    assert (after["hits"], after["remembered"]) == (before["hits"], before["remembered"])


@pytest.mark.parametrize(("switch", "expected"), [("0", False), ("1", True), ("", True)])
def test_the_switch(switch: str, expected: bool) -> None:
    code = """
        import torch, flashinfer
        from flashinfer.gemm_workspace import prepared
        a = torch.zeros(1, 16, 512, device="cuda").to(torch.float8_e4m3fn)
        b = torch.zeros(1, 512, 512, device="cuda").to(torch.float8_e4m3fn).transpose(-2, -1)
        one = torch.ones(1, device="cuda")
        for _ in range(4):
            flashinfer.bmm_fp8(a, b, one, one, torch.bfloat16, backend="cudnn")
        report = prepared.report()
        print("REPORT", report["enabled"], report["hits"], report["misses"])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "FLASHINFER_GEMM_WORKSPACE_PREPARED": switch},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("REPORT")]
    assert line == ("REPORT True 3 1" if expected else "REPORT False 0 0")
