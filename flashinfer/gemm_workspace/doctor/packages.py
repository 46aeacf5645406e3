"""Installed packages by their metadata and files. Nothing of what is examined is imported."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .facts import FlashInfer, Fork, Missing, Package

PROVENANCE = "graft.json"
_LARGEST = 16 << 20  # bytes of a metadata file or module worth reading


def canonical(name: str) -> str:
    """
    >>> canonical("FlashInfer_Python")
    'flashinfer-python'
    """
    return re.sub(r"[-_.]+", "-", name).lower()


def read_small(path: Path) -> bytes:
    """Contents of ``path``. Raises OSError, or ValueError for a file of more than 16 MiB."""
    with path.open("rb") as file:
        data = file.read(_LARGEST + 1)
    if len(data) > _LARGEST:
        raise ValueError(f"{path} has more than {_LARGEST} bytes")
    return data


class Packages:
    """The distributions in ``folders``, the first of a name first, as an import finds them."""

    def __init__(self, folders: Iterable[str | Path]) -> None:
        self.folders = [Path(folder) for folder in dict.fromkeys(map(str, folders))]
        self._found: dict[str, list[tuple[Package, Path]]] = {}
        for folder in self.folders:
            for package, path in _distributions(folder):
                self._found.setdefault(canonical(package.name), []).append((package, path))

    def all(self, name: str) -> list[tuple[Package, Path]]:
        """Every distribution called ``name``, with the folder of its metadata."""
        return self._found.get(canonical(name), [])

    def version(self, name: str) -> str | Missing:
        """Version of the first distribution called ``name``."""
        found = self.all(name)
        return found[0][0].version if found else Missing(f"{name} is not installed")

    def starting(self, prefix: str) -> list[Package]:
        """The first distribution of each name that starts with ``prefix``."""
        return [
            found[0][0] for name, found in sorted(self._found.items()) if name.startswith(prefix)
        ]


def _distributions(folder: Path) -> Iterator[tuple[Package, Path]]:
    try:
        found = list(importlib.metadata.distributions(path=[str(folder)]))
    except Exception:  # a folder that cannot be listed has no packages
        return
    for distribution in found:
        try:
            # Typed as never None, which it is where METADATA is cut short.
            name: Any = distribution.metadata["Name"]
            version: Any = distribution.metadata["Version"]
            where = Path(str(getattr(distribution, "_path", folder)))
        except Exception:  # one that is broken does not hide the others
            continue
        if isinstance(name, str) and isinstance(version, str):
            yield Package(name, version, str(folder)), where


def flashinfer(packages: Packages) -> FlashInfer | Missing:
    """The copy of FlashInfer that an import would find, fork or not."""
    homes = [
        folder for folder in packages.folders if (folder / "flashinfer" / "__init__.py").is_file()
    ]
    named = packages.all("flashinfer-python")
    if not homes:
        if named:
            package = named[0][0]
            return Missing(
                f"metadata of flashinfer-python {package.version} in {package.folder}, but no "
                "package beside it (an editable install, or its files were removed)"
            )
        return Missing("flashinfer is not installed in the folders looked at")
    home = homes[0]
    beside = [(package, path) for package, path in named if Path(package.folder) == home]
    # A copy with provenance first: an installer that left older metadata behind is no reason to
    # overlook the fork. Whether its files are still the fork's is checked.
    beside.sort(key=lambda found: not (found[1] / PROVENANCE).is_file())
    others = [f"{package.version} (metadata in {path})" for package, path in beside[1:]]
    others += [f"another copy in {folder}" for folder in homes[1:]]
    version: str | Missing
    fork: Fork | Missing | None
    if beside:
        version = beside[0][0].version
        fork = _fork(home, beside[0][1])
    else:
        version = Missing(f"no metadata of flashinfer-python in {home}")
        fork = None
    if fork is None and (home / "flashinfer" / "gemm_workspace" / "__init__.py").is_file():
        fork = Missing(f"flashinfer/gemm_workspace is there, but no {PROVENANCE} says what it is")
    return FlashInfer(version, _own_version(home), str(home), fork, tuple(others))


def _own_version(home: Path) -> str | Missing:
    path = home / "flashinfer" / "_build_meta.py"
    try:
        text = read_small(path).decode("utf-8", "replace")
    except (OSError, ValueError) as error:
        return Missing(f"{path}: {error}")
    found = re.search(r"""^__version__\s*=\s*["']([^"'\s]{1,100})["']""", text, re.MULTILINE)
    return found[1] if found else Missing(f"{path} has no __version__")


def _fork(home: Path, metadata: Path) -> Fork | Missing | None:
    path = metadata / PROVENANCE
    if not path.is_file():
        return None
    try:
        said = json.loads(read_small(path))
        edits = {
            str(edit["name"]): sum(len(sites) for sites in edit["sites"].values())
            for edit in said["edits"]
        }
        hashes = {
            str(file): (str(each["before"]), str(each["after"]))
            for file, each in said["changed"].items()
        }
        hashes |= {str(file): ("", str(sha256)) for file, sha256 in said["added"].items()}
        label, base = str(said["label"]), str(said["base"]["version"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return Missing(f"{path} cannot be read ({type(error).__name__}: {error})")
    reverted, altered = [], []
    for file, (before, after) in sorted(hashes.items()):
        if not file.startswith("flashinfer/") or ".." in file.split("/"):
            continue  # what an installer may rewrite
        try:
            now = hashlib.sha256(read_small(home / file)).hexdigest()
        except (OSError, ValueError):
            now = "missing"
        if now == before:
            reverted.append(file)
        elif now != after:
            altered.append(file)
    return Fork(label, base, edits, tuple(reverted), tuple(altered))


def torch_cuda(packages: Packages) -> str | Missing:
    """The CUDA that torch was built for, read from its version file."""
    for folder in packages.folders:
        path = folder / "torch" / "version.py"
        if path.is_file():
            text = read_small(path).decode("utf-8", "replace")
            found = re.search(r"""^cuda\b[^=\n]*=\s*["'](\d+\.\d+)["']""", text, re.MULTILINE)
            return found[1] if found else Missing("torch was built without CUDA")
    return Missing("torch is not installed in the folders looked at")


def cudnn_of_package(packages: Packages) -> int | Missing:
    """Backend version of the nvidia-cudnn-cu* package."""
    for package in packages.starting("nvidia-cudnn-cu"):
        found = re.match(r"(\d{1,3})\.(\d{1,3})\.(\d{1,3})", package.version, re.ASCII)
        if found:
            return int(found[1]) * 10000 + int(found[2]) * 100 + int(found[3])
    return Missing("no nvidia-cudnn-cu* package is installed in the folders looked at")
