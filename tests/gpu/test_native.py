"""The native launch on a real device: the bits of the release's path, captures, threads, leaks."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cudnn", reason="needs an installed FlashInfer with cudnn-frontend")
flashinfer: Any = pytest.importorskip("flashinfer")
if not hasattr(flashinfer, "bmm_fp8"):  # the runtime alone, as a namespace package
    pytest.skip("needs an installed graft", allow_module_level=True)

from flashinfer.gemm_workspace import native  # noqa: E402

if torch.cuda.is_available() and native.library() is None:
    pytest.skip("needs a graft with the native launch", allow_module_level=True)

import native_parts as parts  # noqa: E402
from gemms import DEVICE, SPLIT_K, Gemm  # noqa: E402

from flashinfer.gemm_workspace import state as _state  # noqa: E402

SHAPES = [*SPLIT_K, (1, 1, 512, 512), (1, 16, 512, 512), (3, 33, 160, 96), (1, 512, 4096, 4096)]
CAPTURING, UNKNOWN = 3, 1

_variants = iter(range(1 << 20, 1 << 30))


def library() -> native.Library:
    found = native.library()
    assert found is not None
    return found


def stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


def same(gemm: Gemm, want: torch.Tensor, launch: Callable[[], object]) -> bool:
    """Whether ``launch`` writes ``want``, bit for bit, over something else."""
    gemm.out.fill_(torch.nan)
    launch()
    torch.cuda.synchronize()
    return torch.equal(gemm.out.view(torch.int16), want.view(torch.int16))


def plan_launch(made: parts.Execution, plan: native.Plan) -> Callable[[], None]:
    """One launch of a rebuilt plan, with its handle's lock and stream."""
    import cudnn

    lock, at = _state.current.device_lock(DEVICE.index), parts.addresses(made, plan)
    space = parts.lane()

    def launch() -> None:
        with lock:
            cudnn.set_stream(made.handle, stream())
            parts.launch(plan.launcher, at, space, stream())

    return launch


def matmul_call(gemm: Gemm) -> tuple[native.Matmul, int]:
    """cuBLASLt's launch of ``gemm`` by signature: the launcher and the variant to call."""
    space = parts.lane()
    matmul = native.cublaslt("bmm_fp8", parts.operands(gemm, space))
    number, variant = matmul.launcher.number, next(_variants)
    library().use_workspace(number, stream(), space.data_ptr(), space.numel())
    places = tuple((0, 1, 4, 2, 3)[place] for place in matmul.operands)
    given = (gemm.a, gemm.b, gemm.scale, gemm.scale, gemm.out)
    library().remember(number, variant, places, None, None, *given)
    return matmul, variant


def call(gemm: Gemm, variant: int) -> Any:
    return library().call(variant, gemm.a, gemm.b, gemm.scale, gemm.scale, gemm.out)


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("shape", SHAPES)
def test_cudnn_has_the_bits_of_the_release(shape: Any) -> None:
    gemm = Gemm(shape, "cudnn")
    want = gemm.eager()
    made = parts.execution(gemm)
    plan = parts.plan(made)
    assert same(gemm, want, plan_launch(made, plan))
    assert plan.launcher.workspace_bytes <= parts.WORKSPACE_BYTES
    # Rebuilding left the release's graph as it was.
    assert same(gemm, want, gemm)


def test_cudnn_plans_that_a_tuner_can_choose() -> None:
    """Plans at an index: the plan of that index is rebuilt, and the selected one stays."""
    from flashinfer.gemm import gemm_base

    gemm = Gemm((1, 64, 1024, 4096), "cudnn")
    runner = gemm_base._cudnn_gemm_fp8_runner()
    inputs = [gemm.a, gemm.b, gemm.scale, gemm.scale, gemm.out, parts.lane()]
    default = gemm.eager()
    tried = 0
    for tactic in runner.get_valid_tactics(inputs, None)[:8]:
        with parts.executions() as executions:
            runner.forward(inputs, tactic=tactic)
        torch.cuda.synchronize()
        (made,) = executions
        want = gemm.out.clone()
        selected = made.graph.serialize(as_bytes=True)
        plan = parts.plan(made)
        assert same(gemm, want, plan_launch(made, plan)), tactic
        assert made.graph.serialize(as_bytes=True) == selected, "another plan is selected now"
        tried += 1
    assert tried > 1
    assert same(gemm, default, gemm)


