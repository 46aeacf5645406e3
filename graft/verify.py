"""The independent check of a finished wheel.

Shares no code with the editor: it reads the wheel, its RECORD and its provenance, and walks the
trees of its modules with its own eyes. What it proves is listed in :func:`verify`.
"""

from __future__ import annotations

import ast
import base64
import csv
import hashlib
import io
import json
import re
import struct
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from .errors import UNREADABLE, GraftError
from .label import LABELS, digest
from .releases import RELEASES

_Function = ast.FunctionDef | ast.AsyncFunctionDef
MIB = 1 << 20
#: Cached buffers of the GEMM modules that are no lanes: state that must survive between calls.
NO_LANES = ("flashinfer/gemm/cake_quant_lora_gemm.py", "cake_nvfp4_svdquant_tma_workspace")


def verify(wheel: Path | BinaryIO) -> list[Proof]:
    """Check a grafted wheel; return what was proven.

    Raises GraftError with everything that is wrong. Proven are: RECORD in both directions and
    every hash; every byte that is not listed as changed or added is the release's (for a known
    release, against the digest pinned here), ``flashinfer/data`` included; no growing site in any
    module; every plan build and handle creation of the GEMM modules behind the guard; every GEMM
    workspace from a lane; every retry lets a capture error through; every execution holds its
    plan and the device's lock; the default size; the SM12x gate; the public ops prepared, and
    what they repeat noted.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            return _Check(archive).run()
    except UNREADABLE as error:
        raise GraftError(f"not a readable wheel: {error}") from None


#: The proof that every table of releases shows.
SITES_LEFT = "growing sites left"
#: What the fork adds to a release.
RUNTIME = "flashinfer/gemm_workspace/"
#: The native launch, which only a wheel for one platform has, and what it may link.
NATIVE = "flashinfer/gemm_workspace/_native.so"
LINKED = {
    *(b"libtvm_ffi.so", b"libstdc++.so.6", b"libgcc_s.so.1", b"libc.so.6", b"libm.so.6"),
    *(b"libdl.so.2", b"libpthread.so.0"),
}
#: Where the runtime lists its lanes.
LANE_NAMES = "flashinfer/gemm_workspace/names.py"
#: Where the buffer cache is.
UTILS = "flashinfer/utils.py"
#: The public ops, and the tuner (a module, or a package) whose runners they run.
PREPARED = ("bmm_fp8", "mm_bf16", "bmm_bf16", "mm_fp8", "mm_fp4", "mm_mxfp8", "bmm_mxfp8")
HOME = "flashinfer/gemm/gemm_base.py"
TUNERS = ("flashinfer/autotuner.py", "flashinfer/autotuner/autotuner.py")
#: Names that the edits put into modules.
HOOKS = [
    "lane_workspace",
    "guard_plan_build",
    "device_locked",
    "create_cudnn_handle",
    "cache_buffer",
    "is_lane",
    "reserve_lane",
    "gate_sm12x_cudnn",
    "prepared_launches",
    "watched",
    "noted_runner",
    "_gemm_workspace_at_least",
    "_retain_cudnn_graph_if_capturing",
    "CudnnCaptureUnsafeError",
]
#: A module without any of these is not looked into.
MARKS = tuple(
    mark.encode()
    for mark in (
        *HOOKS,
        *("resize_", "build_plan", "create_handle", "_finalize_cudnn_graph_for_tactic"),
        *("_cache_buf", "tactic=-1", ".execute", "DEFAULT_WORKSPACE_SIZE"),
    )
)


@dataclass(frozen=True)
class Proof:
    """One thing that was checked and holds. ``count`` is how many places it was checked in."""

    what: str
    count: int
    note: str = ""

    def __str__(self) -> str:
        return f"{self.what}: {self.count}{f' ({self.note})' if self.note else ''}"


class _Parsed:
    """A module's tree, its nodes walked once."""

    def __init__(self, data: bytes) -> None:
        self.tree = ast.parse(data)
        self.functions: list[_Function] = []
        self.tries: list[ast.Try] = []
        self.imported: set[str] = set()
        self.used: set[str] = set()
        self._calls: list[tuple[str, ast.Call]] = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                func = node.func
                name = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
                self._calls.append((name, node))
            elif isinstance(node, ast.Name):
                self.used.add(node.id)
            elif isinstance(node, _Function):
                self.functions.append(node)
            elif isinstance(node, ast.Try):
                self.tries.append(node)
            elif isinstance(node, ast.ImportFrom):
                self.imported |= {alias.asname or alias.name for alias in node.names}

    def calls(self, *names: str, within: _Function | None = None) -> list[ast.Call]:
        """Calls of one of ``names``, anywhere or between the lines of one function."""
        first, last = (within.lineno, within.end_lineno or 0) if within else (0, 1 << 60)
        return [c for name, c in self._calls if name in names and first <= c.lineno <= last]

    def callers(self, *names: str) -> list[tuple[_Function | None, list[ast.Call]]]:
        """Calls of one of ``names``, by the innermost function around them."""
        groups: dict[_Function | None, list[ast.Call]] = {}
        for call in self.calls(*names):
            around = [f for f in self.functions if f.lineno <= call.lineno <= (f.end_lineno or 0)]
            function = max(around, key=lambda f: f.lineno, default=None)
            groups.setdefault(function, []).append(call)
        return list(groups.items())


