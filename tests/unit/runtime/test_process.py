"""Import and fork, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,  # importing torch on a busy machine
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_nothing_but_torch_and_makes_no_cuda_call() -> None:
    out = run(
        """
import sys, torch
def touched(*a, **k): raise AssertionError("CUDA call at import")
torch.cuda._lazy_init = touched
before = set(sys.modules)
import flashinfer.gemm_workspace as g
new = {m.partition(".")[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names)
print(sorted(new), "flashinfer.gemm" in sys.modules, torch.cuda.is_initialized())
g.lane_workspace("x", 8, "cpu")
print(sorted(m for m in set(sys.modules) - before if m.startswith("cuda")))
"""
    )
    assert out.split("\n")[:2] == ["['flashinfer'] False False", "[]"]


def test_a_forked_child_forgets_without_destroying() -> None:
    out = run(
        """
import os, threading, torch, flashinfer.gemm_workspace as g
torch.set_num_threads(1)  # OpenMP's threads do not survive a fork: torch.zeros would wait for them
from flashinfer.gemm_workspace import captures, semaphores, state
registry, slot = captures.registry, semaphores.Semaphore.take().address
view = g.lane_workspace("bmm_fp8_workspace", 8, "cpu")
class Plan:
    def __del__(self):
        if os.getpid() != parent: os.write(1, b"destroyed in the child\\n")
parent = os.getpid()
state.current.kept_plans[1] = Plan()
# A thread that the child will not have holds the locks across the fork.
held, leave = threading.Event(), threading.Event()
def hold():
    with state.current.lock, state.current.device_lock(-1):
        held.set(); leave.wait()
threading.Thread(target=hold, daemon=True).start(); held.wait()
pid = os.fork()
if pid == 0:
    s = g.stats()
    assert s["lanes"] == [] and s["plans_held"] == 0, s
    assert g.lane_workspace("bmm_fp8_workspace", 8, "cpu") is not view
    with state.current.device_lock(-1): pass
    assert captures.registry is not registry
    assert abs(semaphores.Semaphore.take().address - slot) > 64  # none of the parent's slab
    import gc; gc.collect()
    os.write(1, b"child fine\\n"); os._exit(0)
leave.set()
assert os.waitpid(pid, 0)[1] == 0
assert g.lane_workspace("bmm_fp8_workspace", 8, "cpu") is view
"""
    )
    assert out == "child fine\n"
