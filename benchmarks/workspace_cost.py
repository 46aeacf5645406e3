"""What fetching a workspace costs on the host, release and graft side by side in one run.

On a CUDA machine, with folders into which the two wheels are installed::

    python benchmarks/workspace_cost.py RELEASE_FOLDER GRAFT_FOLDER

Prints JSON, in microseconds a call (best of seven means of 20,000): the release's cache look-up;
the graft's lane hit, a request that fits, and the lock and hold around an execution; and what
they are made of: one capture query, one read of the raw stream, an empty call.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

MEASURE = r"""
import json, time, torch
import flashinfer.utils as utils

DEVICE = torch.zeros(1, device="cuda").device
NAME, SIZE = "bmm_fp8_workspace", 40 << 20

def microseconds(call, n=20_000):
    call()
    means = []
    for _ in range(7):
        start = time.perf_counter()
        for _ in range(n):
            call()
        means.append((time.perf_counter() - start) / n)
    return round(min(means) * 1e6, 3)

raw = torch._C._cuda_getCurrentRawStream
query = torch._C._cuda_isCurrentStreamCapturing
found = {
    "empty call": microseconds(lambda: None),
    "capture query": microseconds(query),
    "raw stream": microseconds(lambda: raw(0)),
    "_get_cache_buf, no lane": microseconds(lambda: utils._get_cache_buf("other", SIZE, DEVICE)),
}
try:
    import flashinfer.gemm_workspace as ws
except ImportError:
    operand = torch.zeros(1, device="cuda")
    found["_get_cache_buf"] = microseconds(lambda: utils._get_cache_buf(NAME, SIZE, DEVICE))
else:
    lane, at_least = ws.lane_workspace, ws._gemm_workspace_at_least
    start = time.perf_counter()
    view = lane(NAME, SIZE, DEVICE)
    found["first lane of the process, with the probe"] = (time.perf_counter() - start) * 1e6
    locked = ws.device_locked(lambda a: None)
    operand = torch.zeros(1, device="cuda")
    found["lane_workspace"] = microseconds(lambda: lane(NAME, SIZE, DEVICE))
    found["_gemm_workspace_at_least, fits"] = microseconds(lambda: at_least(view, SIZE))
    found["device_locked"] = microseconds(lambda: locked(operand))
    plan = object()
    hold = ws._retain_cudnn_graph_if_capturing
    fits = ws.device_locked(lambda a: (at_least(view, SIZE), hold(plan)))
    found["an execution that fits: lock, at_least, hold"] = microseconds(lambda: fits(operand))
    found["_retain_cudnn_graph_if_capturing, eager"] = microseconds(
        lambda: ws._retain_cudnn_graph_if_capturing(plan)
    )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = lane(NAME, SIZE, DEVICE)
        start = time.perf_counter()
        grown = at_least(captured, 300 << 20)
        found["growth from 40 to 300 MiB under capture"] = (time.perf_counter() - start) * 1e6
        grown[:8].add_(1)
        found["lane_workspace under capture"] = microseconds(
            lambda: lane(NAME, SIZE, DEVICE), 3_000
        )
        found["an execution that fits, under capture"] = microseconds(lambda: fits(operand), 3_000)
begun = []
for _ in range(300):
    graph = torch.cuda.CUDAGraph()
    start = time.perf_counter()
    with torch.cuda.graph(graph):
        operand.add_(1)
    begun.append(time.perf_counter() - start)
found["a capture of one kernel, median"] = sorted(begun)[150] * 1e6
found = {name: round(value, 3) for name, value in found.items()}
print(json.dumps({"torch": torch.__version__, "gpu": torch.cuda.get_device_name(), "us": found}))
"""


def measured(folder: str) -> object:
    """The figures of one installed wheel, in a process of its own."""
    path = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", MEASURE],
        env={**os.environ, "PYTHONPATH": path},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: workspace_cost.py RELEASE_FOLDER GRAFT_FOLDER")
    report = {"release": measured(sys.argv[1]), "graft": measured(sys.argv[2])}
    print(json.dumps({"python": platform.python_version(), **report}, indent=1))