class _Check:
    def __init__(self, archive: zipfile.ZipFile) -> None:
        self.archive = archive
        self.names = archive.namelist()
        self.problems: list[str] = []
        self.proven: list[Proof] = []
        self.parsed: dict[str, _Parsed] = {}

    def run(self) -> list[Proof]:
        folders = {name.split("/")[0] for name in self.names if ".dist-info/" in name}
        if len(folders) != 1:
            raise GraftError(f"the wheel has {len(folders)} dist-info folders, not 1")
        (self.folder,) = folders
        if f"{self.folder}/graft.json" not in self.names:
            raise GraftError(f"{self.folder} has no graft.json: this is not a grafted wheel")
        try:
            self.provenance = json.loads(self.archive.read(f"{self.folder}/graft.json"))
            self.check_record()
            self.check_untouched()
            self.check_runtime()
        except (ValueError, LookupError, TypeError, AttributeError, csv.Error) as error:
            raise GraftError(
                f"{self.folder}: graft.json or RECORD is malformed ({error!r})"
            ) from None
        self.check_modules()
        if self.problems:
            raise GraftError(f"{self.folder}: the wheel does not hold", self.problems)
        return self.proven

    def prove(self, what: str, count: int, note: str = "") -> None:
        self.proven.append(Proof(what, count, note))

    # -- bytes ---------------------------------------------------------------------------------

    def check_record(self) -> None:
        own = f"{self.folder}/RECORD"
        rows = [r for r in csv.reader(io.StringIO(self.archive.read(own).decode())) if r]
        listed = {row[0]: row for row in rows}
        if len(listed) != len(rows) or len(set(self.names)) != len(self.names):
            self.problems.append("RECORD or the archive names a file twice")
        for name in sorted(set(self.names) ^ set(listed)):
            where = "archive" if name in self.names else "RECORD"
            self.problems.append(f"{name}: in the {where} only")
        self.hashes: dict[str, str] = {}
        self.texts: dict[str, bytes] = {}
        for name in self.names:
            data = self.archive.read(name)
            self.hashes[name] = hashlib.sha256(data).hexdigest()
            if (_is_package(name) and any(mark in data for mark in MARKS)) or name == LANE_NAMES:
                self.texts[name] = data
            if name == own or name not in listed:
                continue
            wanted = f"sha256={_b64(self.hashes[name])}"
            if listed[name][1:] != [wanted, str(len(data))]:
                self.problems.append(f"{name}: RECORD says {listed[name][1:]}, it is {wanted}")
        self.prove("files in RECORD, both ways, every hash", len(rows))

    def check_untouched(self) -> None:
        """Undo the listed changes on paper; what remains must be the release."""
        base: dict[str, Any] = self.provenance["base"]
        version = base["version"]
        base_folder = f"flashinfer_python-{version}.dist-info"
        hashes = dict(self.hashes)
        for path in [f"{self.folder}/RECORD", f"{self.folder}/graft.json"]:
            hashes.pop(path)
        for path, sha256 in self.provenance["added"].items():
            if hashes.pop(path, None) != sha256:
                self.problems.append(f"{path}: listed as added, but not as it is here")
        for path, sides in self.provenance["changed"].items():
            if hashes.get(path) != sides["after"]:
                self.problems.append(f"{path}: listed as changed, but not as it is here")
            hashes[path] = sides["before"]
        lines = []
        for path, sha256 in hashes.items():
            if path.startswith(f"{self.folder}/"):
                path = base_folder + path[len(self.folder) :]
            lines.append(f"{path},sha256={_b64(sha256)}\n")
        digest = hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()
        known = RELEASES.get(version)
        wanted = known.record_sha256 if known is not None else base["record_sha256"]
        if digest != wanted:
            self.problems.append(
                f"without the listed changes this is not release {version}: "
                f"digest {digest}, wanted {wanted}"
            )
        data = sum(path.startswith("flashinfer/data/") for path in hashes)
        whose = "the pinned release" if known is not None else "unknown release"
        self.prove(
            f"files as in {whose} {version}",
            len(hashes) - len(self.provenance["changed"]),
            f"flashinfer/data: {data}",
        )

    def check_runtime(self) -> None:
        """What was added is the runtime that the wheel's label stands for."""
        name = str(self.provenance["label"])
        number = name.removeprefix("ws.")
        files = {p: h for p, h in self.hashes.items() if p.startswith(RUNTIME) and p != NATIVE}
        added = {p for p in self.provenance["added"] if not p.startswith(f"{self.folder}/")}
        added.discard(NATIVE)
        if added != set(files):
            self.problems.append(f"files are added outside {RUNTIME}: {sorted(added - set(files))}")
        if not number.isdigit() or int(number) not in LABELS:
            self.problems.append(f"label {name!r} is not known here: {sorted(LABELS)}")
        elif digest(files) != LABELS[int(number)].runtime:
            self.problems.append(
                f"{RUNTIME} is not the one of {name}: "
                f"digest {digest(files)}, wanted {LABELS[int(number)].runtime}"
            )
        self.prove(f"files of the runtime, as {name} has them", len(files))
        self.check_native()

    def check_native(self) -> None:
        """A library, if there is one, is the one listed, links none of CUDA's, and the wheel's
        tag asks for as new a system as it does; a wheel without one is for any platform."""
        tags = re.findall(rb"^Tag: (.*)$", self.archive.read(f"{self.folder}/WHEEL"), re.M)
        listed = self.provenance.get("native")
        if NATIVE not in self.hashes:
            if tags != [b"py3-none-any"] or listed is not None:
                self.problems.append(f"{NATIVE} is missing: tags {tags}, listed {listed}")
            return
        if listed is None or self.hashes[NATIVE] != listed["sha256"]:
            self.problems.append(f"{NATIVE}: not the one that graft.json lists")
            return
        data = self.archive.read(NATIVE)
        try:
            linked = _linked(data)
        except (struct.error, ValueError, OverflowError) as error:
            self.problems.append(f"{NATIVE}: is not a shared library ({error})")
            return
        for library in sorted(set(linked) - LINKED):
            self.problems.append(f"{NATIVE}: links {library.decode(errors='replace')}")
        # The names of the versions that it asks for stand in it as text.
        glibc = max((int(minor) for minor in re.findall(rb"\0GLIBC_2\.(\d+)", data)), default=0)
        tag = f"py3-none-manylinux_2_{max(glibc, 17)}_x86_64"
        named = [re.fullmatch(rb"py3-none-manylinux_2_(\d+)_x86_64", each) for each in tags]
        if len(named) != 1 or named[0] is None or int(named[0][1]) < glibc:
            self.problems.append(f"{NATIVE}: the wheel's tags are {tags}, wanted {tag} or newer")
        self.prove("native library, linking none of CUDA's", 1, f"glibc 2.{glibc}")

    # -- modules -------------------------------------------------------------------------------

    def modules(
        self, *marks: bytes, scope: Callable[[str], bool] | None = None
    ) -> Iterator[tuple[str, _Parsed]]:
        """Modules that mention one of ``marks``: those of the GEMM ops, or those in ``scope``."""
        for path, data in sorted(self.texts.items()):
            if not (scope or _is_gemm)(path) or not any(mark in data for mark in marks):
                continue
            if path not in self.parsed:
                try:
                    self.parsed[path] = _Parsed(data)
                except (SyntaxError, ValueError, RecursionError) as error:
                    self.problems.append(f"{path}: does not parse: {error}")
                    continue
            yield path, self.parsed[path]

    def check_modules(self) -> None:
        self.check_growth()
        self.check_cache()
        self.check_plan_builds()
        self.check_lanes()
        self.check_retries()
        self.check_executions()
        self.check_default_size()
        self.check_gate()
        self.check_prepared()
        self.check_imports()

    def check_growth(self) -> None:
        left = outside = 0
        for path, module in self.modules(b"resize_", scope=_is_package):
            for call in module.calls("resize_"):
                if path.startswith("flashinfer/experimental/"):
                    outside += 1
                else:
                    left += 1
                    self.problems.append(f"{path}:{call.lineno}: grows with resize_()")
        self.prove(SITES_LEFT, left, f"out of scope, in experimental/: {outside}")

    def check_cache(self) -> None:
        """The shared cache keeps what it outgrows, and knows the names of lanes."""
        wanted = {"_get_cache_buf": "cache_buffer", "_get_stream_cache_buf": "reserve_lane"}
        handed = 0
        for path, module in self.modules(b"_cache_buf", scope=UTILS.__eq__):
            for function in module.functions:
                hook = wanted.get(function.name)
                if hook and not module.calls(hook, within=function):
                    self.problems.append(f"{path}:{function.lineno}: drops what it outgrows")
                handed += hook is not None
        if not handed:
            self.problems.append(f"{UTILS}: has no _get_cache_buf")
        self.prove("buffer caches that keep what they outgrow", handed)

    def check_plan_builds(self) -> None:
        finisher = "_finalize_cudnn_graph_for_tactic"
        builds = ("build_plans", "build_plan_at_index")
        guarded = handles = 0
        outside = sum(
            len(module.calls(*builds))
            for path, module in self.modules(b".build_plan", scope=_is_package)
            if not _is_gemm(path)
        )
        for path, module in self.modules(b"build_plan", b"create_handle", finisher.encode()):
            for function, calls in module.callers(*builds, finisher):
                if function is not None and function.name == finisher:
                    continue
                guarded += 1
                if function is None or _decorators(function)[-1:] != ["guard_plan_build"]:
                    self.problems.append(f"{path}:{calls[0].lineno}: builds plans unguarded")
            for call in module.calls("create_handle"):
                self.problems.append(f"{path}:{call.lineno}: creates a handle unguarded")
            handles += len(module.calls("create_cudnn_handle"))
        if not guarded or not handles:
            self.problems.append(f"{guarded} guarded plan builders and {handles} handle creations")
        self.prove(
            "plan builders behind the guard",
            guarded,
            f"out of scope, in attention and experimental/: {outside}",
        )
        self.prove("handle creations behind the guard", handles)

    def check_lanes(self) -> None:
        names = self.lane_names()
        taken = 0
        for path, module in self.modules(b"_cache_buf", b"lane_workspace", scope=_has_lanes):
            if path in NO_LANES:
                continue
            for call in module.calls("_get_cache_buf", "_get_stream_cache_buf"):
                if not (call.args and _constant(call.args[0]) in NO_LANES):
                    self.problems.append(f"{path}:{call.lineno}: workspace from the shared cache")
            for call in module.calls("lane_workspace"):
                taken += 1
                if not call.args or _constant(call.args[0]) not in names:
                    self.problems.append(f"{path}:{call.lineno}: a lane the runtime lacks")
        if not taken:
            self.problems.append("no workspace is taken from a lane")
        self.prove("workspaces taken from a lane", taken)

    def lane_names(self) -> set[str]:
        """The lanes that the runtime knows."""
        names: object = None
        for _, module in self.modules(b"LANE_NAMES", scope=LANE_NAMES.__eq__):
            for node in module.tree.body:
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LANE_NAMES":
                    names = _value_of(node.value)
        if not isinstance(names, frozenset):
            self.problems.append(f"{LANE_NAMES}: LANE_NAMES is not a set of names")
            return set()
        return {name for name in names if isinstance(name, str)}

    def check_retries(self) -> None:
        passed = 0
        for path, module in self.modules(b"tactic=-1"):
            for node in module.tries:
                caught: list[str] = []
                for handler in node.handlers:
                    kind = "" if handler.type is None else ast.unparse(handler.type)
                    broad = kind in ("", "Exception", "BaseException")
                    if broad and "tactic=-1" in ast.unparse(handler):
                        if "CudnnCaptureUnsafeError" in caught:
                            passed += 1
                        else:
                            where = f"{path}:{handler.lineno}"
                            self.problems.append(f"{where}: retry swallows capture errors")
                    caught.append(kind)
        self.prove("retries that let a capture error through", passed)

    def check_executions(self) -> None:
        held = 0
        for path, module in self.modules(b".execute"):
            for function, calls in module.callers("execute", "execute_plan_at_index"):
                runs = [c for c in calls if any(k.arg == "handle" for k in c.keywords)]
                if not runs:
                    continue
                held += 1
                where = f"{path}:{runs[0].lineno}: execution"
                if function is None or "device_locked" not in _decorators(function):
                    self.problems.append(f"{where} without the device's lock")
                hold = module.calls("_retain_cudnn_graph_if_capturing", within=function)
                if not hold or hold[0].lineno > min(call.lineno for call in runs):
                    self.problems.append(f"{where} of a plan that is not held")
        if not held:
            self.problems.append("no function executes a cuDNN plan")
        self.prove("executions that hold their plan, under the device's lock", held)
        self.check_handles()

    def check_handles(self) -> None:
        """The handle is shared: whoever fetches it, and so sets its stream, has the lock."""
        getters = ("_get_cudnn_handle", "_get_handle")
        locked = 0
        for path, module in self.modules(*(getter.encode() for getter in getters)):
            for function, calls in module.callers(*getters):
                if function is not None and function.name in getters:
                    continue
                found = set() if function is None else set(_decorators(function))
                if found & {"device_locked", "guard_plan_build"}:
                    locked += 1
                else:
                    where = f"{path}:{calls[0].lineno}"
                    self.problems.append(f"{where}: uses the shared handle without the lock")
        self.prove("users of the shared handle, under the device's lock", locked)

    def check_default_size(self) -> None:
        sizes = []
        for path, module in self.modules(b"DEFAULT_WORKSPACE_SIZE"):
            for node in module.tree.body:
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == (
                    "DEFAULT_WORKSPACE_SIZE"
                ):
                    size = _value_of(node.value)
                    sizes.append(size)
                    if size != 40 * MIB:
                        self.problems.append(f"{path}:{node.lineno}: default of {size} bytes")
        if not sizes:
            self.problems.append("DEFAULT_WORKSPACE_SIZE is nowhere defined")
        self.prove("modules with a default workspace of 40 MiB", len(sizes))

    def check_gate(self) -> None:
        gated = {
            function.name
            for _, module in self.modules(b"gate_sm12x_cudnn")
            for function, _ in module.callers("gate_sm12x_cudnn")
            if function is not None
        }
        wanted = {"_heuristic_func_bmm_fp8", "fp8_gemm_sm100"}
        if gated != wanted:
            self.problems.append(f"the SM12x gate is in {sorted(gated)}, not {sorted(wanted)}")
        self.prove("functions with the SM12x gate", len(gated))

    def check_prepared(self) -> None:
        """Ops are prepared outside of all else; what a prepared launch repeats is noted."""
        ops: list[str] = []
        watched = 0
        for path, module in self.modules(b"", scope=HOME.__eq__):
            for node in module.tree.body:
                if isinstance(node, _Function) and node.name in PREPARED:
                    ops.append(node.name)
                    if _decorators(node)[:1] != ["prepared_launches"]:
                        self.problems.append(f"{path}:{node.lineno}: {node.name} is not prepared")
            for call in module.calls("execute", "execute_plan_at_index"):
                if any(keyword.arg == "handle" for keyword in call.keywords):
                    watched += 1
                    if not ast.unparse(call.func).startswith("watched("):
                        self.problems.append(f"{path}:{call.lineno}: a launch that is not noted")
        if sorted(ops) != sorted(PREPARED):
            self.problems.append(f"the public ops are {sorted(ops)}, not {sorted(PREPARED)}")
        self.prove("ops that are prepared", len(ops))
        self.prove("executions of theirs that are noted", watched)
        noted = 0
        for _, module in self.modules(b"class TunableRunner", scope=TUNERS.__contains__):
            for function in module.functions:
                noted += "noted_runner" in _decorators(function)
        if noted != 1:
            self.problems.append(f"{noted} runners' calls are noted, wanted the base class's alone")
        self.prove("base classes of runners whose calls are noted", noted)

    def check_imports(self) -> None:
        """Every hook that a module calls is a name that it imports."""
        marks = [hook.encode() for hook in HOOKS]
        imported = 0
        for path, module in self.modules(*marks, scope=_is_package):
            imported += 1
            for hook in set(HOOKS) & (module.used - module.imported):
                self.problems.append(f"{path}: uses {hook} without importing it")
        home = self.parsed.get(HOME)
        ours = {
            alias.name
            for node in (home.tree.body if home else [])
            if isinstance(node, ast.ImportFrom) and node.module == "gemm_workspace"
            for alias in node.names
        }
        for name in (
            "_gemm_workspace_at_least",
            "CudnnCaptureUnsafeError",
            "CudnnWorkspaceTooSmallInCaptureError",
            "CudnnPlanBuildInCaptureError",
        ):
            if name not in ours:
                self.problems.append(f"{HOME} does not give the fork's {name}")
        self.prove("modules that import every hook they use", imported)


