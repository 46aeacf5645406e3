"""Reads the autotuner's cache files: which runner won which shape, and for which environment.

Two forms, read in releases 0.6.12 to 0.7.4. One file for all (``autotune(cache=...)``, what vLLM
and SGLang keep): a JSON object of ``_metadata`` and, for each shape, a key that is the text of a
tuple (op, runner's class, shapes of the tensors, and from 0.6.13 on more), with the value
``[runner's class, tactic]``. A file an entry (``autotune_v2``, from 0.7.0 on): ``key``, ``runner``
and ``tactic`` in ``v2/<environment>/entries``, the environment in ``manifest.json`` beside it.

A file may be anything: cut short, huge, written by hand. What is not understood is counted and
said, and nothing here raises for it.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from .facts import Missing

#: Bytes of a file, and files of a folder, beyond which it is no autotuner's cache. One server's
#: file with 84 shapes has 21,589 bytes (vllm#55571).
LARGEST, MOST_FILES = 64 << 20, 20_000

_METADATA = ("_metadata", "manifest")


@dataclass(frozen=True)
class Entry:
    """One tuned shape. ``m`` is its bucket, None where the shapes have no rows."""

    op: str
    runner: str
    m: int | None
    #: The text of the tensors' shapes.
    shapes: str
    #: A bare plan index, which releases from 0.6.16 on do not load for cuDNN.
    plain_index: bool


@dataclass(frozen=True)
class Cache:
    """One file, or one environment of the newer form."""

    path: str
    entries: tuple[Entry, ...]
    #: None: it says nothing of its environment.
    metadata: Mapping[str, str | None] | None
    #: How many entries are not understood, and the first of them.
    odd: int = 0
    odd_example: str = ""


def read(path: Path) -> list[Cache | Missing]:
    """Every cache in ``path``, a file or a folder with any depth of folders below it."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        return [Missing(f"{path}: {error.strerror}")]
    except ValueError as error:  # a name that no file can have
        return [Missing(f"{str(path)!r}: {error}")]
    if stat.S_ISREG(mode):
        return [read_file(path)]
    if not stat.S_ISDIR(mode):
        return [Missing(f"{path}: neither a file nor a folder")]
    found: list[Cache | Missing] = []
    newer: dict[Path, list[Path]] = {}
    for number, file in enumerate(_json_files(path)):
        if number >= MOST_FILES:
            found.append(
                Missing(f"{path}: more than {MOST_FILES} JSON files; the rest is not read")
            )
            break
        if file.parent.name == "entries":
            newer.setdefault(file.parent, []).append(file)
        elif file.name != "manifest.json":
            found.append(read_file(file))
    found += [_read_entries(folder, files) for folder, files in newer.items()]
    return found or [Missing(f"{path}: no cache file in it")]


def _json_files(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        folders.sort()
        yield from (Path(root, name) for name in sorted(names) if name.endswith(".json"))


def read_file(path: Path) -> Cache | Missing:
    """One cache file, or why it is none."""
    content = _json_object(path)
    if isinstance(content, Missing):
        return content
    if "key" in content and "runner" in content:
        return _cache(path, [_newer(content)], None)
    metadata = _metadata(content["_metadata"]) if "_metadata" in content else None
    # Names that begin so are the autotuner's own.
    pairs = [(key, value) for key, value in content.items() if not key.startswith("_")]
    if not pairs and metadata is None and content:
        return Missing(f"{path}: a JSON object, but not of an autotuner")
    return _cache(path, [(key, _entry(key, value)) for key, value in pairs], metadata)


def _read_entries(folder: Path, files: list[Path]) -> Cache | Missing:
    manifest = _json_object(folder.parent / "manifest.json")
    metadata = None if isinstance(manifest, Missing) else _metadata(manifest)
    found: list[tuple[str, Entry | None]] = []
    for file in files:
        content = _json_object(file)
        found.append((str(file), None) if isinstance(content, Missing) else _newer(content))
    return _cache(folder, found, metadata)


def _cache(
    path: Path,
    found: list[tuple[str, Entry | None]],
    metadata: Mapping[str, str | None] | None,
) -> Cache:
    odd = [key for key, entry in found if entry is None]
    entries = tuple(entry for _, entry in found if entry is not None)
    return Cache(str(path), entries, metadata, len(odd), odd[0][:200] if odd else "")


def _json_object(path: Path) -> dict[str, object] | Missing:
    try:
        # Not a pipe, whose other end may never write.
        if not stat.S_ISREG(path.stat().st_mode):
            return Missing(f"{path}: not a file")
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
    except OSError as error:
        return Missing(f"{path}: {error.strerror}")
    if len(data) > LARGEST:
        return Missing(f"{path}: more than {LARGEST >> 20} MiB, no autotuner's cache; not read")
    if not data.strip():
        return Missing(f"{path}: empty; its writer did not finish, or the disk was full")
    try:
        content = json.loads(data)
    except RecursionError:
        return Missing(f"{path}: nested too deeply, no autotuner's cache")
    except MemoryError:
        return Missing(f"{path}: too large for the memory here")
    except ValueError as error:
        return Missing(f"{path}: cut short or edited, not JSON ({error})")
    if not isinstance(content, dict):
        return Missing(f"{path}: JSON, but a {type(content).__name__} and no object")
    return content


def _metadata(said: object) -> dict[str, str | None]:
    if not isinstance(said, dict):
        return {}
    return {key: None if value is None else str(value)[:200] for key, value in said.items()}


def _newer(content: Mapping[str, object]) -> tuple[str, Entry | None]:
    key = content.get("key")
    if not isinstance(key, str):
        return str(key), None
    return key, _entry(key, [content.get("runner"), content.get("tactic")])


_KEY = re.compile(r"\(\s*'([^'\\]{1,200})',\s*'([^'\\]{1,200})',\s*(\(.*\))\s*\)", re.DOTALL)
# A comma or the end after each number: optional separators would let one text be read in
# exponentially many ways.
_NEXT = r"(?:, ?|(?=\)))"
_SHAPE = rf"\((?:-?\d{{1,18}}{_NEXT})*\)"
_SHAPES = re.compile(rf"\((?:{_SHAPE}{_NEXT})*\)", re.ASCII)


def _entry(key: str, value: object) -> Entry | None:
    """
    >>> _entry("('fp8_gemm', 'CudnnFp8GemmRunner', ((1, 512, 64), (1, 64, 32)), ())", ["X", 3])
    ... # doctest: +NORMALIZE_WHITESPACE
    Entry(op='fp8_gemm', runner='X', m=512, shapes='((1, 512, 64), (1, 64, 32))',
          plain_index=True)
    """
    match value:
        case [str(runner), *rest] if runner and len(rest) == 1:
            tactic = rest[0]
        case _:
            return None
    named = _KEY.fullmatch(key) if len(key) <= 100_000 else None
    shapes = _SHAPES.match(named[3]) if named else None
    if named is None or shapes is None:
        return None
    plain = isinstance(tactic, int) and not isinstance(tactic, bool) and tactic >= 0
    return Entry(named[1], runner, _rows(shapes[0]), shapes[0], plain)


def _rows(shapes: str) -> int | None:
    """Rows of the first tensor: its last dimension but one, which the autotuner buckets."""
    first = re.search(r"\(([^()]*)\)", shapes)
    sizes = re.findall(r"-?\d+", first[1]) if first else []
    return int(sizes[-2]) if len(sizes) >= 2 else None
