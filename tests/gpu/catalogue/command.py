"""What the commands share: bad input is a line, their work a folder, their results are whole."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .wheels import BadInput


def exit_status(program: str, run: Callable[[], int]) -> int:
    """``run()``; for :class:`BadInput` one line on stderr, and 2."""
    try:
        return run()
    except BadInput as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2


def last_line(text: str, otherwise: str = "") -> str:
    """What a program said last, at most 300 characters of it."""
    return (text.strip().splitlines() or [otherwise])[-1][:300]


def signal_name(number: int) -> str:
    """``SIGABRT`` of 6."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@contextmanager
def work_folder(given: Path | None, program: str) -> Iterator[Path]:
    """The folder that was given, which stays, or one of its own, which goes.

    Raises BadInput when there is no place for one.
    """
    try:
        work = given or Path(tempfile.mkdtemp(prefix=f"{program}-"))
    except OSError as error:
        raise BadInput(f"no temporary folder ({error}): set TMPDIR to one") from None
    try:
        yield work
    finally:
        if given is None:
            shutil.rmtree(work, ignore_errors=True)


def output_folder(folder: Path) -> None:
    """Check, before there are any results, that they can go there. Raises BadInput."""
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not there.is_dir():
        raise BadInput(f"-o {folder}: {there} is no folder, name another")
    if not os.access(there, os.W_OK | os.X_OK):
        raise BadInput(f"-o {folder}: {there} cannot be written to, name another folder")


def write_whole(path: Path, text: str) -> None:
    """Write a result; who reads ``path`` sees all of it, or what was there before.

    Raises BadInput when it cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text)
        partial.replace(path)
    except OSError as error:
        raise BadInput(
            f"{path} cannot be written ({error.strerror}): name another folder"
        ) from None
