"""Processes that end with graphs alive: ``python -m catalogue.exits LANE COUNT``.

One process imports everything once, then forks ``COUNT`` children before any CUDA call; where the
imports themselves initialise CUDA, which no child could use then, each child is an interpreter of
its own. Each makes four graphs and *finishes* (no ``os._exit``): the destructors run. Started
anew, not forked from another, because ``MALLOC_PERTURB_`` is read when a process starts. Prints
how often each exit status was seen, as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

AT_ONCE = 5
#: In place of a count: be one child.
ONE = "one"


def main() -> None:
    lane, count = sys.argv[1:]
    import torch

    from .cases.process import four_graphs

    if count == ONE:
        _finish_with(four_graphs(lane))
    elif torch.cuda.is_initialized():
        print(json.dumps(_interpreters(lane, int(count))))
    else:
        print(json.dumps(_forks(lane, int(count))))


def _finish_with(graphs: object) -> None:
    sys.stdout = sys.stderr
    # Kept to the end: the interpreter finishes with them alive.
    globals()["graphs_of_the_process"] = graphs
    sys.exit(0)


def _interpreters(lane: str, count: int) -> Counter[str]:
    command = [sys.executable, "-m", __spec__.name if __spec__ else __name__, lane, ONE]

    def run(_: int) -> str:
        return str(subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return Counter(pool.map(run, range(count)))


def _forks(lane: str, count: int) -> Counter[str]:
    from .cases.process import four_graphs

    seen: Counter[str] = Counter()
    running = 0
    for _ in range(count):
        if running == AT_ONCE:
            seen[_next()] += 1
            running -= 1
        sys.stdout.flush()
        if os.fork() == 0:
            _finish_with(four_graphs(lane))
        running += 1
    for _ in range(running):
        seen[_next()] += 1
    return seen


def _next() -> str:
    return str(os.waitstatus_to_exitcode(os.wait()[1]))


if __name__ == "__main__":
    main()
