"""What one eager GEMM call costs on the host: releases, forks and torch side by side in one run.

On a CUDA machine, with folders into which the wheels are installed (one each)::

    python benchmarks/host_cost.py release=FOLDER fork=FOLDER newest=FOLDER [torch=] \
        [--rounds 5] [--calls 2000] [-o host_cost.json]

A variant is NAME=FOLDER[,VARIABLE=VALUE...]; a folder that is empty is none, which is enough for
torch's own functions (always measured, in a process of their own). ``fork=F`` and
``off=F,FLASHINFER_GEMM_WORKSPACE_PREPARED=0`` measure one wheel in two ways; a native build is
one more variant. Each variant is one process that lives through the run; the rounds go through
all of them in turn, so that a machine that slows down slows down for all.

Per case: median and 99th percentile of single calls in microseconds, over all rounds, the GPU
idle before each batch of calls; the same over torch's function as a ratio. Per variant: the first
two calls of new signatures; for a fork, bytes of Python objects for each signature remembered, and
what the pieces of a prepared launch cost. Ops that this GPU has not are listed with the reason.
``plot_host_cost.py`` draws the result.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROWS = (1, 16, 512)
N = K = 512  # small, so that the GPU is done sooner than the host
BATCH = 100  # calls between two synchronisations
MARK = "@@"  # before each line of ours: releases print, too

Call = Callable[[], object]


# In a variant's process. --------------------------------------------------------------------------


class Operands:
    """Tensors of one case."""

    def __init__(self, rows: int) -> None:
        import torch

        self.torch, self.device = torch, torch.device("cuda:0")
        fp8 = torch.float8_e4m3fn
        a, b = self._random(rows, K), self._random(N, K)
        self.a16, self.b16 = a.bfloat16(), b.bfloat16().t()
        self.a8, self.b8 = a.to(fp8), b.to(fp8).t()
        self.one, self.two = (torch.full((1,), x, device=self.device) for x in (0.5, 2.0))
        self.out = torch.empty(rows, N, device=self.device, dtype=torch.bfloat16)

    def _random(self, *shape: int) -> Any:
        return self.torch.randn(*shape, device=self.device) * 0.5


def torch_calls(x: Operands) -> dict[str, Call]:
    """torch's own functions, which the others are held against."""
    torch, out = x.torch, x.torch.bfloat16
    scaled = torch._scaled_mm
    return {
        "torch._scaled_mm": lambda: scaled(x.a8, x.b8, x.one, x.two, out_dtype=out),
        "torch._scaled_mm out": lambda: scaled(x.a8, x.b8, x.one, x.two, out_dtype=out, out=x.out),
        "torch.mm": lambda: torch.mm(x.a16, x.b16),
        "torch.mm out": lambda: torch.mm(x.a16, x.b16, out=x.out),
    }


def calls(x: Operands) -> dict[str, Call]:
    """Every public op and backend, without and with an output given; by name."""
    import flashinfer

    bf16 = x.torch.bfloat16
    a3, b3, out3 = x.a8[None], x.b8[None], x.out[None]
    a3_16, b3_16 = x.a16[None], x.b16[None]
    found: dict[str, Call] = {}
    for backend in ("cudnn", "cublas", "auto"):
        found[f"bmm_fp8 {backend}"] = lambda b=backend: flashinfer.bmm_fp8(
            a3, b3, x.one, x.two, bf16, backend=b
        )
        found[f"bmm_fp8 {backend} out"] = lambda b=backend: flashinfer.bmm_fp8(
            a3, b3, x.one, x.two, bf16, out=out3, backend=b
        )
    for backend in ("cudnn", "cublaslt", "auto"):
        found[f"mm_bf16 {backend}"] = lambda b=backend: flashinfer.mm_bf16(x.a16, x.b16, backend=b)
        found[f"mm_bf16 {backend} out"] = lambda b=backend: flashinfer.mm_bf16(
            x.a16, x.b16, out=x.out, backend=b
        )
    found["bmm_bf16 cudnn"] = lambda: flashinfer.bmm_bf16(a3_16, b3_16, backend="cudnn")
    found["bmm_bf16 cudnn out"] = lambda: flashinfer.bmm_bf16(
        a3_16, b3_16, out=out3, backend="cudnn"
    )
    if x.torch.cuda.get_device_capability()[0] >= 10:
        found.update(block_scaled_calls(x))
    return found


