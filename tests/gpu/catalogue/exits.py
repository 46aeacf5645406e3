"""Processes that end with graphs alive: ``python -m catalogue.exits LANE COUNT``.

One process imports everything once, then forks ``COUNT`` children before any CUDA call. Each
makes four graphs and *finishes* (no ``os._exit``): the destructors run. Started anew, not forked
from another, because ``MALLOC_PERTURB_`` is read when a process starts. Prints how often each
exit status was seen, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter

AT_ONCE = 5


def main() -> None:
    lane, count = sys.argv[1], int(sys.argv[2])
    from .cases.process import four_graphs

    seen: Counter[str] = Counter()
    running = 0
    for _ in range(count):
        if running == AT_ONCE:
            seen[_next()] += 1
            running -= 1
        sys.stdout.flush()
        if os.fork() == 0:
            graphs = four_graphs(lane)
            sys.stdout = sys.stderr
            # Kept to the end by this frame's caller: the interpreter finishes with them alive.
            globals()["graphs_of_the_process"] = graphs
            sys.exit(0)
        running += 1
    for _ in range(running):
        seen[_next()] += 1
    print(json.dumps(seen))


def _next() -> str:
    return str(os.waitstatus_to_exitcode(os.wait()[1]))


if __name__ == "__main__":
    main()
