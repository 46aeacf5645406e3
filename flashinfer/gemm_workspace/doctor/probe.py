"""Run as a file, in a child process: says what only an import or a library call can say.

``probe.py driver PATH`` asks libcuda for the devices; no context is made. ``probe.py python PATH``
imports torch, cudnn and flashinfer one after the other. PATH is ``sys.path`` as JSON. A line for
each step before and after it, so that the parent knows what was running when this process died.
Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

#: Before each line of ours; whatever else is printed is the imports'.
MARK = "\x1eflashinfer-doctor "

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


def _say(step: str, **facts: Any) -> None:
    # In one write: imports may leave a line of their own unfinished.
    sys.stdout.write(f"\n{MARK}{json.dumps({'step': step, **facts})}\n")
    sys.stdout.flush()


def _run(step: str, what: Callable[[], dict[str, Any]]) -> None:
    _say(step, begins=True)
    try:
        _say(step, **what())
    except BaseException as error:  # SystemExit too: an import may do anything
        _say(step, error=f"{type(error).__name__}: {error}"[:2000])


def devices() -> dict[str, Any]:
    """Name and compute capability of each device that CUDA_VISIBLE_DEVICES leaves."""
    cuda = ctypes.CDLL("libcuda.so.1")
    _checked(cuda.cuInit(0), "cuInit")
    version, count = ctypes.c_int(), ctypes.c_int()
    _checked(cuda.cuDriverGetVersion(ctypes.byref(version)), "cuDriverGetVersion")
    _checked(cuda.cuDeviceGetCount(ctypes.byref(count)), "cuDeviceGetCount")
    found = []
    for ordinal in range(count.value):
        device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        name = ctypes.create_string_buffer(256)
        _checked(cuda.cuDeviceGet(ctypes.byref(device), ordinal), "cuDeviceGet")
        _checked(cuda.cuDeviceGetName(name, len(name), device), "cuDeviceGetName")
        for number, attribute in ((major, _MAJOR), (minor, _MINOR)):
            _checked(
                cuda.cuDeviceGetAttribute(ctypes.byref(number), attribute, device),
                "cuDeviceGetAttribute",
            )
        found.append(
            {"name": name.value.decode("utf-8", "replace"), "sm": [major.value, minor.value]}
        )
    return {"cuda": version.value, "devices": found}


def _checked(status: int, what: str) -> None:
    if status:
        raise RuntimeError(f"{what} failed with CUDA error {status}")


def torch() -> dict[str, Any]:
    module = importlib.import_module("torch")
    cudnn = None
    with contextlib.suppress(Exception):
        cudnn = module.backends.cudnn.version()
    return {"version": str(module.__version__), "cuda": module.version.cuda, "cudnn": cudnn}


def frontend() -> dict[str, Any]:
    module = importlib.import_module("cudnn")
    return {"version": str(module.__version__), "backend": int(module.backend_version())}


def bindings() -> dict[str, Any]:
    for name in ("cuda.bindings.driver", "cuda.cuda"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            first = f"{name}: {error}"
            continue
        return {"module": name}
    raise ImportError(first)


def flashinfer() -> dict[str, Any]:
    module = importlib.import_module("flashinfer")
    facts: dict[str, Any] = {"version": str(module.__version__)}
    for name in ("flashinfer.autotuner.autotuner", "flashinfer.autotuner"):
        with contextlib.suppress(Exception):
            recorded = importlib.import_module(name)._collect_metadata()
            facts["metadata"] = {str(key): str(value) for key, value in recorded.items()}
            break
    return facts


def mapped() -> dict[str, Any]:
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        paths = {line.split(None, 5)[5].strip() for line in file if "libcudnn" in line}
    return {"paths": sorted(paths)}


def main() -> None:
    sys.path[:] = json.loads(sys.argv[2])
    if sys.argv[1] == "driver":
        _run("devices", devices)
    else:
        for step in (torch, frontend, bindings, flashinfer, mapped):
            _run(step.__name__, step)
    sys.stdout.flush()
    # Not sys.exit: teardown of half-imported libraries has nothing to say to us.
    os._exit(0)


if __name__ == "__main__":
    main()