def block_scaled_calls(x: Operands) -> dict[str, Call]:
    """MXFP8 and NVFP4, which need SM100 or later."""
    import flashinfer

    a8, a_scale = flashinfer.mxfp8_quantize(x.a16, is_sf_swizzled_layout=True)
    b8, b_scale = flashinfer.mxfp8_quantize(x.b16.t().contiguous(), is_sf_swizzled_layout=True)
    one = x.torch.ones((), device=x.device)
    a4, a4_scale = flashinfer.nvfp4_quantize(x.a16, one)
    b4, b4_scale = flashinfer.nvfp4_quantize(x.b16.t().contiguous(), one)
    found: dict[str, Call] = {}
    for backend in ("cudnn", "cutlass"):
        found[f"mm_mxfp8 {backend}"] = lambda b=backend: flashinfer.mm_mxfp8(
            a8, b8.t(), a_scale, b_scale, backend=b
        )
        found[f"mm_fp4 {backend}"] = lambda b=backend: flashinfer.mm_fp4(
            a4, b4.T, a4_scale, b4_scale.T, one, backend=b
        )
    found["bmm_mxfp8 cudnn"] = lambda: flashinfer.bmm_mxfp8(
        a8[None], b8.t()[None], a_scale, b_scale, x.torch.bfloat16, backend="cudnn"
    )
    return found


def timed(call: Call, count: int) -> list[int]:
    """Nanoseconds of each of ``count`` calls."""
    import torch

    clock = time.perf_counter_ns
    taken: list[int] = []
    for _ in range(20):
        call()
    gc.collect()
    gc.disable()
    try:
        while len(taken) < count:
            torch.cuda.synchronize()
            for _ in range(BATCH):
                start = clock()
                call()
                taken.append(clock() - start)
    finally:
        gc.enable()
    torch.cuda.synchronize()
    return taken


class Variant:
    """What a variant's process does when it is asked to."""

    def __init__(self, only_torch: bool) -> None:
        self.make = torch_calls if only_torch else calls
        self.only_torch = only_torch
        self.cases: dict[str, Call] = {}

    def prepare(self) -> dict[str, Any]:
        """Make every case once; which there are, and why others are not."""
        import torch

        skipped, first = {}, {}
        for rows in ROWS:
            for name, call in self.make(Operands(rows)).items():
                torch.cuda.synchronize()
                start = time.perf_counter()
                try:
                    call()
                    torch.cuda.synchronize()
                except Exception as error:
                    skipped[f"{name} M={rows}"] = f"{type(error).__name__}: {error}"[:200]
                    continue
                first[f"{name} M={rows}"] = round((time.perf_counter() - start) * 1e3, 3)
                self.cases[f"{name} M={rows}"] = call
        about = {
            "torch": torch.__version__,
            "gpu": torch.cuda.get_device_name(),
            "capability": torch.cuda.get_device_capability(),
        }
        if not self.only_torch:
            from importlib.metadata import version

            import cudnn

            about |= {"flashinfer": version("flashinfer-python"), "cudnn": cudnn.backend_version(),
                      "frontend": cudnn.__version__}  # fmt: skip
        return {"cases": list(self.cases), "skipped": skipped, "about": about,
                "first_call_ms": first}  # fmt: skip

    def measure(self, case: str, count: int) -> list[int]:
        return timed(self.cases[case], count)

    def new_signatures(self) -> dict[str, Any]:
        """The first and the second call of signatures that nobody has called, microseconds."""
        import torch

        found = {}
        wanted = ["bmm_fp8 cudnn out", "bmm_fp8 cublas out", "mm_bf16 cudnn out"]
        for name in wanted:
            first, second = [], []
            for rows in range(33, 33 + 24):
                call = calls(Operands(rows))[name]
                for taken in (first, second):
                    torch.cuda.synchronize()
                    start = time.perf_counter_ns()
                    call()
                    taken.append((time.perf_counter_ns() - start) / 1e3)
            found[name] = {
                "first": round(statistics.median(first), 1),
                "second": round(statistics.median(second), 1),
            }
        return found

    def memory(self) -> dict[str, Any]:
        """Bytes of Python objects for each signature that a fork remembers."""
        try:
            from flashinfer.gemm_workspace import prepared
        except ImportError:
            return {}
        before = prepared.report()["remembered"]
        operands = [Operands(rows) for rows in range(100, 228)]
        ways = [calls(x)["bmm_fp8 cublas out"] for x in operands]
        for call in ways:
            call()  # what the release itself keeps
        prepared.forget()
        gc.collect()
        tracemalloc.start()
        for call in ways:
            call()
            call()
        count = prepared.report()["remembered"]
        gc.collect()
        held = tracemalloc.get_traced_memory()[0]
        prepared.forget()
        gc.collect()
        freed = held - tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        return {"remembered before": before, "signatures": count,
                "bytes each": round(freed / count) if count else None}  # fmt: skip

    def pieces(self) -> dict[str, float]:
        """Microseconds of what a prepared launch is made of."""
        import torch

        try:
            from flashinfer.gemm_workspace import prepared
        except ImportError:
            return {}
        found: dict[str, float] = {}

        def note(name: str, call: Call, count: int = 3000) -> None:
            try:
                found[name] = round(statistics.median(timed(call, count)) / 1e3, 3)
            except Exception as error:
                found[name + f" ({type(error).__name__}: {error})"[:150]] = -1.0

        note("nothing (the clock)", lambda: None)
        x = Operands(16)
        note("capture query", torch._C._cuda_isCurrentStreamCapturing)
        note("raw stream", lambda: torch._C._cuda_getCurrentRawStream(0))
        note("current device", torch._C._cuda_getDevice)
        note("cuBLAS handle", torch.cuda.current_blas_handle)
        note("data_ptr", x.a8.data_ptr)
        note("torch.empty", lambda: torch.empty((1, 16, N), dtype=torch.bfloat16, device=x.device))
        for name in ("bmm_fp8 cudnn out", "bmm_fp8 cublas out", "mm_bf16 cudnn out"):
            call = calls(x)[name]
            prepared.forget()
            for _ in range(4):
                call()
            memory = prepared._current_memory()
            if not memory.table:
                continue
            known = next(reversed(memory.table.values()))
            note(f"{name}: the whole call", call)
            if known.call is None:
                continue
            note(f"{name}: is the tuner as it was", known.tuning.steady)
            note(f"{name}: stream and capture", lambda m=memory, k=known: m.stream(k.index))
            values = _values(name, x)
            op = _op_of(name)
            form = op.forms[_form(name, x)]
            note(f"{name}: brief key", lambda f=form, v=values: f.brief(*v))
            note(f"{name}: whole key", lambda f=form, v=values: f.key(*v))
            brief, _, addresses = form.brief(*values)
            quick = memory.quick.get(brief)
            if quick is not None:
                note(f"{name}: alike", lambda q=quick, v=values: q.alike(*q.pick(v)))
            stream = memory.stream(known.index)
            note(
                f"{name}: launch with workspace, lock and stream",
                lambda k=known, v=values, a=addresses, s=stream: k.call(v, a, s),
            )
            cells = dict(
                zip(
                    known.call.__code__.co_freevars,
                    (cell.cell_contents for cell in known.call.__closure__ or ()),
                    strict=True,
                )
            )
            found[f"{name}: by address"] = float("by_address" in cells)
            if "by_address" in cells:
                space = cells["workspace"](stream).data_ptr()
                by, pick, handle = cells["by_address"], cells["pick"], cells["handle"]
                note(
                    f"{name}: cuDNN alone, by address",
                    lambda b=by, p=pick, a=addresses, s=space, h=handle: b(p(a), s, h),
                )
            if "function" in cells:
                given = cells["operands"](values, values[-2], stream)
                note(f"{name}: the function alone", lambda f=cells["function"], g=given: f(*g))
        return found


