"""What is on the disk of this machine beside Python packages."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from .facts import JitCache, Library, Missing
from .packages import read_small

_SYSTEM_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
)


def cudnn_libraries(
    sites: Iterable[Path], environment: Mapping[str, str], *, of_system: bool
) -> tuple[Library, ...]:
    """Every libcudnn in ``sites`` and, if ``of_system``, where the loader may look."""
    folders = [
        folder for site in sites for folder in (site / "nvidia/cudnn/lib", site / "torch/lib")
    ]
    if of_system:
        folders += [
            Path(entry) for entry in environment.get("LD_LIBRARY_PATH", "").split(":") if entry
        ]
        folders += [Path(folder) for folder in _SYSTEM_FOLDERS]
        folders += sorted(Path("/usr/local").glob("cuda*/lib64"))
        folders += sorted(Path("/usr/local").glob("cuda*/targets/*/lib"))
    found: dict[Path, None] = {}
    for folder in folders:
        for path in _matching(folder, "libcudnn.so*"):
            found.setdefault(path.resolve())
    return tuple(Library(str(path), _version_of(path)) for path in found)


def _matching(folder: Path, pattern: str) -> list[Path]:
    try:
        return sorted(folder.glob(pattern))
    except OSError:
        return []


def _version_of(library: Path) -> str | Missing:
    found = re.search(r"\.so\.(\d+\.\d+\.\d+)$", library.name)
    if found:
        return found[1]
    header = library.parent.parent / "include" / "cudnn_version.h"
    try:
        text = read_small(header).decode("utf-8", "replace")
    except (OSError, ValueError):
        return Missing("neither its name nor a header beside it says")
    parts = [
        re.search(rf"^#define\s+CUDNN_{part}\s+(\d+)", text, re.MULTILINE)
        for part in ("MAJOR", "MINOR", "PATCHLEVEL")
    ]
    if not all(parts):
        return Missing(f"{header} does not say")
    return ".".join(part[1] for part in parts if part)


def driver_version(path: Path = Path("/proc/driver/nvidia/version")) -> str | Missing:
    """Version of the kernel driver that is loaded."""
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        return Missing(f"{path}: {error.strerror}: no NVIDIA driver is loaded here")
    found = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", text)
    return found[1] if found else Missing(f"{path} has no version that is understood")


def nvcc(environment: Mapping[str, str]) -> str | None:
    """The compiler that FlashInfer's JIT would use, where it is there."""
    named = environment.get("FLASHINFER_NVCC")
    if named:
        return shutil.which(named, path=environment.get("PATH"))
    home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    if not home:
        on_path = shutil.which("nvcc", path=environment.get("PATH"))
        if on_path:
            return on_path
        home = "/usr/local/cuda"
    path = Path(home) / "bin" / "nvcc"
    return str(path) if os.access(path, os.X_OK) else None


def home(environment: Mapping[str, str]) -> Path | Missing:
    """The home folder, which a container's user may lack."""
    try:
        return Path(environment.get("HOME") or Path.home())
    except RuntimeError as error:
        return Missing(str(error))


def jit_cache(version: str, package: Path, environment: Mapping[str, str]) -> JitCache | Missing:
    """Ops that the JIT compiled for ``version``, against the sources of the installed package.

    ninja compares times: one op that is older than one of its sources is built again, which
    needs nvcc. Which sources an op has is not looked up, so ``older`` is the most it can be.
    """
    base = environment.get("FLASHINFER_WORKSPACE_BASE") or home(environment)
    if isinstance(base, Missing):
        return base
    folder = Path(base) / ".cache" / "flashinfer" / version
    built = [_time(path) for path in _matching(folder, "*/cached_ops/*/*.so")]
    if not built:
        return Missing(f"no compiled ops in {folder}")
    newest = max(map(_time, _files(package / "data")), default=0.0)
    return JitCache(
        str(folder), len(built), sum(time < newest for time in built), nvcc(environment)
    )


def _files(folder: Path) -> Iterator[Path]:
    for root, _, names in os.walk(folder):
        for name in names:
            if not name.endswith((".pyc", ".so")):
                yield Path(root, name)


def _time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
