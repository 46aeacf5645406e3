"""Which releases of flashinfer-python have which defect. The build's own table is not shipped;
a test holds the two together."""

from __future__ import annotations

import re

#: ``resize_()`` moves the workspace under captured graphs.
AFFECTED = frozenset(
    {
        *("0.6.12", "0.6.13", "0.6.14", "0.6.15", "0.6.15.post1"),
        *("0.6.16", "0.6.16.post1", "0.6.16.post2", "0.6.16.post3", "0.6.16.post4"),
        *("0.6.17", "0.6.18", "0.6.18.post1"),
    }
)
#: The workspace does not move, but a captured graph's plans are not kept.
PLANS_NOT_KEPT = frozenset({"0.7.0", "0.7.0.post1", "0.7.1"})
#: The workspace does not move and plans are kept for ever.
FIXED = frozenset({"0.7.2", "0.7.2.post1", "0.7.4"})
KNOWN = AFFECTED | PLANS_NOT_KEPT | FIXED

FIRST_AFFECTED = (0, 6, 12)
#: From here on the release itself leaves cuDNN out of ``bmm_fp8`` auto on old cuDNN and SM12x.
FIRST_GATED = (0, 6, 18)
#: The first release whose override shape needs cuDNN 9.23.1, and whose autotuner does not load
#: cuDNN entries with a plain plan index any more.
FIRST_OVERRIDE_9_23_1 = (0, 6, 16)

#: Backend version of the gate: cuDNN 9.23.1.
GATE_BACKEND = 92301


def numbers(version: str) -> tuple[int, ...] | None:
    """Release numbers of a final version, without post and local parts; None for another.

    >>> numbers("0.6.16.post3+ws.1"), numbers("0.6.12rc1"), numbers("main")
    ((0, 6, 16), None, None)
    """
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9}){1,5})(?:\.post\d+)?(?:\+.*)?", version, re.ASCII)
    return tuple(int(part) for part in found[1].split(".")) if found else None


def is_older_shape(release: str) -> bool:
    """Whether ``release`` is from before the defect: its workspaces are made for each call."""
    parsed = numbers(release)
    return parsed is not None and parsed < FIRST_AFFECTED


def has_gate(release: str) -> bool | None:
    """Whether ``release`` has a gate of its own; None where that is not known."""
    parsed = numbers(release)
    if parsed is None:
        return None
    return parsed >= FIRST_GATED


def override_shape(release: str, backend: int, frontend: str) -> bool | None:
    """Whether ``release`` runs one cuDNN plan over many shapes; None where not known.

    From 0.6.16 that needs backend 92301. Before, 92100 and frontend 1.20 (1.24 if the backend
    is 92300 or later). Read in the releases.
    """
    parsed = numbers(release)
    if parsed is None:
        return None
    if parsed >= FIRST_OVERRIDE_9_23_1:
        return backend >= GATE_BACKEND
    have = re.match(r"(\d{1,9})\.(\d{1,9})", frontend, re.ASCII)
    if have is None:
        return None
    wanted = (1, 24) if backend >= 92300 else (1, 20)
    return backend >= 92100 and (int(have[1]), int(have[2])) >= wanted
