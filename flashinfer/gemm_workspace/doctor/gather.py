"""Collects the facts, each on its own: one that fails is missing, and the rest go on."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import children, machine, packages, switches
from .children import Step
from .facts import Facts, FlashInfer, Gpu, Missing, Unknown, asked
from .packages import Packages

_OTHER = Missing("another image is examined, and nothing of it is run")

_ENGINES = ("vllm", "sglang", "tensorrt-llm")


def of_image(sites: list[Path], sm: tuple[int, int] | None) -> Facts:
    """Facts of the packages in ``sites``, from their metadata and files alone."""
    found = Packages(sites)
    cudnn = asked(lambda: packages.cudnn_of_package(found))
    return Facts(
        image=", ".join(map(str, sites)),
        gpus=_OTHER if sm is None else _given(sm),
        driver=_OTHER,
        driver_cuda=_OTHER,
        import_error=_OTHER,
        torch=found.version("torch"),
        cudnn=cudnn,
        cudnn_of_torch=cudnn,
        cudnn_mapped=_OTHER,
        jit=_OTHER,
        cudnn_found=asked(lambda: machine.cudnn_libraries(sites, {}, of_system=False)),
        **_of_packages(found),
    )


def of_this_environment(environment: Mapping[str, str], sm: tuple[int, int] | None) -> Facts:
    """Facts of the environment that this process runs in."""
    found = Packages(entry or "." for entry in sys.path)
    driver = asked(lambda: children.ask_driver(environment)["devices"])
    said = asked(lambda: children.ask_python(environment))
    steps: Mapping[str, Step | Missing] = {} if isinstance(said, Missing) else said

    def step(name: str) -> Step | Missing:
        return said if isinstance(said, Missing) else steps[name]

    common = _of_packages(found)
    flashinfer: FlashInfer | Missing = common["flashinfer"]
    frontend = asked(lambda: str(_value(step("frontend"), "version")))
    if isinstance(frontend, Missing) and not isinstance(common["cudnn_frontend"], Missing):
        frontend = Missing(
            f"{common['cudnn_frontend']} is installed and does not import: {frontend.reason}"
        )
    return Facts(
        gpus=asked(lambda: _devices(driver)) if sm is None else _given(sm),
        driver=asked(machine.driver_version),
        driver_cuda=asked(lambda: _cuda_words(_value(driver, "cuda"))),
        import_error=_import_error(step("flashinfer")),
        torch=asked(lambda: str(_value(step("torch"), "version"))),
        cudnn=asked(lambda: int(_value(step("frontend"), "backend"))),
        cudnn_of_torch=asked(lambda: int(_value(step("torch"), "cudnn"))),
        cudnn_mapped=asked(lambda: tuple(map(str, _value(step("mapped"), "paths")))),
        cudnn_found=asked(
            lambda: machine.cudnn_libraries(found.folders, environment, of_system=True)
        ),
        jit=asked(lambda: _jit(flashinfer, environment)),
        environment=switches.of(environment),
        **{
            **common,
            "cudnn_frontend": frontend,
            "cuda_bindings": asked(lambda: _bindings(step("bindings"), common["cuda_bindings"])),
            "metadata": asked(lambda: _recorded(step("flashinfer"), driver, common["metadata"])),
        },
    )


def _of_packages(found: Packages) -> dict[str, Any]:
    flashinfer = asked(lambda: packages.flashinfer(found))
    bindings = found.version("cuda-bindings")
    if isinstance(bindings, Missing):
        bindings = found.version("cuda-python")
    if isinstance(bindings, Missing):
        bindings = Missing("neither cuda-bindings nor cuda-python is installed")
    torch_cuda = asked(lambda: packages.torch_cuda(found))
    cudnn = asked(lambda: packages.cudnn_of_package(found))
    frontend = found.version("nvidia-cudnn-frontend")
    recorded = {
        "flashinfer_version": None
        if isinstance(flashinfer, Missing) or isinstance(flashinfer.own_version, Missing)
        else flashinfer.own_version,
        "cuda_version": None if isinstance(torch_cuda, Missing) else torch_cuda,
        "cudnn_version": None if isinstance(cudnn, Missing) else str(cudnn),
        "cudnn_frontend_version": None if isinstance(frontend, Missing) else frontend,
    }
    return {
        "flashinfer": flashinfer,
        "torch_cuda": torch_cuda,
        "cudnn_frontend": frontend,
        "cuda_bindings": bindings,
        "cubin": found.version("flashinfer-cubin"),
        "jit_cache": found.version("flashinfer-jit-cache"),
        "engines": {
            name: version
            for name in _ENGINES
            if not isinstance(version := found.version(name), Missing)
        },
        "metadata": {key: value for key, value in recorded.items() if value is not None},
    }


def _given(sm: tuple[int, int]) -> tuple[Gpu, ...]:
    return (Gpu("given with --sm", sm),)


def _value(step: Step | Missing, key: str) -> Any:
    """``step[key]``. Raises :class:`Unknown` where it is missing."""
    if isinstance(step, Missing):
        raise Unknown(step.reason)
    if step.get(key) is None:
        raise Unknown(f"{key} is not known there")
    return step[key]


def _devices(driver: Step | Missing) -> tuple[Gpu, ...]:
    return tuple(
        Gpu(str(device["name"]), (int(device["sm"][0]), int(device["sm"][1])))
        for device in _value(driver, "devices")
    )


def _cuda_words(version: int) -> str:
    return f"{version // 1000}.{version // 10 % 100}"


def _import_error(step: Step | Missing) -> str | None:
    return step.reason if isinstance(step, Missing) else None


def _bindings(step: Step | Missing, version: str | Missing) -> str | Missing:
    if isinstance(step, Missing):
        return step
    return version if isinstance(version, str) else str(_value(step, "module"))


def _jit(flashinfer: FlashInfer | Missing, environment: Mapping[str, str]) -> Any:
    if isinstance(flashinfer, Missing):
        return flashinfer
    if isinstance(flashinfer.own_version, Missing):
        return flashinfer.own_version
    package = Path(flashinfer.folder) / "flashinfer"
    return machine.jit_cache(flashinfer.own_version, package, environment)


def _recorded(
    step: Step | Missing, driver: Step | Missing, of_packages: dict[str, str]
) -> dict[str, str]:
    """What the release's autotuner records here, asked of itself where it imports."""
    metadata = of_packages
    if not isinstance(step, Missing) and isinstance(step.get("metadata"), dict):
        metadata = {str(key): str(value) for key, value in step["metadata"].items()}
    metadata = {key: value for key, value in metadata.items() if key != "gpu"}
    # No GPU was shown to the child; the autotuner records the name of the current one.
    names = {gpu.name for gpu in _devices(driver)} if not isinstance(driver, Missing) else set()
    return metadata | ({"gpu": names.pop()} if len(names) == 1 else {})
