"""Time on the GPU of the same GEMMs, release and fork, as a ratio: ``gpu_time.py RELEASE FORK``.

Each argument is a folder with one wheel unpacked. Both run in processes that live through the
whole run and take turns, ``--rounds`` times over all shapes, so that clocks and temperature are
the same for both. A measurement is what CUDA events say of ``CALLS`` launches that were queued
behind a spinning kernel: the host's time is not in it. *Eager*: the ops are called; *replayed*: a
graph of as many calls. Prints JSON: microseconds a launch, and fork over release, for each of 20
shapes; the medians of both.

Exit status 0: both medians are within ``--within`` (1 %) of 1; 1: one is not; 2: bad input.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CALLS = 20
#: (lane, (batch, m, n, k)): decode, prefill, split-K, batched.
SHAPES: list[tuple[str, tuple[int, int, int, int]]] = [
    (lane, shape)
    for lane in ("fp8-cudnn", "bf16-cudnn")
    for shape in [
        (1, 1, 4096, 4096),
        (1, 8, 5120, 5120),
        (1, 16, 1024, 16384),
        (1, 16, 12288, 2048),
        (1, 64, 512, 65536),
        (1, 128, 256, 32768),
        (1, 256, 2048, 8192),
        (1, 512, 5120, 5120),
        (1, 2048, 4096, 4096),
        (1, 4096, 2048, 2048),
    ]
]


# One process a wheel. ----------------------------------------------------------------------------


def child() -> None:
    """Build everything, say so, then measure one round a line on stdin."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print
    import torch
    from catalogue.ops import Call

    if not torch.cuda.is_available():
        answers.write(json.dumps({"error": "no CUDA device"}) + "\n")
        return
    calls = [Call(lane, shape) for lane, shape in SHAPES]
    graphs = []
    for call in calls:
        call.eager()
        graphs.append(call.captured(CALLS))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def measured(launch: Any, spin: int) -> float:
        """Microseconds on the device, of what ``launch`` queues while a kernel spins."""
        torch.cuda.synchronize()
        torch.cuda._sleep(spin)
        start.record()
        launch()
        end.record()
        torch.cuda.synchronize()
        return 1000.0 * start.elapsed_time(end)

    def round_of_all() -> list[list[float]]:
        found = []
        for call, graph in zip(calls, graphs, strict=True):

            def eager(call: Call = call) -> None:
                for _ in range(CALLS):
                    call()

            graph.replay()  # brings the clocks up, and the operands into the cache
            # About 15 and 2 ms at 2 GHz: longer than the host takes to queue them.
            times = [measured(eager, 30_000_000), measured(graph.replay, 4_000_000)]
            found.append([time / CALLS for time in times])
        return found

    answers.write(json.dumps({"ready": torch.cuda.get_device_name()}) + "\n")
    for _ in sys.stdin:
        answers.write(json.dumps(round_of_all()) + "\n")
    os._exit(0)


# Both in turn. -----------------------------------------------------------------------------------


def started(folder: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(Path(folder).resolve()), str(ROOT / "tests" / "gpu")])
    if existing := os.environ.get("PYTHONPATH"):
        path = f"{path}{os.pathsep}{existing}"
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve()), "--child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        cwd="/",
    )


def answer(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"the process ended with status {process.wait()}")
    return json.loads(line)


def compared(release: list[list[list[float]]], fork: list[list[list[float]]]) -> dict[str, Any]:
    """From rounds x shapes x (eager, replayed), in microseconds, to ratios.

    A round's ratio is of neighbours in time; a shape's is the median over the rounds.
    """
    shapes = []
    for number, (lane, shape) in enumerate(SHAPES):
        row: dict[str, Any] = {"lane": lane, "shape": list(shape)}
        for column, how in enumerate(("eager", "replayed")):
            pairs = [
                (mine[number][column], theirs[number][column])
                for mine, theirs in zip(fork, release, strict=True)
            ]
            row[how] = {
                "release_us": round(statistics.median(theirs for _, theirs in pairs), 3),
                "fork_us": round(statistics.median(mine for mine, _ in pairs), 3),
                "ratio": round(statistics.median(mine / theirs for mine, theirs in pairs), 4),
            }
        shapes.append(row)
    medians = {
        how: round(statistics.median(row[how]["ratio"] for row in shapes), 4)
        for how in ("eager", "replayed")
    }
    return {"median_ratio": medians, "shapes": shapes}


def main() -> int:
    made = argparse.ArgumentParser(description="GPU time, fork over release.")
    made.add_argument("folders", nargs="*", metavar="FOLDER", help="RELEASE FORK, unpacked")
    made.add_argument("--rounds", type=int, default=15)
    made.add_argument("--within", type=float, default=0.01)
    made.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.child:
        child()
        return 0
    wrong = [each for each in options.folders if not Path(each, "flashinfer").is_dir()]
    if len(options.folders) != 2 or wrong or options.rounds < 1:
        print(
            f"gpu_time: {wrong or options.folders}, wanted two folders with a wheel unpacked each: "
            "the release, then the fork",
            file=sys.stderr,
        )
        return 2
    processes = [started(folder) for folder in options.folders]
    rounds: tuple[list[Any], list[Any]] = ([], [])
    try:
        device = ""
        for process in processes:
            ready = answer(process)
            if "ready" not in ready:
                print(f"gpu_time: {ready['error']}", file=sys.stderr)
                return 2
            device = ready["ready"]
        for number in range(options.rounds + 1):
            # Who goes first changes, so that neither always has the warmer device.
            for which in (0, 1) if number % 2 else (1, 0):
                process = processes[which]
                assert process.stdin is not None
                process.stdin.write("\n")
                process.stdin.flush()
                seen = answer(process)
                if number:  # the first is a warm-up
                    rounds[which].append(seen)
    except (RuntimeError, OSError) as error:
        print(f"gpu_time: {error}", file=sys.stderr)
        return 2
    finally:
        for process in processes:
            if process.stdin is not None:
                process.stdin.close()
            process.wait()
    result = compared(*rounds)
    result.update(device=device, rounds=options.rounds, calls=CALLS)
    print(json.dumps(result, indent=1))
    near = all(abs(ratio - 1) <= options.within for ratio in result["median_ratio"].values())
    return 0 if near else 1


if __name__ == "__main__":
    sys.exit(main())