@pytest.mark.parametrize("shape", SHAPES)
def test_cublaslt_has_the_bits_of_the_release(shape: Any) -> None:
    """Every algorithm that the heuristic names, and its first, through the release's module."""
    gemm, space = Gemm(shape, "cublas"), parts.lane()
    module, arguments = parts.gemm_module(), parts.operands(gemm, space)
    buffer, count = parts.algorithms(gemm, space)
    assert count > 0
    for index in range(count):
        module.bmm_fp8_run_with_algo(*arguments, buffer, index)
        torch.cuda.synchronize()
        want = gemm.out.clone()
        matmul = native.cublaslt("bmm_fp8_run_with_algo", (*arguments, buffer, index))
        at = tuple(arguments[place].data_ptr() for place in matmul.operands)
        launcher = matmul.launcher
        assert same(gemm, want, lambda: parts.launch(launcher, at, space, stream()))  # noqa: B023
    module.bmm_fp8(*arguments)
    torch.cuda.synchronize()
    want = gemm.out.clone()
    matmul, variant = matmul_call(gemm)
    # The heuristic's first is what the module asks for at each call.
    first = bytes(buffer[:64].numpy())
    assert library().algorithm(matmul.launcher.number) == first
    assert same(gemm, want, lambda: call(gemm, variant))


def test_other_scales_and_operands_of_one_signature() -> None:
    gemm = Gemm((1, 16, 512, 512), "cublas")
    matmul, variant = matmul_call(gemm)
    assert matmul.launcher.number > 0
    for factor in (0.5, 2.0, 0.25):
        other = Gemm((1, 16, 512, 512), "cublas")
        other.scale = torch.full((1,), factor, device=DEVICE)
        want = other.eager()
        assert same(other, want, lambda: call(other, variant))  # noqa: B023


def test_nothing_happens_under_capture() -> None:
    """A call says that it was not made, the capture goes on, and no plan is rebuilt."""
    gemm = Gemm((1, 16, 512, 512), "cublas")
    _matmul, variant = matmul_call(gemm)
    want = gemm.eager()
    plain = Gemm((1, 16, 512, 512), "cudnn")
    made = parts.execution(plain)
    side = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        space = parts.lane()
        library().use_workspace(
            _matmul.launcher.number, side.cuda_stream, space.data_ptr(), space.numel()
        )
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=side):
            outcome = call(gemm, variant)
            with pytest.raises(native.NativeRefused, match="captures"):
                parts.plan(made)
            gemm()
    assert outcome == CAPTURING
    gemm.out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(gemm.out, want)


def test_an_output_is_made_on_the_current_stream() -> None:
    gemm = Gemm((1, 16, 512, 512), "cublas")
    want = gemm.eager()
    matmul, _ = matmul_call(gemm)
    variant, out = next(_variants), gemm.out
    places = tuple((0, 1, -1, 2, 3)[place] for place in matmul.operands)
    given = (gemm.a, gemm.b, gemm.scale, gemm.scale)
    library().remember(matmul.launcher.number, variant, places, tuple(out.shape), out.dtype, *given)
    result = library().call(variant, *given)
    torch.cuda.synchronize()
    assert type(result) is torch.Tensor
    assert (result.shape, result.dtype, result.device) == (out.shape, out.dtype, out.device)
    assert result.is_contiguous()
    assert torch.equal(result.view(torch.int16), want.view(torch.int16))


def test_ten_thousand_calls_leak_nothing() -> None:
    gemm = Gemm((1, 1, 512, 512), "cublas")
    _matmul, variant = matmul_call(gemm)
    plain = Gemm((1, 1, 512, 512), "cudnn")
    made = parts.execution(plain)
    plan = parts.plan(made)
    launch = plan_launch(made, plan)

    def calls() -> tuple[int, int]:
        """Bytes of the device and of the host that 2,000 calls of each took."""
        device, host = torch.cuda.mem_get_info()[0], resident()
        for _ in range(2_000):
            assert call(gemm, variant) is None
            launch()
        torch.cuda.synchronize()
        gc.collect()
        return device - torch.cuda.mem_get_info()[0], resident() - host

    calls()
    taken = [calls() for _ in range(5)]
    # Another process may use the device at the same time; a leak is in every window.
    assert min(device for device, _ in taken) <= 0, taken
    assert min(host for _, host in taken) < 256 << 10, taken  # 64 bytes a call


def test_launchers_that_nobody_has_are_forgotten() -> None:
    gemm = Gemm((1, 16, 512, 1024), "cublas")
    matmul, variant = matmul_call(gemm)
    made = parts.execution(Gemm((1, 16, 512, 1024), "cudnn"))
    plan = parts.plan(made)
    numbers = matmul.launcher.number, plan.launcher.number
    del matmul, plan
    gc.collect()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # a plan's end must not run in a capture
        native.collect()
        gemm.out.zero_()
    assert [library().workspace_bytes(number) > 0 for number in numbers] == [True, True]
    native.collect()
    for number in numbers:
        with pytest.raises(RuntimeError, match="is forgotten"):
            library().workspace_bytes(number)
    assert call(gemm, variant) == UNKNOWN


