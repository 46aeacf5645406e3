"""PEP 517 door: ``pip wheel .`` gives the drop-in wheel.

The base is ``--config-settings base=0.6.14``, else ``$FLASHINFER_BASE``, else the default one.
There is no prepare_metadata hook: pip then takes name and version from the wheel itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from .build import build
from .errors import GraftError
from .releases import DEFAULT_BASE


def base_from(config_settings: Mapping[str, object] | None = None) -> str:
    """The base to build: from the settings, the environment, or the default."""
    named = (config_settings or {}).get("base") or os.environ.get("FLASHINFER_BASE")
    return str(named or DEFAULT_BASE)


def build_wheel(
    wheel_directory: str,
    config_settings: Mapping[str, object] | None = None,
    metadata_directory: str | None = None,  # noqa: ARG001
) -> str:
    """Build into ``wheel_directory``; return the file's name."""
    try:
        built = build(base_from(config_settings), Path(wheel_directory))
    except GraftError as error:
        print(f"graft: {error}", file=sys.stderr)
        sys.exit(2)
    print(built.as_text())
    return built.wheel.name


def build_sdist(
    sdist_directory: str,  # noqa: ARG001
    config_settings: Mapping[str, object] | None = None,  # noqa: ARG001
) -> str:
    """There is none: the source is this repository plus an upstream wheel."""
    sys.exit("graft: no source distribution; build the wheel (pip wheel . --no-deps)")
