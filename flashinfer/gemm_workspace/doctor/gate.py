"""What runs cuDNN here: whether the fork is active, the gate, and cuDNN's override shape."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from . import releases
from .facts import Facts, Fork, Missing, backend_words, sm_words


def fork_is_active(facts: Facts) -> bool:
    """Whether the fork is what an import gets, every file as built."""
    flashinfer = facts.flashinfer
    return (
        not isinstance(flashinfer, Missing)
        and isinstance(flashinfer.fork, Fork)
        and flashinfer.fork.whole
    )


@dataclass(frozen=True)
class Gate:
    """Whether ``bmm_fp8`` auto leaves cuDNN out here. ``active`` is None where not known."""

    active: bool | None
    why: str


def gate(facts: Facts) -> Gate:
    """Whether ``bmm_fp8`` auto leaves the cuDNN runner out in this environment, and why."""
    flashinfer = facts.flashinfer
    if isinstance(flashinfer, Missing):
        return Gate(None, "FlashInfer was not found")
    there: bool | None
    if fork_is_active(facts):
        there, whose = True, "the fork's"
    else:
        release = flashinfer.release
        there, whose = (None if release is None else releases.has_gate(release)), "the release's"
    if there is False:
        return Gate(False, "this release has no gate")
    on_sm12x = has_sm12x(facts)
    if on_sm12x is False:
        return Gate(False, f"no SM12x here ({gpus_words(facts)}), which is where it matters")
    if isinstance(facts.cudnn, int) and facts.cudnn >= releases.GATE_BACKEND:
        return Gate(False, f"cuDNN {backend_words(facts.cudnn)} is 9.23.1 or later")
    if on_sm12x is None:
        return Gate(None, "the GPUs are not known")
    if there is None:
        return Gate(None, "whether this release has a gate is not known")
    if isinstance(facts.cudnn, Missing):
        if whose == "the fork's":
            return Gate(
                True, "SM12x, and the version of cuDNN cannot be told, which it takes for old"
            )
        return Gate(None, f"the version of cuDNN is not known ({facts.cudnn.reason})")
    return Gate(True, f"{whose}: SM12x and cuDNN {backend_words(facts.cudnn)}, older than 9.23.1")


def has_sm12x(facts: Facts) -> bool | None:
    """Whether a GPU of the SM12x family is there; None where that is not known."""
    if isinstance(facts.gpus, Missing) or not facts.gpus:
        return None
    return any(gpu.sm[0] == 12 for gpu in facts.gpus)


def gpus_words(facts: Facts) -> str:
    """``2 x NVIDIA H200 (SM90)``."""
    if isinstance(facts.gpus, Missing):
        return f"not known: {facts.gpus.reason}"
    counted = Counter((gpu.name, gpu.sm) for gpu in facts.gpus)
    words = [
        f"{f'{count} x ' if count > 1 else ''}{name} ({sm_words(sm)})"
        for (name, sm), count in counted.items()
    ]
    return ", ".join(words) or "none"


def override_shape(facts: Facts) -> tuple[bool | None, str]:
    """Whether one cuDNN plan serves many shapes here, and why."""
    flashinfer = facts.flashinfer
    release = None if isinstance(flashinfer, Missing) else flashinfer.release
    if release is None:
        return None, "the release is not known"
    if isinstance(facts.cudnn, Missing):
        return None, f"the version of cuDNN is not known ({facts.cudnn.reason})"
    frontend = facts.cudnn_frontend if isinstance(facts.cudnn_frontend, str) else ""
    answer = releases.override_shape(release, facts.cudnn, frontend)
    return answer, f"cuDNN {backend_words(facts.cudnn)}, frontend {frontend or 'not known'}"
