"""What a graft changes in a release: edited files, added files, metadata, provenance."""

from __future__ import annotations

import ast
import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from . import TOOL, label
from .edits import EDITS
from .errors import GraftError
from .module import Module, Site, Splice, apply
from .native import PATH as NATIVE_PATH
from .native import Native
from .releases import FAMILIES, Counts, Family
from .source import PROVENANCE, Source

NOTICE_FILE = "NOTICE.gemm_workspace"
PURE_TAG = "py3-none-any"


@dataclass(frozen=True)
class EditedFile:
    """One file of the release, before and after."""

    path: str
    before: bytes
    after: bytes
    #: edit name -> its sites in this file
    sites: Mapping[str, tuple[Site, ...]]


@dataclass(frozen=True)
class Delta:
    """All of it. ``version`` is that of the output."""

    version: str
    edited: tuple[EditedFile, ...]
    #: Files that the release does not have: path in the wheel -> bytes.
    added: Mapping[str, bytes]
    #: Files under dist-info that change: path in the wheel -> bytes.
    metadata: Mapping[str, bytes] = field(default_factory=dict)
    #: Python, ABI and platform, as the file's name and WHEEL have them.
    tag: str = PURE_TAG

    @property
    def dist_info(self) -> str:
        return f"flashinfer_python-{self.version}.dist-info"

    def sites(self, edit: str) -> int:
        """Number of sites of one edit over all files."""
        return sum(len(file.sites.get(edit, ())) for file in self.edited)


def notice_line(edits: list[str]) -> bytes:
    """The line at the head of an edited file that Apache-2.0, section 4(b), asks for."""
    return (
        f"# Changed by {TOOL} (unofficial build, see flashinfer/gemm_workspace): "
        f"{', '.join(edits)}.\n"
    ).encode()


def _import_splice(module: Module, names: set[str]) -> Splice:
    """One import of the runtime, after the last import at the head of the module."""
    level = "." * (module.path.count("/"))
    last = None
    for node in module.tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            break
        if isinstance(node, ast.Import | ast.ImportFrom):
            last = node
    if last is None:
        raise GraftError(f"{module.path}: has no import to put the runtime's after")
    listed = "".join(f"    {name},\n" for name in sorted(names))
    return module.insert_after(last, f"from {level}gemm_workspace import (\n{listed})")


def edit_module(
    path: str, data: bytes, own_lengths: frozenset[str]
) -> tuple[EditedFile, list[str]]:
    """Run every edit that wants ``path`` over ``data``; also say what was not understood."""
    module = Module(path, data)
    sites: dict[str, tuple[Site, ...]] = {}
    splices: list[Splice] = []
    imports: set[str] = set()
    removed: set[str] = set()
    problems = []
    for edit in EDITS:
        if not edit.wants(path, data):
            continue
        found = edit.find(module, own_lengths)
        problems += [
            f"{path}:{site.line}: {edit.name}: {site.what}" for site in found.not_understood
        ]
        if not found.sites:
            continue
        sites[edit.name] = tuple(sorted(found.sites))
        splices += found.splices
        imports |= found.imports
        removed |= {s.what.removeprefix("upstream's ") for s in found.sites}
    if not sites:
        return EditedFile(path, data, data, {}), problems
    # A name that the module imports already comes from a module that gives the fork's.
    imports -= module.imported_names()
    problems += [
        f"{path}: defines {name} itself"
        for name in sorted(imports & module.defined_names() - removed)
    ]
    if imports:
        splices.append(_import_splice(module, imports))
    head = Splice(0, 0, notice_line(list(sites)))
    return EditedFile(path, data, apply(data, [head, *splices]), sites), problems


def _count_problems(counted: Counts, family: Family) -> list[str]:
    """Every difference between the sites found and the sites expected."""
    problems = []
    for edit in EDITS:
        found, wanted = counted.get(edit.name, {}), family.counts.get(edit.name, {})
        problems += [
            f"{path}: {edit.name}: {found.get(path, 0)} sites found, {wanted.get(path, 0)} expected"
            for path in sorted({*found, *wanted})
            if found.get(path, 0) != wanted.get(path, 0)
        ]
    return problems