def _values(name: str, x: Operands) -> tuple[Any, ...]:
    """The arguments of a case of :func:`calls`, in the order in which it gives them."""
    bf16, backend = x.torch.bfloat16, name.split()[1]
    if name.startswith("bmm_fp8"):
        return (x.a8[None], x.b8[None], x.one, x.two, bf16, x.out[None], backend)
    return (x.a16, x.b16, x.out, backend)


def _form(name: str, _: Operands) -> tuple[Any, ...]:
    return (5, "out", "backend") if name.startswith("bmm_fp8") else (2, "out", "backend")


def _op_of(name: str) -> Any:
    import flashinfer

    function = getattr(flashinfer, name.split()[0])
    cells = zip(function.__code__.co_freevars, function.__closure__, strict=True)
    return next(cell.cell_contents for free, cell in cells if free == "op")


def serve(only_torch: bool) -> None:
    """Answer each line of stdin, ``[method, arguments...]``, with one line."""
    variant = Variant(only_torch)
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        try:
            answer = {"answer": getattr(variant, method)(*arguments)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(MARK + json.dumps(answer), flush=True)
    sys.stdout.flush()
    os._exit(0)


# In the benchmark's own process. ------------------------------------------------------------------


class Process:
    """A variant's process, and the questions to it."""

    def __init__(self, name: str, folder: str, variables: dict[str, str]) -> None:
        self.name = name
        path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH", "")]))
        arguments = [sys.executable, __file__, "--serve", *(["--torch"] if not folder else [])]
        self._process = subprocess.Popen(
            arguments,
            env={**os.environ, "PYTHONPATH": path, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, method: str, *arguments: Any, needed: bool = True) -> Any:
        """The answer. Ends the run, with the reason, if there is none and it is needed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps([method, *arguments]) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            sys.exit(f"{self.name}: its process ended before {method}; see its error above")
        for line in self._process.stdout:
            if line.startswith(MARK):
                answer = json.loads(line.removeprefix(MARK))
                if "error" in answer:
                    if not needed:
                        return answer
                    sys.exit(f"{self.name}: {method}: {answer['error']}")
                return answer["answer"]
        return sys.exit(f"{self.name}: its process ended in {method}; see its error above")

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def summary(taken: list[int]) -> dict[str, float]:
    """Median and 99th percentile in microseconds."""
    ordered = sorted(taken)
    return {
        "median": round(statistics.median(ordered) / 1e3, 2),
        "p99": round(ordered[int(len(ordered) * 0.99)] / 1e3, 2),
    }


def ratios(figures: dict[str, dict[str, dict[str, float]]]) -> Iterator[dict[str, Any]]:
    """Each case's median over that of torch's function, for the same rows, and with an output
    given where the case has one."""
    for case in sorted({case for cases in figures.values() for case in cases}):
        name, _, rows = case.rpartition(" ")
        if name.startswith("torch"):
            continue
        base = "torch._scaled_mm" if "fp8" in name or "fp4" in name else "torch.mm"
        base += " out" if name.endswith(" out") else ""
        reference = figures["torch"].get(f"{base} {rows}")
        for variant, cases in figures.items():
            if case in cases and reference:
                ratio = cases[case]["median"] / reference["median"]
                yield {"case": case, "variant": variant, "over": base, "ratio": round(ratio, 2)}


def table(report: dict[str, Any]) -> str:
    """The figures for people: a line a case, a column a variant; median (p99), in microseconds."""
    figures = report["us"]
    names = [name for name in figures if name != "torch"]
    lines = ["case".ljust(30) + "".join(name.rjust(22) for name in names)]
    found = {(row["case"], row["variant"]): row["ratio"] for row in report["ratios"]}
    for case in sorted({case for name in names for case in figures[name]}):
        line = case.ljust(30)
        for name in names:
            figure = figures[name].get(case)
            ratio = found.get((case, name), "")
            text = f"{figure['median']} ({figure['p99']}) {ratio}x" if figure else "-"
            line += text.rjust(22)
        lines.append(line)
    lines += [
        f"{case.ljust(30)}{figure['median']} ({figure['p99']})"
        for case, figure in figures["torch"].items()
    ]
    return "\n".join(lines)


def parse(text: str) -> tuple[str, str, dict[str, str]]:
    name, _, rest = text.partition("=")
    folder, *variables = rest.split(",")
    if folder and not Path(folder).is_dir():
        sys.exit(f"{text}: {folder} is no folder, wanted one into which a wheel is installed")
    return name, folder, dict(each.split("=", 1) for each in variables)


def _write(report: dict[str, Any], output: Path | None) -> None:
    if output is not None:
        output.write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("variants", nargs="*", metavar="NAME=FOLDER[,VARIABLE=VALUE]")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=2000, help="of each case in each round")
    parser.add_argument("--only", default="", help="measure only cases that contain this")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--torch", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.torch)
        return
    variants = [("torch", "", {}), *(parse(text) for text in options.variants)]
    processes = [Process(*variant) for variant in variants]
    taken: dict[str, dict[str, list[int]]] = {process.name: {} for process in processes}
    # At once: it compiles, and nothing is measured yet.
    with ThreadPoolExecutor(len(processes)) as pool:
        answers = pool.map(lambda process: process.ask("prepare"), processes)
        prepared = {process.name: each for process, each in zip(processes, answers, strict=True)}
    for number in range(options.rounds):
        for process in processes:
            for case in prepared[process.name]["cases"]:
                if options.only in case:
                    figures = process.ask("measure", case, options.calls)
                    taken[process.name].setdefault(case, []).extend(figures)
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
    figures = {
        name: {case: summary(each) for case, each in cases.items()} for name, cases in taken.items()
    }
    report: dict[str, Any] = {
        "python": platform.python_version(),
        "shape": {"N": N, "K": K},
        "about": {name: each["about"] for name, each in prepared.items()},
        "skipped": {name: each["skipped"] for name, each in prepared.items()},
        "us": figures,
        "ratios": list(ratios(figures)),
        "first_call_ms": {name: each["first_call_ms"] for name, each in prepared.items()},
    }
    print(table(report), file=sys.stderr, flush=True)
    others = [process for process in processes if process.name != "torch"]
    for name, question in (
        ("memory", "memory"),
        ("pieces_us", "pieces"),
        ("new_signatures_us", "new_signatures"),
    ):
        # Kept step by step: the figures above have taken minutes.
        _write(report, options.output)
        report[name] = {each.name: each.ask(question, needed=False) for each in others}
    for process in processes:
        process.end()
    if options.output is None:
        print(json.dumps(report, indent=1))
    _write(report, options.output)


if __name__ == "__main__":
    main()
