"""What an edit is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..module import Found, Module


@dataclass(frozen=True)
class Edit:
    """A located change: why it is made, where it may look, and how it finds its sites.

    ``find(module, own_lengths)`` gets the workspace names that keep the release's own length
    (see :data:`graft.releases.Family.own_lengths`).
    """

    name: str
    summary: str
    #: Rows of the hazard list that it closes.
    hazards: tuple[str, ...]
    #: The upstream change it corresponds to, and the first release that has that.
    upstream: str
    #: True for a path in the wheel that the edit looks at.
    in_scope: Callable[[str], bool]
    #: A file without any of these bytes has no site; it is not even parsed.
    marks: tuple[bytes, ...]
    find: Callable[[Module, frozenset[str]], Found]

    def wants(self, path: str, data: bytes) -> bool:
        """True if the file may have a site."""
        return self.in_scope(path) and any(mark in data for mark in self.marks)


def in_gemm(path: str) -> bool:
    """Modules with the dense and the grouped GEMM ops."""
    return path.endswith(".py") and path.startswith(("flashinfer/gemm/", "flashinfer/grouped_mm/"))


def in_gemm_or_low_latency(path: str) -> bool:
    """The GEMM modules and the low-latency one, which lives beside them."""
    return in_gemm(path) or path == "flashinfer/trtllm_low_latency_gemm.py"
