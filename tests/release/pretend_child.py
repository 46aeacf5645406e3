"""``catalogue.child`` on the pretended GPU: the same arguments, the same answers."""

from __future__ import annotations

import os
import sys
from typing import Any

import pretend
import pretend_gpu


def main() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # the release prints while it is imported
    pretend_gpu.prepare()
    os.dup2(answers, 1)
    from catalogue import child

    real = child.work

    def work(arguments: list[str]) -> Any:
        # After the fork: the runtime forgets everything in a forked process.
        runtime = pretend.runtime()
        if runtime is None:
            return real(arguments)
        with runtime.use_device(pretend.PretendDevice(pretend_gpu.WORLD)):
            return real(arguments)

    child.work = work
    child.main()


if __name__ == "__main__":
    sys.exit(main())
