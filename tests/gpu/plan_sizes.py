"""Workspace that each cuDNN engine asks for, also on GPUs that are not here.

::

    python tests/gpu/plan_sizes.py [-o plan-sizes-out] [--sm 90,100,103,120,121] [--op fp8,bf16] \
        [--shape 1x16x4096x4096 ...] [--without-driver]

Needs cudnn-frontend, a cuDNN backend and libcuda (no plan builds without a driver), no torch and
no FlashInfer. Plans are built from a *description* of a device: nothing runs, so a size says what
the engine asks for there and nothing else. One process a device and op; a plan that does not
build says so. To see another cuDNN, install it somewhere and put it first on the path:
``pip install --target OTHER nvidia-cudnn-cu13==V`` and ``PYTHONPATH=OTHER``.

``--without-driver`` is for a machine without a GPU: it compiles a stand-in for the driver
(:mod:`stand_in_driver`, which says what that leaves out). It needs a C compiler, and cuBLASLt and
NVRTC on the path as well (nvidia-cublas, nvidia-cuda-nvrtc).

Exit status 0: 40 MiB cover every size seen; 1: they do not; 2: bad input, or no plan builds.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import stand_in_driver
from catalogue.command import (
    exit_status,
    last_line,
    output_folder,
    signal_name,
    work_folder,
    write_whole,
)
from catalogue.wheels import BadInput

DEFAULT = 40 << 20
Shape = tuple[int, int, int, int]
#: (batch, m, n, k) unless others are named.
SHAPES: list[Shape] = [
    (1, 16, 4096, 4096),
    (1, 512, 5120, 5120),
    (1, 16, 1024, 16384),
    (1, 2001, 10304, 2688),
]
OPS = ("fp8", "bf16", "fp4", "mxfp8")
#: Of an H200, as cudnn-frontend wrote them for it.
H200: dict[str, Any] = {
    "maxGridSize": [2147483647, 65535, 65535],
    "maxBlockSize": [1024, 1024, 64],
    "regsPerBlock": 65536,
    "multiProcessorCount": 132,
    "warpSize": 32,
    "maxSharedMemoryPerBlock": 49152,
    "maxSharedMemoryPerBlockOptin": 232448,
    "reservedSharedMemoryPerBlock": 1024,
    "maxRegistersPerSM": 65536,
    "maxCtasPerSM": 32,
    "maxThreadsPerBlock": 1024,
    "maxThreadsPerSM": 2048,
    "pciDeviceId": 6,
    "isTccDriver": 0,
    "supportCoopLaunch": 1,
    "totalGlobalMem": 150109880320,
    "smClockRateKHz": 1980000,
    "memClockRateKHz": 3201000,
    "memoryBusWidth": 6144,  # bits; asked for by cuDNN 9.28
    "l2CacheSize": 62914560,
    "cudaDeviceId": 0,
    "deviceVer": 900,
    "driverVer": 13000,
    "deviceName": "NVIDIA H200",
}
_DATA_CENTRE = {"multiProcessorCount": 148, "totalGlobalMem": 180 << 30, "memoryBusWidth": 8192}
_WORKSTATION = {
    "maxSharedMemoryPerBlockOptin": 101376,
    "maxThreadsPerSM": 1536,
    "maxCtasPerSM": 24,
    "l2CacheSize": 128 << 20,
}
#: What differs from that, from the vendor's public data sheets.
DEVICES: dict[int, dict[str, Any]] = {
    90: {},
    100: {**_DATA_CENTRE, "deviceName": "NVIDIA B200"},
    103: {**_DATA_CENTRE, "totalGlobalMem": 288 << 30, "deviceName": "NVIDIA B300"},
    120: {
        **_WORKSTATION,
        "multiProcessorCount": 188,
        "totalGlobalMem": 96 << 30,
        "memoryBusWidth": 512,
        "deviceName": "NVIDIA RTX PRO 6000 Blackwell",
    },
    121: {
        **_WORKSTATION,
        "multiProcessorCount": 48,
        "totalGlobalMem": 128 << 30,
        "l2CacheSize": 24 << 20,
        "memoryBusWidth": 256,
        "deviceName": "NVIDIA GB10",
    },
}


def description(sm: int) -> str:
    """JSON of the device, as ``cudnn.create_device_properties`` takes it."""
    return json.dumps({**H200, **DEVICES[sm], "deviceVer": 10 * sm})


# One process a device and op. --------------------------------------------------------------------


def child(sm: int, op: str, shapes: list[Shape]) -> None:
    """Print one JSON line: the plans of every shape."""
    import cudnn

    properties = cudnn.create_device_properties(description(sm))
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        try:
            rows += _plans(cudnn, properties, op, shape)
        except Exception as error:
            first = (str(error).strip().splitlines() or [""])[0]
            rows.append({"shape": shape, "error": f"{type(error).__name__}: {first[:300]}"})
    print(json.dumps({"cudnn": int(cudnn.backend_version()), "rows": rows}))


def _plans(cudnn: Any, properties: Any, op: str, shape: Shape) -> list[dict[str, Any]]:
    kind = cudnn.data_type
    graph = cudnn.pygraph(
        io_data_type=kind.FLOAT,
        intermediate_data_type=kind.FLOAT,
        compute_data_type=kind.FLOAT,
        device_property=properties,
    )
    b, m, n, k = shape
    operand = {
        "fp8": kind.FP8_E4M3,
        "mxfp8": kind.FP8_E4M3,
        "bf16": kind.BFLOAT16,
    }.get(op) or kind.FP4_E2M1
    left = graph.tensor(name="a", dim=[b, m, k], stride=[m * k, k, 1], data_type=operand)
    right = graph.tensor(name="b", dim=[b, k, n], stride=[k * n, 1, k], data_type=operand)
    if op in ("fp4", "mxfp8"):
        left = _scaled(cudnn, graph, left, op, (b, m, k), rows=True)
        right = _scaled(cudnn, graph, right, op, (b, k, n), rows=False)
    product = graph.matmul(name="product", A=left, B=right, compute_data_type=kind.FLOAT)
    product.set_data_type(kind.FLOAT)
    one = {"dim": [1, 1, 1], "stride": [1, 1, 1], "data_type": kind.FLOAT}
    factors = {"fp8": ("scale of a", "scale of b"), "fp4": ("alpha",)}.get(op, ())
    for name in factors:
        factor = graph.tensor(name=name, **one)
        product = graph.mul(name=f"times {name}", a=product, b=factor, compute_data_type=kind.FLOAT)
        product.set_data_type(kind.FLOAT)
    product.set_output(True).set_data_type(kind.BFLOAT16)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans(cudnn.build_plan_policy.ALL)
    rows: list[dict[str, Any]] = []
    for index in range(graph.get_execution_plan_count()):
        row: dict[str, Any] = {"shape": shape, "plan": index}
        try:
            row["name"] = str(graph.get_plan_name_at_index(index))
            row["bytes"] = int(graph.get_workspace_size_plan_at_index(index))
        except Exception as error:
            first = (str(error).strip().splitlines() or [""])[0]
            row["error"] = f"not built: {first[:120]}"
        rows.append(row)
    return rows


def _scaled(
    cudnn: Any, graph: Any, operand: Any, op: str, dim: tuple[int, int, int], rows: bool
) -> Any:
    """The operand times its block scales, one for 16 (NVFP4) or 32 (MXFP8) values along K."""
    batch, first, second = dim
    block = 16 if op == "fp4" else 32
    along, across = (second, first) if rows else (first, second)
    scales = -(-along // block)
    scales, across = -(-scales // 4) * 4, -(-across // 128) * 128  # whole 128x4 tiles
    shape = [batch, across, scales] if rows else [batch, scales, across]
    stride = [across * scales, scales, 1] if rows else [across * scales, 1, scales]
    kind = cudnn.data_type.FP8_E4M3 if op == "fp4" else cudnn.data_type.FP8_E8M0
    name = "a" if rows else "b"
    scale = graph.tensor(
        name=f"block scales of {name}",
        dim=shape,
        stride=stride,
        data_type=kind,
        reordering_type=cudnn.tensor_reordering.F8_128x4,
    )
    values = graph.block_scale_dequantize(
        operand, scale, block_size=[1, block] if rows else [block, 1], name=f"values of {name}"
    )
    values.set_data_type(cudnn.data_type.FLOAT)
    return values


# The table. --------------------------------------------------------------------------------------


def engine(name: str) -> str:
    """``eng0`` of ``matmul_eng0_k2=1_k3=4``; the whole name where there is none."""
    found = re.search(r"eng\d+", name)
    return found.group() if found else name


def summary(results: dict[str, dict[str, Any]], shapes: int) -> list[dict[str, Any]]:
    """A row for each device, op and engine: sizes, and what did not build."""
    rows: list[dict[str, Any]] = []
    for key, result in results.items():
        sm, op = key.split(".")
        sizes: dict[str, list[int]] = {}
        errors = Counter([result["error"]] if "error" in result else [])
        unbuilt = 0
        for row in result.get("rows", []):
            if "bytes" in row:
                sizes.setdefault(engine(row["name"]), []).append(row["bytes"])
            elif "plan" in row:
                unbuilt += 1
            else:
                errors[row["error"]] += 1
        base = {"sm": int(sm), "op": op}
        for name, found in sorted(sizes.items()):
            rows.append(
                {**base, "engine": name, "plans": len(found), "least": min(found)}
                | {"most": max(found), "covered": max(found) <= DEFAULT}
            )
        if unbuilt:
            rows.append({**base, "engine": "(not built)", "plans": unbuilt})
        rows += [
            {**base, "engine": f"no plan ({count} of {shapes} shapes): {error}"}
            for error, count in errors.items()
        ]
    return rows


def table(rows: list[dict[str, Any]], cudnn: object) -> str:
    """Markdown."""
    lines = [
        f"# Workspace that cuDNN {cudnn}'s GEMM plans ask for, by device description",
        "",
        "| SM | op | engine | plans | least, bytes | most, bytes | 40 MiB cover it |",
        "|" + " --- |" * 7,
    ]
    for row in rows:
        covered = {True: "yes", False: "**no**"}.get(row.get("covered"), "")  # type: ignore[arg-type]
        cells = (row["sm"], row["op"], row["engine"].replace("|", "\\|"), row.get("plans", 0))
        sizes = (row.get("least", ""), row.get("most", ""))
        lines.append("| " + " | ".join(map(str, (*cells, *sizes, covered))) + " |")
    return "\n".join(lines) + "\n"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="plan_sizes", description=(__doc__ or "").split("\n")[0])
    made.add_argument("--sm", default=",".join(map(str, DEVICES)))
    made.add_argument("--op", default=",".join(OPS))
    made.add_argument("--shape", action="append", default=[], metavar="BxMxNxK")
    made.add_argument("--without-driver", action="store_true")
    made.add_argument("-o", "--out", type=Path, default=Path("plan-sizes-out"))
    made.add_argument("--seconds", type=float, default=180.0, help="limit for one device and op")
    made.add_argument("-j", "--jobs", type=int, default=6)
    made.add_argument("--child", help=argparse.SUPPRESS)
    return made


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    return exit_status("plan_sizes", lambda: _main(options))


def parsed(text: str) -> Shape:
    """(batch, m, n, k) of ``1x16x4096x4096``. Raises :class:`BadInput`."""
    found = re.fullmatch(r"([0-9]+)x([0-9]+)x([0-9]+)x([0-9]+)", text)
    b, m, n, k = map(int, found.groups()) if found else (0, 0, 0, 0)
    if min(b, m, n, k) < 1:
        raise BadInput(f"--shape {text}, wanted four numbers above 0, such as 1x16x4096x4096")
    return b, m, n, k


def _main(options: argparse.Namespace) -> int:
    shapes = [parsed(text) for text in options.shape] or SHAPES
    if options.child:
        sm, _, op = options.child.partition(".")
        devices, ops = _wanted(sm, op)
        child(*devices, *ops, shapes)
        return 0
    devices, ops = _wanted(options.sm, options.op)
    if options.jobs < 1:
        raise BadInput(f"-j is {options.jobs}, wanted at least 1")
    if not 0 < options.seconds < math.inf:
        raise BadInput(f"--seconds is {options.seconds:g}, wanted a number above 0")
    output_folder(options.out)
    keys = [f"{sm}.{op}" for sm in devices for op in ops]
    with work_folder(None, "plan-sizes") as folder:
        variables: dict[int, dict[str, str]] = {}
        if options.without_driver:
            stand_in_driver.build(folder)
            variables = {sm: stand_in_driver.environment(folder, sm) for sm in devices}
        results = run(keys, shapes, options.seconds, options.jobs, variables)
    versions = {result["cudnn"] for result in results.values() if "cudnn" in result}
    rows = summary(results, len(shapes))
    text = table(rows, ", ".join(map(str, sorted(versions))) or "(none)")
    print(text)
    built = [row for row in rows if "most" in row]
    if not built:
        driver = "" if options.without_driver else "; without a driver none does: --without-driver"
        raise BadInput(f"no plan was built, for the reasons above{driver}; nothing is written")
    write_whole(options.out / "plan-sizes.json", json.dumps(results, indent=1) + "\n")
    write_whole(options.out / "plan-sizes.md", text)
    return 0 if all(row["covered"] for row in built) else 1


def _wanted(sm: str, op: str) -> tuple[list[int], list[str]]:
    """Devices and ops of two lists with commas. Raises :class:`BadInput`."""
    names = {str(known): known for known in DEVICES}
    devices, ops = sm.split(","), op.split(",")
    if set(devices) - set(names) or set(ops) - set(OPS):
        raise BadInput(
            f"--sm {sm} --op {op}, wanted some of {','.join(names)} and of {','.join(OPS)}"
        )
    return [names[each] for each in devices], ops


def run(
    keys: list[str],
    shapes: list[Shape],
    seconds: float,
    jobs: int,
    variables: dict[int, dict[str, str]],
) -> dict[str, dict[str, Any]]:
    """A process for each of ``keys``, with the ``variables`` of its device in the environment; a
    crash or a hang is that key's error."""
    from concurrent.futures import ThreadPoolExecutor

    named = [each for b, m, n, k in shapes for each in ("--shape", f"{b}x{m}x{n}x{k}")]

    def one(key: str) -> dict[str, Any]:
        try:
            done = subprocess.run(
                [sys.executable, __file__, "--child", key, *named],
                env={**os.environ, **variables.get(int(key.split(".")[0]), {})},
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"error": f"no end after {seconds:.0f} s"}
        try:
            answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        except (IndexError, ValueError):
            ended = _ended(done.returncode)
            return {"error": f"{ended}: {last_line(done.stderr, 'no message')}"}
        return answer

    with ThreadPoolExecutor(jobs) as pool:
        return dict(zip(keys, pool.map(one, keys), strict=True))


def _ended(status: int) -> str:
    return f"exit status {status}" if status >= 0 else signal_name(-status)


if __name__ == "__main__":
    sys.exit(main())