def _linked(data: bytes) -> list[bytes]:
    """The libraries that an ELF file links, as the loader sees it: by its program headers."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("no 64-bit ELF file")
    (start,), (size, count) = (
        struct.unpack_from("<Q", data, 0x20),
        struct.unpack_from("<HH", data, 0x36),
    )
    # Of each segment: type, offset, address, length in the file.
    segments = [
        (kind, offset, address, length)
        for kind, _, offset, address, _, length, _, _ in (
            struct.unpack_from("<IIQQQQQQ", data, start + i * size) for i in range(count)
        )
    ]
    entries: list[tuple[int, int]] = []
    for kind, offset, _, length in segments:
        if kind == 2:  # dynamic
            entries += struct.iter_unpack("<QQ", data[offset : offset + length])
    (strings,) = (value for tag, value in entries if tag == 5)
    (place,) = (
        offset + strings - address
        for kind, offset, address, length in segments
        if kind == 1 and address <= strings < address + length
    )
    return [
        data[place + value : data.index(b"\0", place + value)] for tag, value in entries if tag == 1
    ]


def _b64(hexdigest: str) -> str:
    return base64.urlsafe_b64encode(bytes.fromhex(hexdigest)).rstrip(b"=").decode()


def _is_gemm(path: str) -> bool:
    return path.startswith(("flashinfer/gemm/", "flashinfer/grouped_mm/"))


def _has_lanes(path: str) -> bool:
    return _is_gemm(path) or path == "flashinfer/trtllm_low_latency_gemm.py"


def _is_package(path: str) -> bool:
    """Modules of the package, the sources for the compiler and the runtime left out."""
    return path.endswith(".py") and not path.startswith(
        ("flashinfer/data/", "flashinfer/gemm_workspace/")
    )


def _constant(node: ast.expr) -> object:
    return node.value if isinstance(node, ast.Constant) else None


#: What a constant is made of: nothing here can call or look into anything but ``frozenset``.
_PLAIN = (
    *(ast.Constant, ast.Tuple, ast.Set, ast.BinOp, ast.Mult, ast.BitOr, ast.Call, ast.Name),
    *(ast.SetComp, ast.comprehension, ast.JoinedStr, ast.FormattedValue, ast.Load, ast.Store),
)


def _value_of(node: ast.expr) -> object:
    """Value of a constant expression; None for one that would run code of the wheel's."""
    if not all(isinstance(part, _PLAIN) for part in ast.walk(node)):
        return None
    scope = {"__builtins__": {}, "frozenset": frozenset}
    try:
        return eval(compile(ast.Expression(node), "<constant>", "eval"), scope)
    except Exception:
        return None


def _decorators(function: _Function) -> list[str]:
    return [ast.unparse(decorator) for decorator in function.decorator_list]
