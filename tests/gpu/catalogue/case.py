"""What a case is: an id of HAZARDS.md, a lane, a function, and what it came to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .facts import Facts

#: Verdicts, best first. Only the first two are fine on a fork.
PASS, NOT_APPLICABLE, FAIL, HANG, CRASH, ERROR = (
    "pass",
    "not applicable",
    "fail",
    "hang",
    "crash",
    "error",
)
FINE = frozenset({PASS, NOT_APPLICABLE})


class Absent(Exception):
    """This wheel or machine has not what the case is about; the text says what."""


@dataclass(frozen=True)
class Outcome:
    """What a case saw. ``figures`` are plain numbers and strings."""

    passed: bool
    figures: dict[str, Any] = field(default_factory=dict)
    note: str = ""


def outcome(passed: bool, note: str = "", figures: Mapping[str, Any] | None = None) -> Outcome:
    """An Outcome."""
    return Outcome(bool(passed), dict(figures or {}), note)


@dataclass(frozen=True)
class Case:
    """One case on one lane.

    ``seconds``: when the watchdog ends it. ``alone``: nothing else may run on the device (it fills
    the memory or measures). ``finishes``: the interpreter finishes after it, and must do so
    cleanly; all others leave by ``os._exit``. ``environment``: set before the process starts.
    ``after_release``: on a fork, runs once the release of the same version has run it. ``known``:
    eras (:attr:`Facts.era`) in which the defect is known, so that a pass there says that the case
    did not reproduce it.
    """

    id: str
    lane: str
    hazards: tuple[str, ...]
    title: str
    run: Callable[[str], Outcome]
    needs: tuple[Callable[[Facts], str], ...] = ()
    seconds: int = 120
    alone: bool = False
    finishes: bool = False
    environment: tuple[tuple[str, str], ...] = ()
    after_release: bool = False
    known: frozenset[str] = frozenset()

    @property
    def key(self) -> str:
        """``B13.fp8-cudnn``; the id alone where there is no lane."""
        return f"{self.id}.{self.lane}" if self.lane else self.id

    def reason_not(self, facts: Facts) -> str:
        """Why the case does not apply here, empty if it does."""
        for need in (*_LANE_NEEDS.get(self.lane, ()), *self.needs):
            if reason := need(facts):
                return reason
        return ""

    def as_dict(self, facts: Facts) -> dict[str, Any]:
        """For the runner, which has no facts and no functions."""
        return {
            "key": self.key,
            "id": self.id,
            "lane": self.lane,
            "hazards": list(self.hazards),
            "title": self.title,
            "seconds": self.seconds,
            "alone": self.alone,
            "environment": dict(self.environment),
            "after_release": self.after_release,
            "compiles": self.lane in COMPILED,
            "known": facts.era in self.known,
            "reason_not": self.reason_not(facts),
        }


REGISTRY: dict[str, Case] = {}


def case(
    id: str, title: str, hazards: str, lanes: Iterable[str] = ("",), **settings: Any
) -> Callable[[Callable[[str], Outcome]], Callable[[str], Outcome]]:
    """Register the decorated function for each of ``lanes``; it gets the lane's name."""

    def register(function: Callable[[str], Outcome]) -> Callable[[str], Outcome]:
        for lane in lanes:
            known = frozenset(settings.get("known", ()))
            made = Case(
                id,
                lane,
                tuple(hazards.split()),
                title,
                function,
                **{**settings, "known": known},
            )
            if made.key in REGISTRY:
                raise ValueError(f"two cases are called {made.key}: give one another id")
            REGISTRY[made.key] = made
        return function

    return register


# What a lane needs. ------------------------------------------------------------------------------


def _capability(major: int, minor: int) -> Callable[[Facts], str]:
    def need(facts: Facts) -> str:
        if facts.capability >= (major, minor):
            return ""
        return f"needs SM{major * 10 + minor}+"

    return need


def _cudnn(facts: Facts) -> str:
    return "" if facts.cudnn else f"needs cuDNN and its frontend ({facts.cudnn_missing})"


def compiler(facts: Facts) -> str:
    """Ops that compile need the sources in the wheel."""
    return "" if facts.data else "wheel without flashinfer/data"


def two_gpus(facts: Facts) -> str:
    return "" if facts.gpus >= 2 else "needs two GPUs"


def override_shape(facts: Facts) -> str:
    if facts.override_shape:
        return ""
    return f"needs a cuDNN with override shape (9.23.1+), here {facts.cudnn}"


def fork_only(facts: Facts) -> str:
    return "" if facts.fork else "asks for an API that only the fork has"


CUDNN = ("fp8-cudnn", "bf16-cudnn")
CUBLAS = ("fp8-cublas", "bf16-cublaslt")
BLACKWELL = ("fp4-cudnn", "mxfp8-cudnn")
ALL = (*CUDNN, *CUBLAS, *BLACKWELL)
#: Lanes whose first use compiles.
COMPILED = frozenset({"fp8-cublas", "bf16-cublaslt", "fp4-cudnn", "mxfp8-cudnn", "fp4-cutlass"})

_LANE_NEEDS: dict[str, tuple[Callable[[Facts], str], ...]] = {
    "fp8-cudnn": (_capability(8, 9), _cudnn),
    "bf16-cudnn": (_capability(8, 0), _cudnn),
    "fp8-cublas": (_capability(8, 9), compiler),
    "bf16-cublaslt": (_capability(8, 0), compiler),
    "fp4-cudnn": (_capability(10, 0), _cudnn, compiler),
    "mxfp8-cudnn": (_capability(10, 0), _cudnn, compiler),
    "fp4-cutlass": (_capability(10, 0), compiler),
}
