"""Facts for the tests: strategies, and an environment to vary."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from flashinfer.gemm_workspace.doctor import releases
from flashinfer.gemm_workspace.doctor.autotune import Cache, Entry
from flashinfer.gemm_workspace.doctor.facts import (
    Facts,
    FlashInfer,
    Fork,
    Gpu,
    JitCache,
    Library,
    Missing,
)
from flashinfer.gemm_workspace.doctor.logs import MARKS, Found, Log
from flashinfer.gemm_workspace.doctor.switches import OTHERS, SWITCHES

WHOLE = Fork("ws.1", "0.6.16.post3", {"grow-sites": 10})


def facts(**changed: Any) -> Facts:
    """A healthy machine with the fork, changed as asked."""
    return Facts(
        **{
            "gpus": (Gpu("NVIDIA H200", (9, 0)),),
            "driver": "580.159.04",
            "driver_cuda": "13.0",
            "flashinfer": flashinfer("0.6.16.post3", WHOLE),
            "import_error": None,
            "torch": "2.11.0+cu130",
            "torch_cuda": "13.0",
            "cudnn": 91900,
            "cudnn_of_torch": 91900,
            "cudnn_mapped": ("/site/nvidia/cudnn/lib/libcudnn.so.9",),
            "cudnn_found": (),
            "cudnn_frontend": "1.20.0",
            "cuda_bindings": "13.3.1",
            "cubin": Missing("flashinfer-cubin is not installed"),
            "jit_cache": Missing("flashinfer-jit-cache is not installed"),
            "jit": Missing("no compiled ops"),
            "engines": {"vllm": "0.28.0"},
            "metadata": {"flashinfer_version": "0.6.16.post3", "cudnn_version": "91900"},
            **changed,
        }
    )


def flashinfer(release: str, fork: Fork | Missing | None = None) -> FlashInfer:
    label = "+ws.1" if isinstance(fork, Fork) else ""
    return FlashInfer(release + label, release, "/site", fork)


_TEXT = st.text(max_size=20)
_MISSING = st.builds(Missing, _TEXT)
_VERSION = st.one_of(st.sampled_from(sorted(releases.KNOWN)), st.just("0.6.11"), _TEXT)


def _or_missing(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(_MISSING, strategy)


_FILES = st.lists(_TEXT, max_size=2).map(tuple)
_FORK = st.builds(Fork, _TEXT, _VERSION, st.dictionaries(_TEXT, st.integers()), _FILES, _FILES)
_FLASHINFER = st.builds(
    FlashInfer,
    _or_missing(_VERSION),
    _or_missing(_VERSION),
    _TEXT,
    st.one_of(st.none(), _MISSING, _FORK),
    _FILES,
)
_GPUS = st.lists(
    st.builds(Gpu, _TEXT, st.tuples(st.sampled_from([8, 9, 10, 12]), st.integers(0, 9))),
    max_size=3,
).map(tuple)
_BACKEND = st.one_of(st.sampled_from([8907, 91900, 92100, 92300, 92301]), st.integers(0, 10**6))

#: Any mix of known and missing facts.
any_facts: st.SearchStrategy[Facts] = st.builds(
    Facts,
    image=st.one_of(st.none(), _TEXT),
    gpus=_or_missing(_GPUS),
    driver=_or_missing(_TEXT),
    driver_cuda=_or_missing(_TEXT),
    flashinfer=_or_missing(_FLASHINFER),
    import_error=st.one_of(st.none(), _or_missing(_TEXT)),
    torch=_or_missing(_TEXT),
    torch_cuda=_or_missing(_TEXT),
    cudnn=_or_missing(_BACKEND),
    cudnn_of_torch=_or_missing(_BACKEND),
    cudnn_mapped=_or_missing(_FILES),
    cudnn_found=_or_missing(
        st.lists(st.builds(Library, _TEXT, _or_missing(_TEXT)), max_size=2).map(tuple)
    ),
    cudnn_frontend=_or_missing(_VERSION),
    cuda_bindings=_or_missing(_TEXT),
    cubin=_or_missing(_VERSION),
    jit_cache=_or_missing(_VERSION),
    jit=_or_missing(
        st.builds(
            JitCache, _TEXT, st.integers(0, 9), st.integers(0, 9), st.one_of(st.none(), _TEXT)
        )
    ),
    engines=_or_missing(st.dictionaries(_TEXT, _TEXT, max_size=2)),
    environment=st.dictionaries(st.sampled_from([*SWITCHES, *OTHERS]), _TEXT, max_size=4),
    metadata=_or_missing(st.dictionaries(_TEXT, _TEXT, max_size=3)),
)

any_cache = st.one_of(
    _MISSING,
    st.builds(
        Cache,
        _TEXT,
        st.lists(
            st.builds(
                Entry,
                st.sampled_from(["fp8_gemm", "fp4_gemm", "moe"]),
                st.sampled_from(["CudnnFp8GemmRunner", "CublasFp8GemmRunner"]),
                st.one_of(st.none(), st.sampled_from([1, 512])),
                st.sampled_from(["((1, 512))", "((1, 1))"]),
                st.booleans(),
            ),
            max_size=4,
        ).map(tuple),
        st.one_of(st.none(), st.dictionaries(_TEXT, st.one_of(st.none(), _TEXT), max_size=3)),
        st.integers(0, 2),
        _TEXT,
    ),
)
any_log = st.one_of(
    _MISSING,
    st.builds(
        Log,
        _TEXT,
        st.integers(0),
        st.dictionaries(
            st.sampled_from(sorted(MARKS)), st.builds(Found, st.integers(1), st.integers(1), _TEXT)
        ),
        st.one_of(st.none(), _TEXT),
    ),
)


def site_packages(
    folder: Path, release: str = "0.6.16.post3", *, fork: bool = False, **beside: str
) -> Path:
    """Stand-ins for installed packages below ``folder``; ``beside``: name -> version."""
    package = folder / "flashinfer"
    runtime = package / "gemm_workspace"
    gemm = package / "gemm"
    gemm.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "_build_meta.py").write_text(f'"""Meta."""\n__version__ = "{release}"\n')
    (gemm / "gemm_base.py").write_text("after = 1\n" if fork else "before = 1\n")
    version = f"{release}+ws.1" if fork else release
    metadata = distribution(folder, "flashinfer_python", version)
    if fork:
        runtime.mkdir()
        (runtime / "__init__.py").write_text("")
        (metadata / "graft.json").write_text(json.dumps(provenance(release)))
    for name, each in beside.items():
        distribution(folder, name, each)
    return folder


def distribution(folder: Path, name: str, version: str) -> Path:
    metadata = folder / f"{name}-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
    )
    return metadata


def provenance(release: str) -> dict[str, Any]:
    """In the shape of the build's graft.json."""

    def sha(text: str) -> str:
        return hashlib.sha256(text.encode()).hexdigest()

    path = "flashinfer/gemm/gemm_base.py"
    return {
        "label": "ws.1",
        "base": {"version": release},
        "edits": [{"name": "grow-sites", "sites": {path: [{"line": 1, "what": "x"}] * 8}}],
        "changed": {
            path: {"before": sha("before = 1\n"), "after": sha("after = 1\n")},
            "flashinfer_python.dist-info/METADATA": {"before": "x", "after": "y"},
        },
        "added": {"flashinfer/gemm_workspace/__init__.py": sha("")},
    }
