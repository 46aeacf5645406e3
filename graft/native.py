"""The native launch as a file of the wheel: what it asks of a system, and the tag that says so.

Read from the file itself: an ELF shared library for x86-64 Linux that exports what the runtime
calls, links nothing but the C and C++ runtimes and tvm-ffi (which FlashInfer depends on and has
loaded), and asks for a glibc that a manylinux tag can name.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .errors import GraftError

#: Its path in the wheel.
PATH = "flashinfer/gemm_workspace/_native.so"
#: What it may link. CUDA's libraries are looked for in the process at run time instead.
LINKED = frozenset(
    {
        "libtvm_ffi.so",
        *("libstdc++.so.6", "libgcc_s.so.1"),
        *("libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "ld-linux-x86-64.so.2"),
    }
)
#: Where Python looks for functions of a module of tvm-ffi.
PREFIX, MUST_EXPORT = "__tvm_ffi_", "__tvm_ffi_abi"
#: The newest symbol versions of GCC's runtimes that a system with a glibc 2.x has, as the
#: manylinux policies list them (auditwheel, manylinux-policy.json): x -> GLIBCXX, CXXABI.
RUNTIMES = {
    17: ((3, 4, 19), (1, 3, 7)),
    24: ((3, 4, 22), (1, 3, 10)),
    27: ((3, 4, 24), (1, 3, 11)),
    31: ((3, 4, 28), (1, 3, 12)),
    34: ((3, 4, 29), (1, 3, 13)),
    35: ((3, 4, 30), (1, 3, 13)),
}

_DT_NEEDED, _DT_RPATH, _DT_RUNPATH = 1, 15, 29
_SHT_DYNAMIC, _SHT_DYNSYM, _SHT_VERNEED = 6, 11, 0x6FFFFFFE


@dataclass(frozen=True)
class Native:
    """A checked file. ``sources``: one hash over what this checkout builds it from."""

    data: bytes
    platform: str
    sources: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def tag(self) -> str:
        """Of the wheel that holds it."""
        return f"py3-none-{self.platform}"


def read(path: Path, root: Path) -> Native:
    """Check the file at ``path``, built from the checkout ``root``. Raises GraftError."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise GraftError(f"{path}: {error.strerror}; build it with `make native`") from None
    try:
        elf = _Elf(data)
        linked, paths = elf.linked()
        needed, exported = elf.versions(), elf.exported()
    except (struct.error, ValueError, IndexError, OverflowError) as error:
        raise GraftError(f"{path}: not a shared library for x86-64 Linux ({error})") from None
    problems = [f"links {name}" for name in linked if name not in LINKED]
    problems += [f"looks for libraries in {each!r}" for each in paths]
    problems += [f"exports {name}" for name in exported if not name.startswith(PREFIX)]
    if MUST_EXPORT not in exported:
        problems.append(f"does not export {MUST_EXPORT}")
    if problems:
        raise GraftError(f"{path}: not the native launch, or not one to ship", problems)
    return Native(data, platform(needed), sources(root))


def platform(versions: set[str]) -> str:
    """The platform tag of a file that asks for these symbol versions.

    >>> platform({"GLIBC_2.2.5", "GLIBC_2.28", "GLIBCXX_3.4.21", "GCC_3.0"})
    'manylinux_2_28_x86_64'
    """
    most: dict[str, tuple[int, ...]] = {}
    for version in versions:
        name, _, number = version.partition("_")
        if not number.replace(".", "").isdigit():
            raise GraftError(f"asks for {version}, which no manylinux tag stands for")
        parts = tuple(int(part) for part in number.split("."))
        most[name] = max(most.get(name, ()), parts)
    for name in most.keys() - {"GLIBC", "GLIBCXX", "CXXABI", "GCC"}:
        raise GraftError(f"asks for a version of {name}, which no manylinux tag stands for")
    glibc = most.get("GLIBC", (2, 0))
    if glibc[0] != 2:
        raise GraftError(f"asks for glibc {glibc}, wanted a 2.x")
    for least, (glibcxx, cxxabi) in RUNTIMES.items():
        if most.get("GLIBCXX", ()) <= glibcxx and most.get("CXXABI", ()) <= cxxabi:
            return f"manylinux_2_{max(glibc[1], least)}_x86_64"
    raise GraftError(f"asks for a newer C++ runtime than any known here: {most}")


def sources(root: Path) -> str:
    """One hash over the files that the library is built from."""
    paths = [
        *sorted(root.glob("csrc/*")),
        root / "CMakeLists.txt",
        root / "requirements/native.txt",
    ]
    files = [path for path in paths if path.is_file()]
    lines = (
        f"{path.relative_to(root).as_posix()} {hashlib.sha256(path.read_bytes()).hexdigest()}\n"
        for path in files
    )
    return hashlib.sha256("".join(lines).encode()).hexdigest()


class _Elf:
    """The dynamic part of a 64-bit little-endian ELF file, as its section headers show it."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        magic, kind, machine = struct.unpack_from("<16sHH", data)
        if magic[:6] != b"\x7fELF\x02\x01" or kind != 3 or machine != 62:
            raise ValueError("wrong magic, type or machine")
        (start,) = struct.unpack_from("<Q", data, 0x28)
        size, count = struct.unpack_from("<HH", data, 0x3A)
        # Of each section: type, offset, size, link.
        self._sections: list[tuple[int, int, int, int]] = []
        for i in range(count):
            at = start + i * size
            (kind,) = struct.unpack_from("<I", data, at + 4)
            offset, length, link = struct.unpack_from("<QQI", data, at + 0x18)
            self._sections.append((kind, offset, length, link))

    def _section(self, kind: int) -> tuple[int, int, int]:
        for each, offset, length, link in self._sections:
            if each == kind:
                return offset, length, self._sections[link][1]
        raise ValueError(f"no section of type {kind:#x}")

    def _text(self, at: int) -> str:
        return self._data[at : self._data.index(b"\0", at)].decode()

    def linked(self) -> tuple[list[str], list[str]]:
        """The libraries that it links, and where it would look for them."""
        offset, length, strings = self._section(_SHT_DYNAMIC)
        linked, paths = [], []
        for tag, value in struct.iter_unpack("<QQ", self._data[offset : offset + length]):
            if tag == _DT_NEEDED:
                linked.append(self._text(strings + value))
            elif tag in (_DT_RPATH, _DT_RUNPATH):
                paths.append(self._text(strings + value))
        return linked, paths

    def exported(self) -> set[str]:
        """Names that others see."""
        offset, length, strings = self._section(_SHT_DYNSYM)
        symbols = struct.iter_unpack("<IBBHQQ", self._data[offset : offset + length])
        return {self._text(strings + name) for name, _, _, section, _, _ in symbols if section}

    def versions(self) -> set[str]:
        """Symbol versions that it asks of what it links: ``GLIBC_2.34``."""
        return set(self._needs())

    def _needs(self) -> Iterator[str]:
        offset, _, strings = self._section(_SHT_VERNEED)
        while True:
            _, count, _, first, following = struct.unpack_from("<HHIII", self._data, offset)
            at = offset + first
            for left in range(count, 0, -1):
                _, _, _, name, step = struct.unpack_from("<IHHII", self._data, at)
                yield self._text(strings + name)
                if not step and left > 1:
                    raise ValueError("a list of versions that ends early")
                at += step
            if not following:
                return
            offset += following