def edit_release(source: Source) -> tuple[EditedFile, ...]:
    """Make every edit, or raise GraftError with every site that was not understood."""
    scope = [row.path for row in source.rows if any(edit.in_scope(row.path) for edit in EDITS)]
    texts = {path: source.store.read(path) for path in scope}
    paths = [path for path in scope if any(edit.wants(path, texts[path]) for edit in EDITS)]
    families = [source.release.family] if source.release is not None else list(FAMILIES[::-1])
    refusals: list[list[str]] = []
    for family in families:
        results = [edit_module(path, texts[path], family.own_lengths) for path in paths]
        problems = [problem for _, found in results for problem in found]
        edited = tuple(file for file, _ in results if file.sites)
        counted: dict[str, dict[str, int]] = {}
        for file in edited:
            for name, sites in file.sites.items():
                counted.setdefault(name, {})[file.path] = len(sites)
        problems += _count_problems(counted, family)
        if not problems:
            return edited
        refusals.append(problems)
    # An unknown release is built as the newest family whose sites it has; none fits here.
    raise GraftError(
        f"{source.version}: the sites are not the ones expected; nothing was written",
        sorted(refusals, key=len)[0],
    )


def _metadata(text: bytes, base: str, version: str) -> bytes:
    """METADATA with the new version and our notice among the licence files; the rest as it was."""
    head, separator, body = text.partition(b"\n\n")
    lines = head.split(b"\n")
    wanted = b"Version: " + base.encode()
    if lines.count(wanted) != 1:
        raise GraftError(f"METADATA has {lines.count(wanted)} lines {wanted.decode()!r}, not 1")
    lines[lines.index(wanted)] = b"Version: " + version.encode()
    licences = [i for i, line in enumerate(lines) if line.startswith(b"License-File: ")]
    at = licences[-1] + 1 if licences else len(lines)
    lines.insert(at, b"License-File: " + NOTICE_FILE.encode())
    return b"\n".join(lines) + separator + body


def _wheel(text: bytes, version: str, tag: str = PURE_TAG) -> bytes:
    """WHEEL with a second Generator line, and for a platform with that tag."""
    lines = text.split(b"\n")
    if tag != PURE_TAG:
        for before, after in (
            ("Root-Is-Purelib: true", "Root-Is-Purelib: false"),
            (f"Tag: {PURE_TAG}", f"Tag: {tag}"),
        ):
            if lines.count(before.encode()) != 1:
                raise GraftError(
                    f"WHEEL has {lines.count(before.encode())} lines {before!r}, not 1"
                )
            lines[lines.index(before.encode())] = after.encode()
    at = max(
        (i for i, line in enumerate(lines) if line.startswith(b"Generator:")),
        default=-1,
    )
    if at < 0:
        raise GraftError("WHEEL has no Generator line")
    lines.insert(at + 1, f"Generator: {TOOL} ({version})".encode())
    return b"\n".join(lines)


def notice(base: str, version: str, native: bool = False) -> bytes:
    """Our notice: what the build is, what it is not, what it changed, and whose code is in it."""
    lines = [
        f"flashinfer-python {version}",
        "",
        "This is an unofficial build of FlashInfer. It is not made, endorsed or supported by the",
        f"FlashInfer team. It is release {base} of flashinfer-python with the changes below, made",
        f"by {TOOL}, under the Apache License 2.0 like the original.",
        "",
        "Added: the package flashinfer/gemm_workspace.",
        "Changed (each file says so in its first line; graft.json beside METADATA lists every",
        "site with hashes before and after):",
        "",
        *(f"- {edit.name}: {edit.summary}" for edit in EDITS),
        *(NATIVE_NOTICE if native else ()),
    ]
    return ("\n".join(lines) + "\n").encode()