@pytest.mark.parametrize("backend", ["cublas", "cudnn"])
def test_threads_on_streams_of_their_own(backend: str) -> None:
    """Eight threads launch one launcher at once, each with operands, scale, lane and stream of its
    own: every result is its own."""
    first = Gemm((1, 16, 1024, 16384), backend)  # split-K: it writes to the workspace
    if backend == "cublas":
        launcher, variant = matmul_call(first)
        number = launcher.launcher.number
    else:
        made = parts.execution(first)
        plan = parts.plan(made)
        roles = parts.roles(first, made, plan)
    wrong: list[str] = []
    barrier = threading.Barrier(8)

    def work(index: int) -> None:
        import cudnn

        with torch.cuda.stream(torch.cuda.Stream()):
            gemm = Gemm((1, 16, 1024, 16384), backend)
            gemm.scale = torch.full((1,), 0.5 + index, device=DEVICE)
            want = gemm.eager()
            space, here = parts.lane(), stream()
            if backend == "cublas":
                library().use_workspace(number, here, space.data_ptr(), space.numel())
            else:
                at = tuple(getattr(gemm, role).data_ptr() for role in roles)
                lock = _state.current.device_lock(DEVICE.index)
            barrier.wait()
            for _ in range(200):
                gemm.out.zero_()
                if backend == "cublas":
                    assert call(gemm, variant) is None
                else:
                    with lock:
                        cudnn.set_stream(made.handle, here)
                        parts.launch(plan.launcher, at, space, here)
                torch.cuda.current_stream().synchronize()
                if not torch.equal(gemm.out.view(torch.int16), want.view(torch.int16)):
                    wrong.append(f"thread {index}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


OPS = [
    ("bmm_fp8", "cudnn"),
    ("bmm_fp8", "cublas"),
    ("bmm_fp8", "auto"),
    ("mm_bf16", "cudnn"),
    ("mm_bf16", "cublaslt"),
    ("bmm_bf16", "cudnn"),
]


def public(op: str, backend: str, out: torch.Tensor | None) -> Callable[[], torch.Tensor]:
    """A call of a public op, with an output given or not."""
    torch.manual_seed(1)
    a, b = (torch.randn(2, rows, 512, device=DEVICE) * 0.5 for rows in (16, 256))
    if op == "bmm_fp8":
        fp8 = torch.float8_e4m3fn
        left, right = a.to(fp8), b.to(fp8).transpose(-2, -1)
        scales = [torch.full((1,), factor, device=DEVICE) for factor in (0.5, 2.0)]
        return lambda: flashinfer.bmm_fp8(
            left, right, *scales, torch.bfloat16, out=out, backend=backend
        )
    left, right = a.bfloat16(), b.bfloat16().transpose(-2, -1)
    if op == "bmm_bf16":
        return lambda: flashinfer.bmm_bf16(left, right, out=out, backend=backend)
    return lambda: flashinfer.mm_bf16(left[0], right[0], out=out, backend=backend)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(("op", "backend"), OPS)
def test_public_ops_are_handed_over(op: str, backend: str, given: bool) -> None:
    """The bits of the release's own path, eagerly, under capture, and after the plans are gone."""
    prepared = pytest.importorskip("flashinfer.gemm_workspace.prepared")
    from flashinfer.gemm import gemm_base
    from flashinfer.gemm_workspace.native_calls import AFTER

    prepared.forget()
    want = public(op, backend, None)().clone()  # watched, by the release's path
    out = torch.empty_like(want) if given else None
    call = public(op, backend, out)
    for _ in range(AFTER + 4):
        call()
    before, refused = native.report()["launches"], prepared.report()["refused"]
    for _ in range(20):
        if out is not None:
            out.fill_(torch.nan)
        result = call()
        assert (result is out) == given
        assert torch.equal(result.view(torch.int16), want.view(torch.int16))
    assert native.report()["launches"] == before + 20, refused
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    assert native.report()["launches"] == before + 20
    captured.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured.view(torch.int16), want.view(torch.int16))
    gemm_base.clear_cudnn_graph_cache()
    gc.collect()
    result = call()
    torch.cuda.synchronize()
    assert torch.equal(result.view(torch.int16), want.view(torch.int16))
