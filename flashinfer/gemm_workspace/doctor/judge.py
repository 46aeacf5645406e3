"""From facts to findings: what is wrong, how sure that is, and the one thing to do.

Pure functions. Any fact may be missing; then the finding says what could not be told.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from . import releases
from .autotune import Cache
from .caches import of_cache
from .facts import Facts, FlashInfer, Fork, Missing, backend_words
from .findings import Finding, Level
from .gate import fork_is_active, has_sm12x
from .logs import Log
from .switches import SWITCHES

PIP = "pip install --force-reinstall --no-deps"


def judge(
    facts: Facts, caches: Sequence[Cache | Missing] = (), logs: Sequence[Log | Missing] = ()
) -> list[Finding]:
    """Every finding, the worst first; of equals the one to act on first."""
    found = [
        *_of_release(facts),
        *_of_gate(facts),
        *_of_packages(facts),
        *_of_bindings(facts),
        *_of_cudnn(facts),
        *_of_settings(facts),
        *_of_jit(facts),
        *(finding for log in logs for finding in _of_log(log)),
        *(finding for cache in caches for finding in of_cache(facts, cache)),
    ]
    if not any(finding.level is Level.AFFECTED for finding in found):
        # A fault that something known explains is no riddle.
        found += [finding for log in logs for finding in _of_faults(log)]
    order = list(Level)
    return sorted(found, key=lambda finding: order.index(finding.level))


# The release ------------------------------------------------------------------------------------


def _of_release(facts: Facts) -> Iterator[Finding]:
    flashinfer = facts.flashinfer
    if isinstance(flashinfer, Missing):
        yield Finding(
            "no-flashinfer",
            Level.UNKNOWN,
            f"FlashInfer was not found: {flashinfer.reason}.",
            "run this with the Python that the server runs with, or name its folder with "
            "--site-packages",
        )
        return
    yield from _of_fork(flashinfer)
    if flashinfer.others:
        yield Finding(
            "copies",
            Level.ADVICE,
            f"FlashInfer is there more than once: {'; '.join(flashinfer.others)}. An import gets "
            f"the one in {flashinfer.folder}.",
            "remove what is not meant",
        )
    if fork_is_active(facts):
        return
    release = flashinfer.release
    if release is None:
        yield Finding(
            "no-version",
            Level.UNKNOWN,
            f"the version of FlashInfer in {flashinfer.folder} cannot be read.",
            f"reinstall it: {PIP} flashinfer-python==<version>",
        )
    elif release in releases.AFFECTED:
        yield Finding(
            "moving-workspace",
            Level.AFFECTED,
            f"FlashInfer {release} moves its cuDNN GEMM workspace when a plan needs more: captured "
            "CUDA graphs and queued launches then write to freed memory (illegal memory access, "
            f"or wrong results without one).{_reach(facts)}",
            f"replace it by the drop-in of the same version: {PIP} "
            f"flashinfer_python-{release}+ws.<n>-py3-none-any.whl",
        )
    elif release in releases.PLANS_NOT_KEPT:
        yield Finding(
            "plans-not-kept",
            Level.ADVICE,
            f"FlashInfer {release} does not move its workspace, but lets go of cuDNN plans that "
            "captured graphs still use, once its plan cache overflows.",
            "0.7.2 or later, or the drop-in of the same version",
        )
    elif release not in releases.KNOWN and not releases.is_older_shape(release):
        yield Finding(
            "unknown-release",
            Level.UNKNOWN,
            f"FlashInfer {release} is a release that this doctor does not know.",
            "a doctor from a newer drop-in",
        )


def _reach(facts: Facts) -> str:
    if isinstance(facts.cudnn_frontend, Missing) and facts.image is None:
        return (
            " Not reached here as it is: those GEMMs need cudnn-frontend "
            f"({facts.cudnn_frontend.reason})."
        )
    return ""


def _of_fork(flashinfer: FlashInfer) -> Iterator[Finding]:
    fork = flashinfer.fork
    if isinstance(fork, Missing):
        yield Finding(
            "fork-unreadable",
            Level.UNKNOWN,
            f"whether the fork is active cannot be told: {fork.reason}.",
            f"install the drop-in again: {PIP} <its wheel>",
        )
    elif isinstance(fork, Fork) and not fork.whole:
        release = flashinfer.release
        gone = bool(fork.reverted) and (release is None or release in releases.AFFECTED)
        parts = [
            f"{len(files)} files are {what} ({', '.join(files[:3])}{', ...' if files[3:] else ''})"
            for what, files in (
                ("the release's again", fork.reverted),
                ("changed or missing", fork.altered),
            )
            if files
        ]
        yield Finding(
            "fork-damaged",
            Level.AFFECTED if gone else Level.UNKNOWN,
            f"the drop-in {fork.base}+{fork.label} is installed, but {' and '.join(parts)}: "
            "something was installed or edited over it.",
            f"install it again: {PIP} flashinfer_python-{fork.base}+{fork.label}-py3-none-any.whl",
        )


# The gate ---------------------------------------------------------------------------------------


def _of_gate(facts: Facts) -> Iterator[Finding]:
    flashinfer = facts.flashinfer
    if isinstance(flashinfer, Missing) or fork_is_active(facts):
        return
    release = flashinfer.release
    if release is None or releases.has_gate(release) is not False:
        return
    old = facts.cudnn < releases.GATE_BACKEND if isinstance(facts.cudnn, int) else None
    on_sm12x = has_sm12x(facts)
    if on_sm12x is False or old is False:
        return
    what = (
        f"FlashInfer {release} tries cuDNN for bmm_fp8 on SM12x whatever its version, and below "
        "9.23.1 those kernels fault there (flashinfer#4165)"
    )
    do = "cuDNN 9.23.1 or later, or the drop-in, which leaves that runner out"
    if on_sm12x and old:
        assert isinstance(facts.cudnn, int)
        have = backend_words(facts.cudnn)
        yield Finding("sm12x-cudnn", Level.AFFECTED, f"{what}; this is {have}.", do)
    elif release not in releases.AFFECTED:
        unknown = "the GPUs are" if on_sm12x is None else "the version of cuDNN is"
        yield Finding("sm12x-cudnn-unknown", Level.UNKNOWN, f"{what}; {unknown} not known.", do)


# What is beside it ------------------------------------------------------------------------------


def _of_packages(facts: Facts) -> Iterator[Finding]:
    flashinfer = facts.flashinfer
    own = None if isinstance(flashinfer, Missing) else flashinfer.own_version
    if isinstance(own, str):
        yield from _of_versions(facts, own)
    if isinstance(facts.torch, Missing):
        yield Finding(
            "no-torch",
            Level.UNKNOWN,
            f"torch cannot be used here: {facts.torch.reason}.",
            "run this with the Python that the server runs with"
            if facts.image is None
            else "name every folder of that image's packages, each with --site-packages",
        )
    elif isinstance(facts.import_error, str):
        yield Finding(
            "no-import",
            Level.UNKNOWN,
            f"`import flashinfer` fails: {facts.import_error}.",
            "repair the installation first",
        )


def version_matches(facts: Facts, own: str) -> dict[str, bool]:
    """Of the kernel packages that are there, whether each is of FlashInfer's version.

    >>> version_matches(Facts(cubin="0.6.16", jit_cache="0.6.16.post3+cu130"), "0.6.16.post3")
    {'flashinfer-cubin': False, 'flashinfer-jit-cache': True}
    """
    return {
        name: version.partition("+")[0] == own.partition("+")[0]
        for name, version in (
            ("flashinfer-cubin", facts.cubin),
            ("flashinfer-jit-cache", facts.jit_cache),
        )
        if isinstance(version, str)
    }


def _of_versions(facts: Facts, own: str) -> Iterator[Finding]:
    unequal = [name for name, equal in version_matches(facts, own).items() if not equal]
    if not unequal:
        return
    parsed = releases.numbers(own)
    off = bool(facts.environment.get("FLASHINFER_DISABLE_VERSION_CHECK"))
    refuses = parsed is not None and parsed < (0, 7) and not off
    have = {"flashinfer-cubin": facts.cubin, "flashinfer-jit-cache": facts.jit_cache}
    listed = " and ".join(f"{name} {have[name]}" for name in unequal)
    yield Finding(
        "versions",
        Level.AFFECTED if refuses else Level.ADVICE,
        f"{listed} beside FlashInfer {own}: "
        + (
            "an import refuses that."
            if refuses
            else "kernels of another version are used, or none of them."
        ),
        f"install {own.partition('+')[0]} of {' and '.join(unequal)}",
    )


def _of_bindings(facts: Facts) -> Iterator[Finding]:
    if fork_is_active(facts) and isinstance(facts.cuda_bindings, Missing):
        yield Finding(
            "no-bindings",
            # Of another image a folder may not have been named.
            Level.AFFECTED if facts.image is None else Level.UNKNOWN,
            "the fork cannot reach the CUDA driver API: a GEMM under capture raises "
            f"CudnnWorkspaceTooSmallInCaptureError ({facts.cuda_bindings.reason}).",
            "pip install cuda-bindings",
        )


def _of_cudnn(facts: Facts) -> Iterator[Finding]:
    mapped = () if isinstance(facts.cudnn_mapped, Missing) else facts.cudnn_mapped
    mains = [path for path in mapped if "libcudnn.so" in path]
    versions = {
        version for version in (facts.cudnn, facts.cudnn_of_torch) if isinstance(version, int)
    }
    if len(mains) > 1 or len(versions) > 1:
        words = " and ".join(map(backend_words, sorted(versions)))
        yield Finding(
            "two-cudnn",
            Level.ADVICE,
            f"more than one cuDNN is loaded into one process ({words}; {', '.join(mains)}).",
            "keep one: mind LD_LIBRARY_PATH",
        )


def _of_settings(facts: Facts) -> Iterator[Finding]:
    for name, values in SWITCHES.items():
        value = facts.environment.get(name, "").strip().lower()
        if value and value not in values:
            yield Finding(
                "setting",
                Level.ADVICE,
                f"{name} is {value!r}, which has no meaning; wanted {' or '.join(values)}.",
                f"unset {name}",
            )
    if facts.environment.get("FLASHINFER_ALLOW_CUDNN_PLAN_BUILD_IN_CAPTURE") == "1":
        yield Finding(
            "builds-allowed",
            Level.ADVICE,
            "FLASHINFER_ALLOW_CUDNN_PLAN_BUILD_IN_CAPTURE=1: cuDNN plans are built under capture, "
            "which can end the capture.",
            "unset it and run each shape once before the capture",
        )


def _of_jit(facts: Facts) -> Iterator[Finding]:
    jit, flashinfer = facts.jit, facts.flashinfer
    if isinstance(jit, Missing) or isinstance(flashinfer, Missing) or not jit.older or jit.nvcc:
        return
    yield Finding(
        "jit-stale",
        Level.ADVICE,
        f"{jit.older} of {jit.compiled} compiled ops in {jit.folder} are older than the newest "
        "source of the installed FlashInfer, and there is no nvcc: ninja will try to build them "
        "again and fail. Installing the same version anew is enough for that.",
        "if they were compiled from this very version, give its sources an old time: "
        f"find {flashinfer.folder}/flashinfer/data -type f -exec touch -d 2000-01-01 {{}} +",
    )


# What the operator named ------------------------------------------------------------------------


def _of_log(log: Log | Missing) -> Iterator[Finding]:
    if isinstance(log, Missing):
        yield Finding("log-unreadable", Level.UNKNOWN, f"a log cannot be read: {log.reason}.")
        return
    if log.stopped:
        yield Finding("log-cut", Level.UNKNOWN, f"{log.path}: {log.stopped}.")
    for kind, level, what, do in (
        (
            "refused",
            Level.AFFECTED,
            "a cuDNN plan, handle or workspace was refused under capture",
            "do what the first of those lines says; as a rule, call that shape once before capture",
        ),
        (
            "capture",
            Level.AFFECTED,
            "a capture was ended by a call that is not legal in it",
            "look above the first of those lines; in an affected release cuDNN plan builds do that",
        ),
        (
            "memory",
            Level.ADVICE,
            "a workspace could not be had",
            "leave the engine a smaller share of the GPU",
        ),
    ):
        if kind in log.found:
            found = log.found[kind]
            yield Finding(
                f"log-{kind}",
                level,
                f"{log.path}: {what}, in {found.lines} lines, the first is {found.first_line}: "
                f"{found.first_text[:300]}",
                do,
            )
    if "cache" in log.found:
        found = log.found["cache"]
        yield Finding(
            "log-cache",
            Level.ADVICE,
            f"{log.path}: line {found.first_line}: the autotuner left a cache file unused: "
            f"{found.first_text[:300]}",
            "a cache folder of its own for this environment",
        )


def _of_faults(log: Log | Missing) -> Iterator[Finding]:
    if not isinstance(log, Missing) and "fault" in log.found:
        found = log.found["fault"]
        yield Finding(
            "log-fault",
            Level.UNKNOWN,
            f"{log.path}: {found.lines} lines of GPU faults, the first is {found.first_line}: "
            f"{found.first_text[:300]}. Nothing found here explains them.",
            "run once with CUDA_LAUNCH_BLOCKING=1, or CUDA_ENABLE_COREDUMP_ON_EXCEPTION=1, to "
            "learn which kernel it is",
        )
