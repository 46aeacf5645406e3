"""The verifier catches what the build must never let out.

The real grafted wheel is changed in one place, and unless the change is to the bytes alone its
provenance and RECORD are made to agree, so that only the one check can see it.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from wheelfile import (
    Members,
    dist_info,
    in_memory,
    minimal,
    read,
    with_provenance,
    with_record,
)

from graft.errors import GraftError
from graft.verify import SITES_LEFT, verify

pytestmark = pytest.mark.release

BASE = "0.6.16.post3"
GEMM = "flashinfer/gemm/gemm_base.py"
BF16_FP4 = "flashinfer/gemm/gemm_bf16_fp4_cudnn.py"
GROUPED = "flashinfer/grouped_mm/cudnn/core.py"
LOW_LATENCY = "flashinfer/trtllm_low_latency_gemm.py"
SVDQUANT = "flashinfer/gemm/gemm_svdquant.py"
UTILS = "flashinfer/utils.py"
TUNER = "flashinfer/autotuner/autotuner.py"
UNTOUCHED = "flashinfer/gemm/routergemm.py"
NAMES = "flashinfer/gemm_workspace/names.py"


@pytest.fixture(scope="session")
def good(grafted: Callable[[str], Path]) -> Members:
    """The members of a wheel that holds."""
    return read(grafted(BASE))


@pytest.fixture(scope="session")
def modules(good: Members) -> Members:
    """The same without ``flashinfer/data``, which is most of it: to read what modules mean."""
    path = f"{dist_info(good)}/graft.json"
    provenance = json.loads(good[path])
    provenance["base"]["version"] = "0.6.16.post9"  # of an unknown one only graft.json tells

    def members() -> Members:
        text = json.dumps(provenance).encode()
        kept = {p: data for p, data in good.items() if not p.startswith("flashinfer/data/")}
        return with_record({**kept, path: text})

    (_, problem) = problems_of(members())
    found = re.search("digest ([0-9a-f]{64}), wanted", problem)
    assert found
    provenance["base"]["record_sha256"] = found[1]
    verify(in_memory(members()))
    return members()


def problems_of(members: Members) -> list[str]:
    with pytest.raises(GraftError) as caught:
        verify(in_memory(members))
    return [caught.value.headline, *caught.value.problems]


def once(data: bytes, pattern: str, text: str) -> bytes:
    """Replace the first match only; there must be one."""
    changed, count = re.subn(pattern, text, data.decode(), count=1, flags=re.MULTILINE)
    assert count
    return changed.encode()


def test_the_wheel_as_built_holds(good: Members) -> None:
    proofs = {proof.what: proof for proof in verify(in_memory(good))}
    assert proofs[SITES_LEFT].count == 0
    assert proofs["workspaces taken from a lane"].count == 19
    assert proofs["executions that hold their plan, under the device's lock"].count == 13
    assert str(proofs[SITES_LEFT]).startswith(f"{SITES_LEFT}: 0 (")


# -- bytes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [UNTOUCHED, "flashinfer/data/include/flashinfer/page.cuh"])
def test_a_flipped_byte(good: Members, path: str) -> None:
    data = bytes([good[path][0] ^ 1]) + good[path][1:]
    told = problems_of({**good, path: data})
    assert [path in line for line in told].count(True) == 1
    # RECORD now tells the new bytes: the release's own digest does not.
    (headline, problem) = problems_of(with_record({**good, path: data}))
    assert "does not hold" in headline
    assert f"this is not release {BASE}: digest " in problem


@pytest.mark.parametrize("which", [GEMM, NAMES, "METADATA", "NOTICE.gemm_workspace"])
def test_a_flipped_byte_of_a_file_that_the_graft_made(good: Members, which: str) -> None:
    (path,) = [name for name in good if name.endswith(which)]
    told = problems_of(with_record({**good, path: good[path] + b"\n"}))
    assert any(line.startswith(f"{path}: listed as ") for line in told)


def test_another_release_in_the_provenance(good: Members) -> None:
    path = f"{dist_info(good)}/graft.json"
    provenance = json.loads(good[path])
    provenance["base"]["version"] = "0.6.16.post4"
    told = problems_of(with_record({**good, path: json.dumps(provenance).encode()}))
    assert any("this is not release 0.6.16.post4" in line for line in told)


def test_a_missing_row(good: Members) -> None:
    own = f"{dist_info(good)}/RECORD"
    lines = good[own].decode().splitlines(keepends=True)
    text = "".join(line for line in lines if not line.startswith(f"{UNTOUCHED},"))
    assert f"{UNTOUCHED}: in the archive only" in problems_of({**good, own: text.encode()})


def test_a_missing_file(good: Members) -> None:
    members = {path: data for path, data in good.items() if path != UNTOUCHED}
    assert f"{UNTOUCHED}: in the RECORD only" in problems_of(members)
    told = problems_of(with_record(members))
    assert any("this is not release" in line for line in told)


def test_an_extra_file(good: Members) -> None:
    extra = {"flashinfer/extra.py": b"x = 1\n"}
    assert "flashinfer/extra.py: in the archive only" in problems_of({**good, **extra})
    told = problems_of(with_record({**good, **extra}))
    assert any("this is not release" in line for line in told)


def test_a_row_that_comes_twice(good: Members) -> None:
    own = f"{dist_info(good)}/RECORD"
    text = good[own] + good[own].splitlines(keepends=True)[0]
    assert "RECORD or the archive names a file twice" in problems_of({**good, own: text})


# -- what the modules mean ---------------------------------------------------------------------

TAMPERED = [
    ("resize_ back", UNTOUCHED, r"\Z", "\ndef f(w, n):\n    w.resize_(n)\n", "grows with resize_"),
    (
        "resize_ back in a site",
        BF16_FP4,
        r"workspace_buffer = _gemm_workspace_at_least\(workspace_buffer, workspace_size\)",
        "workspace_buffer.resize_(workspace_size)",
        "grows with resize_",
    ),
    ("no guard", GEMM, r"^@guard_plan_build\n", "", "builds plans unguarded"),
    ("no guard in grouped", GROUPED, r"^@guard_plan_build\n", "", "builds plans unguarded"),
    (
        "guard above the cache",
        GEMM,
        r"^(@functools\.(?:lru_)?cache.*\n)@guard_plan_build\n",
        r"@guard_plan_build\n\1",
        "builds plans unguarded",
    ),
    (
        "bare handle",
        GROUPED,
        r"create_cudnn_handle\(cudnn\.create_handle, \w+\)",
        "cudnn.create_handle()",
        "creates a handle unguarded",
    ),
    ("no lock", GEMM, r"^@device_locked\n", "", "without the device's lock"),
    ("no lock in bf16_fp4", BF16_FP4, r"^@device_locked\n", "", "without the device's lock"),
    (
        "no hold",
        GEMM,
        r"^    _retain_cudnn_graph_if_capturing\(graph\)\n",
        "",
        "of a plan that is not held",
    ),
    (
        "no hold in grouped",
        GROUPED,
        r"^ +_retain_cudnn_graph_if_capturing\(graph\)\n",
        "",
        "of a plan that is not held",
    ),
    ("no lane", GEMM, r"= lane_workspace\(", "= _get_cache_buf(", "from the shared cache"),
    (
        "no lane, low latency",
        LOW_LATENCY,
        r"= lane_workspace\(",
        "= _get_cache_buf(",
        "from the shared cache",
    ),
    ("strange lane", GEMM, r'"mm_fp4_workspace"', '"my_workspace"', "a lane the runtime lacks"),
    (
        "swallows",
        GEMM,
        r"^ +except CudnnCaptureUnsafeError:\n +raise\n",
        "",
        "retry swallows capture errors",
    ),
    (
        "default",
        GEMM,
        r"^DEFAULT_WORKSPACE_SIZE = 40",
        "DEFAULT_WORKSPACE_SIZE = 32",
        "default of 33554432 bytes",
    ),
    (
        "default of svdquant",
        SVDQUANT,
        r"^DEFAULT_WORKSPACE_SIZE = 40",
        "DEFAULT_WORKSPACE_SIZE = 32",
        "default of 33554432 bytes",
    ),
    (
        "default that is no number",
        GEMM,
        r"^DEFAULT_WORKSPACE_SIZE = .*",
        "DEFAULT_WORKSPACE_SIZE = print",
        "default",
    ),
    (
        "no gate in dispatch",
        GEMM,
        r"^    runner_names = gate_sm12x_cudnn\(runner_names, a\)\n",
        "",
        "the SM12x gate is in ['_heuristic_func_bmm_fp8'], not",
    ),
    (
        "no gate in the heuristic",
        GEMM,
        r"return gate_sm12x_cudnn\((\w+), A\)",
        r"return \1",
        "the SM12x gate is in ['fp8_gemm_sm100'], not",
    ),
    ("not prepared", GEMM, r"^@prepared_launches\n", "", "is not prepared"),
    (
        "prepared inside",
        GEMM,
        r"^@prepared_launches\n(@backend_requirement\((?:.*\n)+?\)\n)",
        r"\1@prepared_launches\n",
        "is not prepared",
    ),
    ("not noted", GEMM, r"watched\(graph\)", "graph", "a launch that is not noted"),
    ("no runner noted", TUNER, r"^    @noted_runner\n", "", "0 runners' calls are noted"),
    ("no such op", GEMM, r"^def mm_fp8\(", "def mm_fp9(", "the public ops are"),
    (
        "no import",
        GEMM,
        r"^from \.\.gemm_workspace import \([^)]*\)\n",
        "",
        "gemm_base.py does not give the fork's CudnnPlanBuildInCaptureError",
    ),
    (
        "no import in utils",
        UTILS,
        r"^from \.gemm_workspace import \([^)]*\)\n",
        "",
        "uses cache_buffer without importing it",
    ),
    ("the cache drops again", UTILS, r"return cache_buffer\(", "return fresh(", "drops what it"),
    ("broken syntax", GROUPED, r"^import", "import import", "does not parse"),
    ("a null byte", GROUPED, r"^import", "import\0", "does not parse"),
    ("no arguments", GEMM, r"lane_workspace\([^)]*\)", "lane_workspace()", "a lane the runtime"),
]


@pytest.mark.parametrize(
    ("path", "pattern", "text", "told"),
    [row[1:] for row in TAMPERED],
    ids=[row[0] for row in TAMPERED],
)
def test_tampered(modules: Members, path: str, pattern: str, text: str, told: str) -> None:
    changed = once(modules[path], pattern, text)
    problems = problems_of(with_provenance({**modules, path: changed}, modules))
    assert any(told in problem and "graft.json or RECORD" not in problem for problem in problems)
    # Nothing but that: provenance and RECORD do agree.
    assert not [line for line in problems if "listed as" in line or "not release" in line]


def test_a_lane_that_the_runtime_does_not_have(modules: Members) -> None:
    changed = once(modules[NAMES], '"mm_bf16_workspace"', '"mm_bf16_wrong"')
    problems = problems_of(with_provenance({**modules, NAMES: changed}, modules))
    assert "is not the one of ws." in problems[1]
    assert f"{GEMM}:" in problems[2]
    assert "a lane the runtime lacks" in problems[2]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("flashinfer/gemm_workspace/lanes.py", "\nworkspace.resize_(size)\n"),
        ("flashinfer/gemm_workspace/more.py", "raise SystemExit\n"),
    ],
)
def test_another_runtime(modules: Members, path: str, text: str) -> None:
    """What was added is what this label stands for, whatever provenance and RECORD say."""
    changed = {**modules, path: modules.get(path, b"") + text.encode()}
    (_, problem) = problems_of(with_provenance(changed, modules))
    assert "flashinfer/gemm_workspace/ is not the one of ws." in problem


def test_no_code_of_the_wheel_is_run(modules: Members, tmp_path: Path) -> None:
    witness = tmp_path / "ran"
    # Reaches the os module without a single built-in name.
    mkdir = (
        "[c for c in ().__class__.__base__.__subclasses__() if c.__name__ == '_wrap_close']"
        f"[0].__init__.__globals__['mkdir']({str(witness)!r})"
    )
    eval(mkdir, {"__builtins__": {}})
    witness.rmdir()
    for path, pattern, text in (
        (NAMES, r"\Z", f"\n{mkdir}\n"),
        (NAMES, r"^LANE_NAMES = ", f"LANE_NAMES = {mkdir} or "),
        (GEMM, r"^DEFAULT_WORKSPACE_SIZE = ", f"DEFAULT_WORKSPACE_SIZE = {mkdir} or "),
    ):
        changed = once(modules[path], pattern, text)
        with contextlib.suppress(GraftError):
            verify(in_memory(with_provenance({**modules, path: changed}, modules)))
        assert not witness.exists()


def test_no_runtime_at_all(modules: Members) -> None:
    members = {p: d for p, d in modules.items() if not p.startswith("flashinfer/gemm_workspace/")}
    assert problems_of(with_provenance(members, modules))


def test_every_problem_is_listed(modules: Members) -> None:
    changed = modules[GEMM].replace(b"@device_locked\n", b"").replace(b"@guard_plan_build\n", b"")
    problems = problems_of(with_provenance({**modules, GEMM: changed}, modules))
    assert sum("without the device's lock" in problem for problem in problems) == 8
    assert sum("unguarded" in problem for problem in problems) == 8


# -- no grafted wheel at all -------------------------------------------------------------------


def test_not_a_zip(tmp_path: Path) -> None:
    path = tmp_path / "a.whl"
    path.write_bytes(b"not a zip")
    with pytest.raises(GraftError, match="not a readable wheel"):
        verify(path)


def test_not_grafted(release_wheel: Callable[[str], Path]) -> None:
    with pytest.raises(GraftError, match="not a grafted wheel"):
        verify(release_wheel(BASE))


def test_no_dist_info() -> None:
    with pytest.raises(GraftError, match="0 dist-info folders"):
        verify(in_memory({"flashinfer/__init__.py": b""}))


SMALL = minimal("9.9+ws.1")
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(
                ["base", "version", "record_sha256", "added", "changed", "before", "after"]
            )
            | st.sampled_from(sorted(SMALL)),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(JUNK)
def test_junk_in_the_provenance(junk: Any) -> None:
    check_junk(json.dumps(junk).encode())


@given(added=JUNK, changed=JUNK, base=JUNK)
def test_junk_in_the_right_places(added: Any, changed: Any, base: Any) -> None:
    check_junk(json.dumps({"base": base, "added": added, "changed": changed}).encode())


@pytest.mark.parametrize("text", [b"", b"{", b"\xff", b"[" * 100_000, b"1" * 5000])
def test_junk_that_is_no_json(text: bytes) -> None:
    check_junk(text)


@given(st.text(st.sampled_from('a,"\n\r\0é'), max_size=20))
def test_junk_in_the_record(text: str) -> None:
    folder = dist_info(SMALL)
    provenance = {"base": {"version": "9.9", "record_sha256": ""}, "added": {}, "changed": {}}
    members = {
        **SMALL,
        f"{folder}/graft.json": json.dumps(provenance).encode(),
        f"{folder}/RECORD": text.encode(),
    }
    with pytest.raises(GraftError):
        verify(in_memory(members))


def check_junk(text: bytes) -> None:
    path = f"{dist_info(SMALL)}/graft.json"
    with pytest.raises(GraftError):
        verify(in_memory(with_record({**SMALL, path: text})))


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_a_damaged_archive(data: st.DataObject) -> None:
    path = f"{dist_info(SMALL)}/graft.json"
    text = {"base": {"version": "9.9", "record_sha256": ""}, "added": {}, "changed": {}}
    raw = bytearray(in_memory(with_record({**SMALL, path: json.dumps(text).encode()})).read())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with pytest.raises(GraftError):
        verify(io.BytesIO(bytes(raw)))
