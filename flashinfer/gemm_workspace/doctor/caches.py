"""What a cache of the autotuner means in this environment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from . import releases
from .autotune import Cache, Entry
from .facts import Facts, Missing
from .findings import Finding, Level
from .gate import gate

# The runners that the gate removes, by op.
GATED = {"fp8_gemm": "CudnnFp8GemmRunner"}


def removed_by_gate(entry: Entry) -> bool:
    """Whether an active gate takes away the runner of this entry."""
    return GATED.get(entry.op) == entry.runner


def inert(cache: Cache) -> tuple[list[Entry], list[Entry]]:
    """Entries that an active gate makes inert, and those of them that nothing else serves."""
    gone = [entry for entry in cache.entries if removed_by_gate(entry)]
    served = {(e.op, e.shapes) for e in cache.entries if not removed_by_gate(e)}
    return gone, [entry for entry in gone if (entry.op, entry.shapes) not in served]


def plain_indices(facts: Facts, cache: Cache) -> int:
    """Entries that this release does not load: cuDNN's with a bare plan index, from 0.6.16 on."""
    flashinfer = facts.flashinfer
    release = None if isinstance(flashinfer, Missing) else flashinfer.release
    parsed = releases.numbers(release) if release else None
    if parsed is None or parsed < releases.FIRST_OVERRIDE_9_23_1:
        return 0
    return sum(entry.plain_index and entry.runner.startswith("Cudnn") for entry in cache.entries)


def mismatches(facts: Facts, cache: Cache) -> dict[str, tuple[str | None, str]]:
    """What the file says of its environment and this one does not: key -> (file, here).

    Only what is known here is compared; ``*`` in a file fits anything.
    """
    if cache.metadata is None or isinstance(facts.metadata, Missing):
        return {}
    return {
        key: (cache.metadata.get(key), here)
        for key, here in facts.metadata.items()
        if cache.metadata.get(key) not in (here, "*")
    }


def winners(cache: Cache, m: int | None = None) -> dict[str, Counter[str]]:
    """How many shapes each runner won, by op; of all shapes, or of those with ``m`` rows."""
    found: dict[str, Counter[str]] = {}
    for entry in cache.entries:
        if m is None or (entry.m == m and entry.op.endswith("_gemm")):
            found.setdefault(entry.op, Counter())[entry.runner] += 1
    return found


def is_of_another_release(facts: Facts, cache: Cache) -> bool:
    """Whether ``cache`` says that another release wrote it, which never loads here."""
    return "flashinfer_version" in mismatches(facts, cache)


_FRESH = (
    "let the server tune again into a fresh folder (vLLM: VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR, "
    "SGLang: SGLANG_CACHE_DIR)"
)


def of_cache(facts: Facts, cache: Cache | Missing) -> Iterator[Finding]:
    if isinstance(cache, Missing):
        yield Finding(
            "cache-unreadable", Level.UNKNOWN, f"a cache cannot be read: {cache.reason}.", _FRESH
        )
        return
    if cache.odd:
        yield Finding(
            "cache-odd",
            Level.ADVICE,
            f"{cache.path}: {cache.odd} entries are not understood, the first is "
            f"{cache.odd_example!r}: edited, or from a version that is not known here.",
            _FRESH,
        )
    unlike = mismatches(facts, cache)
    if unlike:
        listed = ", ".join(f"{key} {old}, here {new}" for key, (old, new) in unlike.items())
        yield Finding(
            "cache-environment",
            Level.ADVICE,
            f"{cache.path} was written in another environment ({listed}): FlashInfer ignores it, "
            "and as a rule saves nothing to it.",
            _FRESH,
        )
    plain = plain_indices(facts, cache)
    if plain:
        yield Finding(
            "cache-plain-index",
            Level.ADVICE,
            f"{cache.path}: {plain} entries of cuDNN runners hold a bare plan index, which this "
            "release does not load.",
            _FRESH,
        )
    gone, default = inert(cache)
    if gone and not unlike and gate(facts).active:
        yield Finding(
            "cache-inert",
            Level.ADVICE,
            f"{cache.path}: the gate removes the runner of {len(gone)} entries, so they do "
            f"nothing, and {len(default)} of their shapes fall to the untuned default.",
            _FRESH,
        )
