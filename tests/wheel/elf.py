"""A shared library in the least bytes that the build and the verifier look at."""

from __future__ import annotations

import struct
from collections.abc import Iterable

EXPORTED = ("__tvm_ffi_abi", "__tvm_ffi_call")
LINKED = ("libtvm_ffi.so", "libstdc++.so.6", "libc.so.6")
VERSIONS = ("GLIBC_2.2.5", "GLIBC_2.28", "GLIBCXX_3.4.21", "CXXABI_1.3", "GCC_3.0")


def library(
    linked: Iterable[str] = LINKED,
    exported: Iterable[str] = EXPORTED,
    versions: Iterable[str] = VERSIONS,
    runpath: str | None = None,
    machine: int = 62,
    extra: bytes = b"",
) -> bytes:
    """Header, one loaded segment that is the whole file, and the four dynamic sections."""
    texts = bytearray(b"\0")

    def text(value: str) -> int:
        at = len(texts)
        texts.extend(value.encode() + b"\0")
        return at

    symbols = struct.pack("<IBBHQQ", 0, 0, 0, 0, 0, 0)
    symbols += struct.pack("<IBBHQQ", text("malloc"), 0x12, 0, 0, 0, 0)  # from elsewhere
    for name in exported:
        symbols += struct.pack("<IBBHQQ", text(name), 0x12, 0, 7, 0x1000, 16)
    names = list(versions)
    needs = struct.pack("<HHIII", 1, len(names), text("libc.so.6"), 16, 0)
    for i, name in enumerate(names):
        needs += struct.pack("<IHHII", 0, 0, i + 2, text(name), 16 if i + 1 < len(names) else 0)
    entries = [(1, text(name)) for name in linked]
    if runpath is not None:
        entries.append((29, text(runpath)))
    start = 64 + 2 * 56
    at_symbols = start + len(texts)
    at_needs = at_symbols + len(symbols)
    at_entries = at_needs + len(needs)
    entries += [(5, start), (0, 0)]
    dynamic = b"".join(struct.pack("<QQ", *entry) for entry in entries)
    at_sections = at_entries + len(dynamic)
    sections = [
        (0, 0, 0, 0),
        (3, start, len(texts), 0),
        (11, at_symbols, len(symbols), 1),
        (0x6FFFFFFE, at_needs, len(needs), 1),
        (6, at_entries, len(dynamic), 1),
    ]
    headers = b"".join(
        struct.pack("<IIQQQQIIQQ", 0, kind, 0, offset, offset, length, link, 0, 1, 0)
        for kind, offset, length, link in sections
    )
    total = at_sections + len(headers) + len(extra)
    segments = struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, total, total, 1)
    segments += struct.pack(
        "<IIQQQQQQ", 2, 6, at_entries, at_entries, at_entries, len(dynamic), len(dynamic), 8
    )
    header = struct.pack(
        "<16sHHIQQQIHHHHHH",
        b"\x7fELF\x02\x01\x01" + bytes(9),
        *(3, machine, 1, 0, 64, at_sections, 0),
        *(64, 56, 2, 64, len(sections), 1),
    )
    return header + segments + bytes(texts) + symbols + needs + dynamic + headers + extra
