"""What the commands over wheels have in common: bad input is a line, their work a folder."""

from __future__ import annotations

import shutil
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


@contextmanager
def work_folder(given: Path | None, program: str) -> Iterator[Path]:
    """The folder that was given, which stays, or one of its own, which goes."""
    work = given or Path(tempfile.mkdtemp(prefix=f"{program}-"))
    try:
        yield work
    finally:
        if given is None:
            shutil.rmtree(work, ignore_errors=True)