#: What the native launch holds of others: their headers are compiled into it.
NATIVE_NOTICE = (
    "",
    f"{NATIVE_PATH} is built from this project's csrc/ (Apache License",
    "2.0) and has in it code of the headers of apache-tvm-ffi (Apache License 2.0), of",
    "cudnn-frontend (Copyright (c) 2020-2026 NVIDIA CORPORATION & AFFILIATES; Apache License 2.0)",
    "and of JSON for Modern C++ (Copyright (c) 2013-2023 Niels Lohmann), which is under the MIT",
    "License:",
    "",
    "Permission is hereby granted, free of charge, to any person obtaining a copy of this software",
    'and associated documentation files (the "Software"), to deal in the Software without',
    "restriction, including without limitation the rights to use, copy, modify, merge, publish,",
    "distribute, sublicense, and/or sell copies of the Software, and to permit persons to whom the",
    "Software is furnished to do so, subject to the following conditions:",
    "",
    "The above copyright notice and this permission notice shall be included in all copies or",
    "substantial portions of the Software.",
    "",
    'THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING',
    "BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND",
    "NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM,",
    "DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING",
    "FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.",
)


def _provenance(
    source: Source,
    edited: tuple[EditedFile, ...],
    added: Mapping[str, bytes],
    metadata: Mapping[str, tuple[bytes, bytes]],
    native: Native | None,
) -> bytes:
    """Where the wheel comes from, for people and for the verifier. Nothing in it is a date."""

    def sha(data: bytes) -> str:
        return hashlib.sha256(data).hexdigest()

    body = {
        "tool": TOOL,
        "label": f"ws.{label.CURRENT}",
        "delta_sha256": label.at_hand().delta,
        "base": {
            "version": source.version,
            "known": source.release is not None,
            "wheel_sha256": source.sha256,
            "record_sha256": source.record_sha256,
        },
        "edits": [
            {
                "name": edit.name,
                "summary": edit.summary,
                "hazards": list(edit.hazards),
                "upstream": edit.upstream,
                "sites": {
                    file.path: [{"line": s.line, "what": s.what} for s in file.sites[edit.name]]
                    for file in edited
                    if edit.name in file.sites
                },
            }
            for edit in EDITS
        ],
        "changed": {
            path: {"before": sha(before), "after": sha(after)}
            for path, (before, after) in {
                **{file.path: (file.before, file.after) for file in edited},
                **metadata,
            }.items()
        },
        "added": {path: sha(data) for path, data in added.items()},
    }
    if native is not None:
        body["native"] = {
            "path": NATIVE_PATH,
            "sha256": native.sha256,
            "platform": native.platform,
            "sources_sha256": native.sources,
        }
    return (json.dumps(body, indent=1) + "\n").encode()


def make(source: Source, native: Native | None = None) -> Delta:
    """Compute the delta for a release, with the native launch if there is one.

    Raises GraftError; writes nothing.
    """
    edited = edit_release(source)
    added = label.runtime_files()
    # A label of its own: pip and uv would not replace one by the other under the same.
    version = f"{source.version}+ws.{label.CURRENT}"
    tag = PURE_TAG
    if native is not None:
        added[NATIVE_PATH] = native.data
        version, tag = f"{version}.native", native.tag
    present = {row.path for row in source.rows}
    if collisions := sorted(present & set(added)):
        raise GraftError("the release has files of the same name as ours", collisions)
    if doubled := [path for path, n in Counter(f.path for f in edited).items() if n > 1]:
        raise GraftError("files are edited twice", doubled)
    old, new = source.dist_info, f"flashinfer_python-{version}.dist-info"
    texts = {name: source.store.read(f"{old}/{name}") for name in ("METADATA", "WHEEL")}
    changed = {
        f"{new}/METADATA": (
            texts["METADATA"],
            _metadata(texts["METADATA"], source.version, version),
        ),
        f"{new}/WHEEL": (texts["WHEEL"], _wheel(texts["WHEEL"], f"ws.{label.CURRENT}", tag)),
    }
    metadata = {path: after for path, (_, after) in changed.items()}
    metadata[f"{new}/licenses/{NOTICE_FILE}"] = notice(
        source.version, version, native=native is not None
    )
    metadata[f"{new}/{PROVENANCE}"] = _provenance(
        source, edited, {**added, **_only_new(metadata, changed)}, changed, native
    )
    return Delta(version, edited, added, metadata, tag)


def _only_new(
    metadata: Mapping[str, bytes], changed: Mapping[str, tuple[bytes, bytes]]
) -> dict[str, bytes]:
    return {path: data for path, data in metadata.items() if path not in changed}
