"""What an operator can set from outside: environment variables, each read once.

========================================  ========  ===========  ================================
variable                                  values    default      when read
========================================  ========  ===========  ================================
FLASHINFER_GEMM_WORKSPACE_SHARE           0, 1      by device    first use of a lane
FLASHINFER_GEMM_WORKSPACE_SINGLE_         0, 1      0            first use of a lane
CAPTURE_LANE
FLASHINFER_GEMM_WORKSPACE_SEAL_POLICY     error,    error        first use of a lane
                                          warn
FLASHINFER_GEMM_WORKSPACE_LOG             0, 1      0            first use of a lane
FLASHINFER_GEMM_WORKSPACE_ZERO            0, 1      0            first use of a lane
FLASHINFER_GEMM_WORKSPACE_PREPARED        0, 1      1            first call of an op
FLASHINFER_GEMM_WORKSPACE_NATIVE          0, 1      1            first launch that can be native
FLASHINFER_ALLOW_CUDNN_PLAN_BUILD_IN_     0, 1      0            each plan build under capture
CAPTURE
========================================  ========  ===========  ================================

SHARE
    1: all workspace names of one stream share one arena; 0: each name has its own. Not set:
    shared on the devices of :data:`SHARED_ON`, own elsewhere.
SINGLE_CAPTURE_LANE
    1: one lane for all captures of a device and stream, whatever their pools. Only for engines
    that never replay two graphs at once: those would write to the same bytes.
SEAL_POLICY
    What mapping memory after ``seal()`` is: an error, or a line in the log.
LOG
    1: one line at level INFO each time that memory is mapped or a block is made, on the logger
    ``flashinfer.gemm_workspace``, with the event as the record's ``gemm_workspace``; to stderr
    if the process has set up no logging. 0: the same at level DEBUG.
ZERO
    1: every workspace is filled with zeros, on the current stream, each time that an op gets it;
    under capture each replay does so. A diagnostic for kernels that wait for what they found in
    their workspace: it costs a fill of the whole workspace for each call.
PREPARED
    0: every call takes the release's own path. 1: a call of a signature seen before makes the
    same launch at once.
NATIVE
    0: no launch goes through the native library, whether the wheel has one or not.
ALLOW_CUDNN_PLAN_BUILD_IN_CAPTURE
    1: a plan build under capture is a warning and goes on; upstream's switch.

No variable has a unit: none is a size. Sizes are given to ``reserve()``, in bytes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

_PREFIX = "FLASHINFER_GEMM_WORKSPACE_"

ALLOW = "FLASHINFER_ALLOW_CUDNN_PLAN_BUILD_IN_CAPTURE"

# Compute capabilities on which every plan was run over a dirty workspace (HAZARDS B10), so that
# one op may find there what another left.
SHARED_ON = frozenset({(9, 0)})


@dataclass(frozen=True)
class Settings:
    """What was set when the runtime was first used."""

    share: bool | None = None
    single_capture_lane: bool = False
    seal_is_error: bool = True
    log_growths: bool = False
    zero: bool = False
    prepared: bool = True
    native: bool = True

    @staticmethod
    def read(environment: Mapping[str, str] = os.environ) -> Settings:
        """From ``environment``. Raises ValueError for a value that has no meaning."""
        single = _one_of(environment, "SINGLE_CAPTURE_LANE", ("0", "1"))
        share = _one_of(environment, "SHARE", ("0", "1"))
        policy = _one_of(environment, "SEAL_POLICY", ("error", "warn"))
        prepared = _one_of(environment, "PREPARED", ("0", "1"))
        return Settings(
            share=None if share is None else share == "1",
            single_capture_lane=single == "1",
            seal_is_error=policy != "warn",
            log_growths=_one_of(environment, "LOG", ("0", "1")) == "1",
            zero=_one_of(environment, "ZERO", ("0", "1")) == "1",
            prepared=prepared != "0",
            native=_one_of(environment, "NATIVE", ("0", "1")) != "0",
        )


def _one_of(environment: Mapping[str, str], name: str, values: tuple[str, ...]) -> str | None:
    value = environment.get(_PREFIX + name, "").strip().lower()
    if not value:
        return None
    if value not in values:
        raise ValueError(
            f"{_PREFIX}{name} is {value!r}, wanted one of {', '.join(values)}: set it so, or not "
            "at all"
        )
    return value


def plan_build_allowed() -> bool:
    """Whether a plan build under capture is only a warning. Read at each."""
    return os.environ.get(ALLOW) == "1"
