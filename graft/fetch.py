"""Finds the input: a wheel file, a version (cached, or fetched with pip), or the installed copy."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from packaging.version import InvalidVersion, Version

from .errors import GraftError
from .releases import DISTRIBUTION, FIRST_AFFECTED, RELEASES, state_of
from .source import Source, open_installed, open_wheel

INSTALLED = "installed"


def cache_folder() -> Path:
    """Where fetched wheels stay: ``$FLASHINFER_GRAFT_CACHE``, else below the user's cache."""
    if named := os.environ.get("FLASHINFER_GRAFT_CACHE"):
        return Path(named)
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        raise GraftError("no home folder for fetched wheels: set FLASHINFER_GRAFT_CACHE") from None
    return Path(base) / "flashinfer-gemm-workspace"


def fetch(version: str, *, allow_unknown: bool = False) -> Path:
    """Path of the upstream wheel of ``version``, from the cache or by ``pip download``.

    Raises GraftError for a version that is not supported, before anything is fetched.
    """
    try:
        parsed = Version(version)
    except InvalidVersion:
        raise GraftError(
            f"{version!r} is neither a version, nor a wheel that exists, nor {INSTALLED!r}"
        ) from None
    version = str(parsed)
    if parsed < FIRST_AFFECTED or (version not in RELEASES and not allow_unknown):
        hint = "" if parsed < FIRST_AFFECTED else ", or pass --unknown-release"
        raise GraftError(
            f"{DISTRIBUTION} {version} is not supported ({state_of(version)}); "
            f"see `python -m graft releases`{hint}"
        )
    name = f"flashinfer_python-{version}-py3-none-any.whl"
    cached = cache_folder() / name
    try:
        if cached.is_file() and _is_pinned(cached, version):
            return cached
        cached.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cached.parent, prefix=".fetch-") as folder:
            _download(version, folder)
            (wheel,) = Path(folder).glob("*.whl")
            os.replace(wheel, cached)
    except OSError as error:
        raise GraftError(
            f"cannot keep a wheel in {cached.parent} ({error.strerror}); "
            "set FLASHINFER_GRAFT_CACHE to a folder that can be written"
        ) from None
    except ValueError:
        raise GraftError(f"pip fetched no wheel of {DISTRIBUTION} {version}") from None
    return cached


def _is_pinned(wheel: Path, version: str) -> bool:
    """A cached wheel that is not the known one (cut short, say) is fetched again."""
    if version not in RELEASES:
        return True
    return hashlib.sha256(wheel.read_bytes()).hexdigest() == RELEASES[version].sha256


def _download(version: str, folder: str) -> None:
    # pip shows its progress bar on a terminal; into a pipe nothing is printed.
    quiet = [] if sys.stderr.isatty() else ["--quiet"]
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"),
        *("--disable-pip-version-check", "--dest", folder, *quiet),
        f"{DISTRIBUTION}=={version}",
    ]
    if shutil.which(sys.executable) is None:
        raise GraftError(f"no Python at {sys.executable}")
    done = subprocess.run(
        command,
        check=False,
        stdout=sys.stderr,
        stderr=subprocess.PIPE if quiet else None,
        text=True,
    )
    if done.returncode:
        said = [line for line in (done.stderr or "").splitlines() if line.strip()]
        reason = said[-1].removeprefix("ERROR: ") if said else f"pip ended with {done.returncode}"
        raise GraftError(
            f"cannot fetch {DISTRIBUTION} {version} ({reason}); without a network pass the "
            f"wheel's path, put it into {cache_folder()}, or use {INSTALLED!r}"
        )


@contextlib.contextmanager
def open_base(base: str, *, allow_unknown: bool = False) -> Iterator[Source]:
    """Open a base by any of its three doors."""
    if base == INSTALLED:
        with open_installed(allow_unknown=allow_unknown) as source:
            yield source
        return
    path = Path(base)
    if not (base.endswith(".whl") or path.is_file() or os.sep in base):
        path = fetch(base, allow_unknown=allow_unknown)
    with open_wheel(path, allow_unknown=allow_unknown) as source:
        yield source
