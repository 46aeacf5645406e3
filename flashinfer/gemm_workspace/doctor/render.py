"""The report, as text for a terminal and as plain data for JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

from .autotune import Cache
from .buckets import Tokens
from .caches import GATED, inert, mismatches, plain_indices, removed_by_gate, winners
from .facts import Facts, Fork, Missing, backend_words
from .findings import Finding, Level, status
from .gate import fork_is_active, gate, gpus_words, override_shape
from .judge import version_matches
from .logs import Log
from .switches import SWITCHES

VERDICTS = {0: "healthy", 1: "affected", 2: "could not tell"}

_NOTHING = "nothing"


def headline(facts: Facts, findings: Sequence[Finding]) -> tuple[str, str]:
    """The verdict in a sentence, and the one thing to do."""
    verdict = VERDICTS[status(findings)]
    do = next((finding.do for finding in findings if finding.do), _NOTHING)
    decisive = [finding for finding in findings if finding.level is not Level.ADVICE]
    if decisive:
        return f"{verdict}: {decisive[0].what}", do
    unknown = [
        name
        for name, fact in (("GPUs", facts.gpus), ("driver", facts.driver), ("cuDNN", facts.cudnn))
        if isinstance(fact, Missing)
    ]
    though = f" (not known: {', '.join(unknown)})" if unknown else ""
    return f"{verdict}: no defect that this doctor knows{though}.", do


def as_data(
    facts: Facts,
    caches: Sequence[Cache | Missing],
    logs: Sequence[Log | Missing],
    tokens: Sequence[Tokens],
    findings: Sequence[Finding],
) -> dict[str, Any]:
    """Plain data. A missing fact is ``{"missing": reason}``."""
    _, do = headline(facts, findings)
    found = gate(facts)
    return {
        "verdict": VERDICTS[status(findings)],
        "status": status(findings),
        "do": do,
        "findings": _plain(findings),
        "facts": {
            **_plain(facts),
            "fork_active": fork_is_active(facts),
            "gate": {"active": found.active, "why": found.why},
            "override_shape": override_shape(facts)[0],
        },
        "autotune_caches": [
            _plain(cache) if isinstance(cache, Missing) else _cache_data(facts, cache, tokens)
            for cache in caches
        ],
        "logs": _plain(logs),
        "tokens": [{"tokens": str(asked), "buckets": asked.buckets()} for asked in tokens],
    }


def _plain(value: Any) -> Any:
    match value:
        case Missing():
            return {"missing": value.reason}
        case Enum():
            return value.value
        case _ if dataclasses.is_dataclass(value):
            fields = dataclasses.fields(value)
            return {field.name: _plain(getattr(value, field.name)) for field in fields}
        case Mapping():
            return {str(key): _plain(each) for key, each in value.items()}
        case tuple() | list():
            return [_plain(each) for each in value]
        case _:
            return value


def _cache_data(facts: Facts, cache: Cache, tokens: Sequence[Tokens]) -> dict[str, Any]:
    gone, default = inert(cache)
    active = gate(facts).active
    return {
        "path": cache.path,
        "metadata": None if cache.metadata is None else dict(cache.metadata),
        "mismatches": {
            key: {"file": old, "here": new} for key, (old, new) in mismatches(facts, cache).items()
        },
        "entries": len(cache.entries),
        "not_understood": cache.odd,
        "not_loaded_plain_index": plain_indices(facts, cache),
        "gate_active": active,
        "inert": len(gone) if active else 0,
        "shapes_left_untuned": len(default) if active else 0,
        "won": {op: dict(won) for op, won in winners(cache).items()},
        "tokens": [
            {"tokens": str(asked), "m": m, "won": {op: dict(won) for op, won in at.items()}}
            for asked in tokens
            for m, at in ((m, winners(cache, m)) for m in asked.buckets())
        ],
    }


# Text -------------------------------------------------------------------------------------------


def as_text(
    facts: Facts,
    caches: Sequence[Cache | Missing],
    logs: Sequence[Log | Missing],
    tokens: Sequence[Tokens],
    findings: Sequence[Finding],
) -> str:
    """For people, the answer first."""
    verdict, do = headline(facts, findings)
    label = "do this" if status(findings) or do == _NOTHING else "worth doing"
    lines = [verdict, "", f"{label}: {do}"]
    if findings:
        lines += ["", "findings"]
        for finding in findings:
            lines.append(f"  [{finding.level.value}] {finding.what}")
            if finding.do:
                lines.append(f"      -> {finding.do}")
    lines += ["", "facts"]
    lines += [f"  {name:22} {text}" for name, text in _fact_lines(facts)]
    for cache in caches:
        lines += _cache_lines(facts, cache, tokens)
    if tokens and not caches:
        lines += ["", "tokens (no autotune cache was found; name one with --autotune-cache)"]
        lines += [f"  {asked} tokens: M = {m}" for asked in tokens for m in asked.buckets()]
    for log in logs:
        lines += _log_lines(log)
    return "\n".join(map(printable, lines))


def printable(text: str) -> str:
    """``text`` without what a terminal would act on: logs and cache files are others' writing.

    >>> printable("a\\x1b[31mb\\n")
    'a\\\\x1b[31mb\\\\n'
    """
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def _words(fact: Any) -> str:
    return f"missing: {fact.reason}" if isinstance(fact, Missing) else str(fact)


def _fact_lines(facts: Facts) -> Iterator[tuple[str, str]]:
    yield "looked at", facts.image or "this environment"
    yield "GPUs", gpus_words(facts)
    yield "driver", _words(facts.driver)
    yield "CUDA of the driver", _words(facts.driver_cuda)
    yield "torch", _words(facts.torch)
    yield "CUDA of torch", _words(facts.torch_cuda)
    yield "cuDNN, packaged" if facts.image else "cuDNN, loaded", _cudnn_words(facts.cudnn)
    if facts.cudnn_of_torch != facts.cudnn:
        yield "cuDNN, of torch", _cudnn_words(facts.cudnn_of_torch)
    if not isinstance(facts.cudnn_mapped, Missing):
        for path in facts.cudnn_mapped:
            if "libcudnn.so" in path:
                yield "cuDNN, mapped", path
    if isinstance(facts.cudnn_found, Missing):
        yield "cuDNN, found", _words(facts.cudnn_found)
    else:
        for library in facts.cudnn_found:
            yield "cuDNN, found", f"{library.path}: {_words(library.version)}"
    yield "cudnn-frontend", _words(facts.cudnn_frontend)
    yield "cuda-bindings", _words(facts.cuda_bindings)
    yield from _flashinfer_lines(facts)
    found = gate(facts)
    answer = {True: "active", False: "not active", None: "not known"}
    yield "gate of bmm_fp8", f"{answer[found.active]}: {found.why}"
    usable, why = override_shape(facts)
    known = {True: "available", False: "not available", None: "not known"}
    yield "override shape", f"{known[usable]}: {why}"
    yield "capture policy", _capture_words(facts)
    if isinstance(facts.jit, Missing):
        yield "compiled ops", _words(facts.jit)
    else:
        yield (
            "compiled ops",
            f"{facts.jit.compiled} in {facts.jit.folder}, {facts.jit.older} older than the "
            f"sources; nvcc: {facts.jit.nvcc or 'missing'}",
        )
    if not isinstance(facts.engines, Missing):
        for name, version in facts.engines.items():
            yield name, version
    for name, value in facts.environment.items():
        yield "set", f"{name}={value}"


def _cudnn_words(version: int | Missing) -> str:
    return _words(version) if isinstance(version, Missing) else backend_words(version)


def _flashinfer_lines(facts: Facts) -> Iterator[tuple[str, str]]:
    flashinfer = facts.flashinfer
    if isinstance(flashinfer, Missing):
        yield "FlashInfer", _words(flashinfer)
        own = None
    else:
        yield "FlashInfer", f"{_words(flashinfer.version)} in {flashinfer.folder}"
        own = flashinfer.own_version
        yield "flashinfer.__version__", _words(own)
        yield "fork", _fork_words(flashinfer.fork)
        error = facts.import_error
        yield "import flashinfer", "works" if error is None else _words(error)
    equal = version_matches(facts, own) if isinstance(own, str) else {}
    for name, version in (
        ("flashinfer-cubin", facts.cubin),
        ("flashinfer-jit-cache", facts.jit_cache),
    ):
        note = {True: ", matches", False: ", does not match"}.get(equal.get(name), "")  # type: ignore[arg-type]
        yield name, _words(version) + note


def _fork_words(fork: Fork | Missing | None) -> str:
    if fork is None:
        return "not installed"
    if isinstance(fork, Missing):
        return _words(fork)
    edits = ", ".join(f"{name} {count}" for name, count in fork.edits.items() if count)
    return (
        f"{'active' if fork.whole else 'damaged'}, {fork.label} over {fork.base}; edits with their "
        f"sites: {edits or 'none'}"
    )


def _capture_words(facts: Facts) -> str:
    if not fork_is_active(facts):
        return "the release's (the fork is not active)"
    allowed = facts.environment.get("FLASHINFER_ALLOW_CUDNN_PLAN_BUILD_IN_CAPTURE") == "1"
    policy = "plan builds only warn" if allowed else "plan builds are refused"
    others = [
        f"{name.removeprefix('FLASHINFER_GEMM_WORKSPACE_')}={facts.environment[name]}"
        for name in SWITCHES
        if name in facts.environment and "WORKSPACE" in name
    ]
    return "; ".join([policy, *others])


def _cache_lines(facts: Facts, cache: Cache | Missing, tokens: Sequence[Tokens]) -> Iterator[str]:
    yield ""
    if isinstance(cache, Missing):
        yield f"autotune cache: {cache.reason}"
        return
    yield f"autotune cache {cache.path}: {len(cache.entries)} shapes"
    active = gate(facts).active
    for op, won in sorted(winners(cache).items()):
        for runner, count in won.most_common():
            note = ", removed by the gate" if active and GATED.get(op) == runner else ""
            yield f"  {op:22} {count:5}  {runner}{note}"
    compared = set() if isinstance(facts.metadata, Missing) else set(facts.metadata)
    if cache.metadata is None:
        yield "  says nothing of its environment"
    elif left := sorted(set(cache.metadata) - compared):
        yield f"  not compared, since not known here: {', '.join(left)}"
    for asked in tokens:
        for m in asked.buckets():
            yield from _bucket_lines(cache, asked, m, active)


def _bucket_lines(cache: Cache, asked: Tokens, m: int, active: bool | None) -> Iterator[str]:
    yield f"  {asked} tokens: M = {m}"
    at = winners(cache, m)
    if not at:
        yield "    no GEMM is tuned for it: the untuned default serves"
    for op, won in sorted(at.items()):
        listed = ", ".join(f"{runner} {count}" for runner, count in won.most_common())
        yield f"    {op:20} {listed}"
        gone = [e for e in cache.entries if e.op == op and e.m == m and removed_by_gate(e)]
        if active and gone:
            yield f"    {'':20} {len(gone)} of them removed by the gate"


def _log_lines(log: Log | Missing) -> Iterator[str]:
    yield ""
    if isinstance(log, Missing):
        yield f"log: {log.reason}"
        return
    yield f"log {log.path}: {log.lines} lines{f', {log.stopped}' if log.stopped else ''}"
    for kind, words in LOG_WORDS.items():
        if kind in log.found:
            found = log.found[kind]
            yield f"  {words}: {found.lines} lines, first {found.first_line}:"
            yield f"    {found.first_text[:300]}"
    if not log.found:
        yield "  nothing of the workspaces, the gate or a GPU fault"


LOG_WORDS = {
    "gate": "the gate left cuDNN out",
    "growth": "a workspace grew",
    "refused": "refused under capture",
    "allowed": "plan built under capture, allowed",
    "capture": "a capture was ended",
    "sealed": "mapping after seal()",
    "lanes": "many workspaces",
    "memory": "no memory for a workspace",
    "fault": "GPU fault",
    "cache": "autotune cache left unused",
}
