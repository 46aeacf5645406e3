"""The wheels under test: each unpacked into a folder of its own, nothing installed."""

from __future__ import annotations

import re
import zipfile
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"flashinfer_python-(?P<version>[^-]+)-")


class BadInput(Exception):
    """What was asked for cannot be run; the text is one line for the user."""


@dataclass(frozen=True)
class Wheel:
    """``folder`` goes on the path; ``label`` heads a column."""

    label: str
    source: str
    folder: Path


def unpack(arguments: list[str], below: Path) -> list[Wheel]:
    """A Wheel for each of ``arguments``: ``[LABEL=]FILE.whl`` or ``[LABEL=]FOLDER``.

    Wheel files are unpacked below ``below``. Raises BadInput.
    """
    if not arguments:
        raise BadInput("no wheel named: give at least one, as a file or an unpacked folder")
    wheels: list[Wheel] = []
    for argument in arguments:
        label, _, name = argument.rpartition("=")
        path = Path(name).expanduser()
        label = label or _label(path)
        if any(wheel.label == label for wheel in wheels):
            raise BadInput(f"two wheels are called {label}: name one, as in other={name}")
        if path.is_dir():
            folder = path.resolve()
        elif path.is_file():
            folder = below / re.sub(r"[^\w.+-]", "_", label)
            _extract(path, folder)
        else:
            raise BadInput(f"no wheel {name}: wanted a .whl file or a folder with one unpacked")
        if not (folder / "flashinfer" / "__init__.py").is_file():
            raise BadInput(f"{name} holds no flashinfer package: wanted a flashinfer-python wheel")
        wheels.append(Wheel(label, name, folder))
    return wheels


def _label(path: Path) -> str:
    match = _NAME.match(path.name)
    if match:
        return match["version"]
    for found in sorted(path.glob("flashinfer_python-*.dist-info")) if path.is_dir() else []:
        return found.name.removeprefix("flashinfer_python-").removesuffix(".dist-info")
    return path.name


def _extract(path: Path, folder: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            archive.extractall(folder)
    except (zipfile.BadZipFile, OSError) as error:
        raise BadInput(f"{path} cannot be unpacked: {error}") from None
