"""The built library through tvm-ffi, from Python, over stand-ins of the vendor libraries.

``make native`` runs it: NATIVE_BUILD names the folder that CMake built in. The library attaches to
what its process has loaded, so everything here runs in processes of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

BUILD = Path(os.environ.get("NATIVE_BUILD", "-")).resolve()
ROOT = Path(__file__).resolve().parents[2]
FAKES = {
    "cudart": "fake_cudart/libcudart.so.13",
    "cublaslt": "fake_cublaslt/libcublasLt.so.13",
    "cudnn": "fake_cudnn/libcudnn.so.9",
}

pytestmark = pytest.mark.skipif(
    not (BUILD / "_native.so").exists(), reason="needs NATIVE_BUILD, see `make native`"
)

START = """
import ctypes, logging, sys, torch
from pathlib import Path
logging.basicConfig(format="LOG %(message)s", stream=sys.stdout)
torch.version.cuda = "13.0"
loaded = {name: ctypes.CDLL(path) for name, path in FAKES.items()}
from flashinfer.gemm_workspace import native
native.FILE = LIBRARY
A = torch.zeros(3, 16, 32, dtype=torch.float8_e4m3fn)
B = torch.zeros(3, 48, 32, dtype=torch.float8_e4m3fn).transpose(-2, -1)
OUT = torch.zeros(3, 16, 48, dtype=torch.bfloat16)
SA, SB = torch.ones(1), torch.ones(1)
SPACE = torch.zeros(4096, dtype=torch.uint8)
ARGUMENTS = (A, B, OUT, SA, SB, SPACE, 0x1234)
"""


def run(program: str, *fakes: str, **environment: str) -> str:
    """The output of ``program`` in a process that has loaded ``fakes``."""
    paths = {name: str(BUILD / "tests/native" / FAKES[name]) for name in fakes}
    head = f"FAKES = {paths!r}\nLIBRARY = {str(BUILD / '_native.so')!r}\n" + textwrap.dedent(START)
    done = subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(program)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_a_call_by_signature() -> None:
    out = run(
        """
        matmul = native.cublaslt("bmm_fp8", ARGUMENTS)
        found = native.library()
        n = matmul.launcher.number
        # In the places of (A, B, SA, SB, OUT).
        places = tuple((0, 1, 4, 2, 3)[i] for i in matmul.operands)
        found.remember(n, 7, places, None, None, A, B, SA, SB, OUT)
        made = tuple(-1 if i == 4 else i for i in places)
        found.remember(n, 8, made, (3, 16, 48), torch.bfloat16, A, B, SA, SB)
        print("no workspace", found.call(7, A, B, SA, SB, OUT))
        found.use_workspace(n, 0, SPACE.data_ptr(), SPACE.numel())
        print("given", found.call(7, A, B, SA, SB, OUT))
        result = found.call(8, A, B, SA, SB)
        print("made", type(result), tuple(result.shape), result.dtype, result.stride())
        print("another", found.call(7, A[:2], B, SA, SB, OUT), found.call(9, A, B, SA, SB, OUT))
        print("none", found.call(7, None, B, SA, SB, OUT), found.call(7, "a", B, SA, SB, OUT))
        print({name: value for name, value in native.report().items() if name != "plan_bytes"})
        del matmul
        native.collect()
        print("forgotten", found.call(7, A, B, SA, SB, OUT), native.report()["launchers"])
        """,
        "cudart",
        "cublaslt",
        "cudnn",
    )
    assert out.splitlines() == [
        "no workspace 4",
        "given None",
        "made <class 'torch.Tensor'> (3, 16, 48) torch.bfloat16 (768, 48, 1)",
        "another 1 1",
        "none 1 1",
        "{'loaded': True, 'cublaslt': True, 'cudnn': True, 'launchers': 1, 'signatures': 2, "
        "'launches': 2}",
        "forgotten 1 0",
    ]


def test_launches_by_address_and_what_they_refuse() -> None:
    out = run(
        """
        matmul = native.cublaslt("bmm_fp8", ARGUMENTS)
        found = native.library()
        at = [ARGUMENTS[i].data_ptr() for i in matmul.operands]
        number = matmul.launcher.number
        print(matmul.operands, matmul.launcher.workspace_bytes, found.algorithm(number))
        print(found.launch(number, 0, SPACE.data_ptr(), 4096, *at))
        took = found.timed(3, number, 0, SPACE.data_ptr(), 4096, *at)
        print(len(took), all(each > 0 for each in took))
        for wrong in (
            (number, 0, SPACE.data_ptr(), 4095, *at),
            (number, 0, SPACE.data_ptr(), 4096, *at[:4]),
            (number + 1, 0, SPACE.data_ptr(), 4096, *at),
            (number, 0, SPACE, 4096, *at),
            (number,),
        ):
            try:
                found.launch(*wrong)
            except RuntimeError as error:
                print("refused:", str(error).splitlines()[0])
        """,
        "cudart",
        "cublaslt",
        "cudnn",
    )
    assert out.splitlines() == [
        f"(1, 0, 2, 4, 3) 4096 {b'A' * 64!r}",
        "None",
        "3 True",
        "refused: a workspace of 4095 bytes, wanted 4096",
        "refused: 4 operands are given, wanted 5",
        "refused: launcher 2 is forgotten",
        "refused: launch() takes integers only",
        "refused: launch() of so many operands",
    ]


def test_the_very_algorithm() -> None:
    out = run(
        """
        algorithms = torch.arange(256, dtype=torch.uint8)
        matmul = native.cublaslt("bmm_fp8_run_with_algo", (*ARGUMENTS, algorithms, 2))
        print(native.library().algorithm(matmul.launcher.number) == bytes(range(128, 192)))
        plain = torch.zeros(16, 32, dtype=torch.bfloat16), torch.zeros(48, 32, dtype=torch.bfloat16)
        rest = torch.zeros(16, 48), SPACE, 0x1234, algorithms
        name = "mm_bf16_cublaslt_run_with_algo"
        matmul = native.cublaslt(name, (*plain, *rest, 0))
        print(native.library().algorithm(matmul.launcher.number) == bytes(range(64)))
        print(matmul.operands)
        doubled = plain[0].double(), plain[1]
        for arguments in ((*plain, *rest, 4), (*plain, *rest, -1), (*doubled, *rest, 0)):
            try:
                native.cublaslt(name, arguments)
            except native.NativeRefused as error:
                print("refused:", error)
        """,
        "cudart",
        "cublaslt",
        "cudnn",
    )
    assert out.splitlines() == [
        "True",
        "True",
        "(1, 0, 2)",
        "refused: no algorithm at 4",
        "refused: no algorithm at -1",
        "refused: a tensor of float64, wanted one of float8_e4m3fn, float8_e5m2, bfloat16, "
        "float16, float32",
    ]


@pytest.mark.parametrize(
    ("fakes", "environment", "line"),
    [
        ((), {}, "LOG No native launches, Python's serve: libcudart.so.13 is not loaded; wanted "),
        (
            ("cudart", "cudnn"),
            {},
            "LOG No native launches of cuBLASLt, Python's serve: libcublasLt.so.13 is not loaded",
        ),
        (
            ("cudart", "cublaslt", "cudnn"),
            {"FAKE_CUDNN_VERSION": "92100"},
            "LOG No native launches of cuDNN, Python's serve: cuDNN 92100 is loaded, wanted a 9.19",
        ),
    ],
)
def test_one_line_for_what_does_not_fit(
    fakes: tuple[str, ...], environment: dict[str, str], line: str
) -> None:
    lines = run("[native.library() for _ in range(3)]", *fakes, **environment).splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(line)


def test_switched_off() -> None:
    out = run("print(native.library())", FLASHINFER_GEMM_WORKSPACE_NATIVE="0")
    assert out == "None\n"


def test_a_child_has_none() -> None:
    out = run(
        """
        import os
        assert native.library() is not None
        if os.fork() == 0:
            print(native.library(), flush=True)
            os._exit(0)
        os.wait()
        """,
        "cudart",
        "cublaslt",
        "cudnn",
    )
    assert out == "None\n"


def test_any_order_of_calls_does_what_a_plain_model_does() -> None:
    """Launchers are made, remembered, given workspaces, unlearnt and forgotten in any order; each
    call comes to what a dict of signatures says."""
    run(
        """
        import hypothesis
        from hypothesis import strategies as st

        KNOWN = native.library()
        A2, OUT2 = A[:2], OUT[:2]
        TENSORS = (A, B, SA, SB, OUT), (A2, B[:2], SA, SB, OUT2)
        MADE = st.integers(0, 3)
        steps = st.lists(st.one_of(
            st.tuples(st.just("make")),
            st.tuples(st.just("remember"), MADE, st.integers(0, 2), st.integers(0, 1)),
            st.tuples(st.just("use"), MADE),
            st.tuples(st.just("unlearn"), MADE),
            st.tuples(st.just("forget"), MADE),
            st.tuples(st.just("call"), st.integers(0, 2), st.integers(0, 1)),
            st.tuples(st.just("capture"), st.booleans()),
        ), max_size=40)

        base = [0]

        @hypothesis.settings(max_examples=300, deadline=None, database=None)
        @hypothesis.given(steps)
        def check(steps):
            base[0] += 10  # variants of this example alone
            made, alive, known, given, capturing = [], set(), {}, set(), False
            launches = KNOWN.counts()[2]
            for what, *how in steps:
                if what == "make":
                    made.append(KNOWN.prepare_cublaslt(
                        1, B.dtype, A.dtype, OUT.dtype, 1, 48, 16, 32, 5, 5, 64, b""))
                    alive.add(made[-1])
                elif what == "capture":
                    (capturing,) = how
                    loaded["cudart"].fake_capturing(ctypes.c_void_p(0 if capturing else -1))
                elif what == "call":
                    variant, tensors = how
                    number = known.get((variant, tensors))
                    expected = (
                        1 if number is None else 3 if capturing else
                        4 if number not in given else None
                    )
                    launches += expected is None
                    assert KNOWN.call(base[0] + variant, *TENSORS[tensors]) == expected
                elif how[0] >= len(made):
                    continue
                else:
                    number = made[how[0]]
                    was_alive = number in alive
                    try:
                        if what == "remember":
                            _, variant, tensors = how
                            KNOWN.remember(
                                number, base[0] + variant, (1, 0, 4, 2, 3), None, None,
                                *TENSORS[tensors])
                            done, known[variant, tensors] = True, number
                        elif what == "use":
                            KNOWN.use_workspace(number, 0, SPACE.data_ptr(), 64)
                            done = True
                            given.add(number)
                        else:
                            done = getattr(KNOWN, what)(number)
                            if what == "forget":
                                alive.discard(number)
                                given.discard(number)
                            known = {k: n for k, n in known.items() if n != number}
                    except RuntimeError as error:
                        assert "is forgotten" in str(error)
                        done = False
                        known = {k: n for k, n in known.items() if n != number}
                    assert bool(done) == was_alive
                assert tuple(KNOWN.counts()) == (len(alive), len(known), launches)
            for number in alive:
                KNOWN.forget(number)
            loaded["cudart"].fake_capturing(ctypes.c_void_p(-1))

        check()
        """,
        "cudart",
        "cublaslt",
        "cudnn",
    )
