"""Cache files of the autotuner: good ones, and everything else that may lie there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashinfer.gemm_workspace.doctor import autotune, folders
from flashinfer.gemm_workspace.doctor.autotune import Cache, Entry, read, read_file
from flashinfer.gemm_workspace.doctor.facts import Missing

META = {"flashinfer_version": "0.6.16.post3", "cudnn_version": "91900", "gpu": "NVIDIA RTX"}


def key(op: str, runner: str, m: int, k: int = 5120, extras: str = "") -> str:
    shapes = f"((1, {m}, {k}), (1, {k}, 64), (1,), (1,), (1, -1, 64), (-1,))"
    return f"('{op}', '{runner}', {shapes}{extras})"


EXTRAS = ", (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.bfloat16)"


def write(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def one(path: Path) -> Cache:
    cache = read_file(path)
    assert isinstance(cache, Cache), cache
    return cache


@pytest.mark.parametrize("extras", ["", EXTRAS, ", ()"])
def test_entries(tmp_path: Path, extras: str) -> None:
    content = {
        "_metadata": META,
        key("fp8_gemm", "CudnnFp8GemmRunner", 512, extras=extras): [
            "CudnnFp8GemmRunner",
            [11, [[2, 1]]],
        ],
        key("fp8_gemm", "CublasFp8GemmRunner", 8, extras=extras): ["CublasFp8GemmRunner", 3],
        "('fp4_gemm', 'CutlassFp4GemmRunner', ((16, 64), (64, 8), (0,)), ())": [
            "CutlassFp4GemmRunner",
            -1,
        ],
    }
    cache = one(write(tmp_path / "c.json", content))
    assert [(e.op, e.runner, e.m, e.plain_index) for e in cache.entries] == [
        ("fp8_gemm", "CudnnFp8GemmRunner", 512, False),
        ("fp8_gemm", "CublasFp8GemmRunner", 8, True),
        ("fp4_gemm", "CutlassFp4GemmRunner", 16, False),
    ]
    assert cache.metadata == META
    assert cache.odd == 0


def test_metadata_only(tmp_path: Path) -> None:
    """What vLLM saves when nothing was tuned."""
    assert one(write(tmp_path / "c.json", {"_metadata": META})).entries == ()


def test_no_metadata_and_the_records_of_later_releases(tmp_path: Path) -> None:
    cache = one(write(tmp_path / "c.json", {"_records": {"x": 1}, key("g", "R", 1): ["R", 0]}))
    assert cache.metadata is None
    assert len(cache.entries) == 1
    assert cache.odd == 0


def test_edited_entries_are_counted(tmp_path: Path) -> None:
    content = {
        key("fp8_gemm", "R", 1): ["R", 0],
        "fp8_gemm": ["R", 0],
        key("fp8_gemm", "R", 2): "R",
        key("fp8_gemm", "R", 3): ["R"],
        key("fp8_gemm", "R", 4): [7, 0],
        "('fp8_gemm', 'R', ((1, 2), x))": ["R", 0],
    }
    cache = one(write(tmp_path / "c.json", content))
    assert (len(cache.entries), cache.odd) == (1, 5)
    assert cache.odd_example == "fp8_gemm"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "empty"),
        (" \n", "empty"),
        ('{"_metadata": {"gpu": "NVI', "cut short or edited, not JSON"),
        ("[1, 2]", "a list and no object"),
        ("3", "a int and no object"),
        ('{"name": "package.json"}', None),
        ('{"_other": 1}', "not of an autotuner"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", None),
    ],
)
def test_what_is_no_cache(tmp_path: Path, content: str, reason: str | None) -> None:
    path = write(tmp_path / "c.json", content)
    cache = read_file(path)
    if reason is None:  # an object whose entries are odd, or not JSON on newer Pythons
        assert isinstance(cache, Missing) or cache.odd == 1
    else:
        assert isinstance(cache, Missing)
        assert str(path) in cache.reason
        assert reason in cache.reason


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, reason in (
        (tmp_path / "none", "No such file"),
        (tmp_path / "pipe", "neither a file nor a folder"),
        (tmp_path, "no cache file in it"),
        (Path("a\0b"), "null"),
    ):
        (found,) = read(path)
        assert isinstance(found, Missing)
        assert reason in found.reason
    os.mkfifo(tmp_path / "pipe.json")
    (found,) = read(tmp_path)
    assert isinstance(found, Missing)
    assert "not a file" in found.reason


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    with path.open("wb") as file:
        file.truncate(autotune.LARGEST + 1)  # sparse
    found = read_file(path)
    assert isinstance(found, Missing)
    assert "more than 64 MiB" in found.reason


def test_a_huge_folder_is_not_read_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "MOST_FILES", 2)
    for number in range(4):
        write(tmp_path / f"{number}.json", {"_metadata": META})
    found = read(tmp_path)
    assert len(found) == 3
    assert isinstance(found[-1], Missing)
    assert "more than 2 JSON files" in found[-1].reason


def test_the_newer_form(tmp_path: Path) -> None:
    environment = tmp_path / "v2" / "0123"
    write(environment / "manifest.json", {**META, "cache_schema": "v2"})
    entry = {"key": key("fp8_gemm", "R", 512), "runner": "R", "tactic": 4}
    write(environment / "entries" / "a.json", entry)
    write(environment / "entries" / "b.json", '{"key": ')
    write(environment / "entries" / "c.json", {"key": 5, "runner": "R"})
    (cache,) = read(tmp_path)
    assert isinstance(cache, Cache)
    assert cache.path == str(environment / "entries")
    assert [entry.m for entry in cache.entries] == [512]
    assert cache.odd == 2
    assert cache.metadata is not None
    assert cache.metadata["gpu"] == "NVIDIA RTX"
    (alone,) = read(environment / "entries" / "a.json")
    assert isinstance(alone, Cache)
    assert len(alone.entries) == 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
KEYS = st.one_of(
    st.text(),
    st.from_regex(r"\('\w*', '\w*', \(\([\d, -]*\)[ ,]*\)+\)", fullmatch=True),
    st.sampled_from(["_metadata", "key", "runner", "tactic"]),
)


@given(st.dictionaries(KEYS, JSON))
def test_any_object_reads(tmp_path_factory: pytest.TempPathFactory, content: Any) -> None:
    path = tmp_path_factory.mktemp("any") / "c.json"
    path.write_text(json.dumps(content))
    cache = read_file(path)
    if isinstance(cache, Cache):
        mine = {name for name in content if not name.startswith("_")}
        alone = "key" in content and "runner" in content
        assert len(cache.entries) + cache.odd == (1 if alone else len(mine))


@given(st.binary())
def test_any_bytes_read(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("any") / "c.json"
    path.write_bytes(content)
    read(path)


@given(
    st.sampled_from(["fp8_gemm", "bf16_gemm"]),
    st.lists(st.lists(st.integers(-1, 1 << 40), max_size=4).map(tuple), max_size=4).map(tuple),
    st.text(),
)
def test_the_text_of_a_tuple_is_read_back(op: str, shapes: tuple[Any, ...], extra: str) -> None:
    entry = autotune._entry(str((op, "R", shapes, (extra,))), ["R", 1])
    assert entry is not None
    rows = shapes[0][-2] if shapes and len(shapes[0]) >= 2 else None
    assert entry == Entry(op, "R", rows, str(shapes), True)


@pytest.mark.parametrize("text", ["9" * 90_000, "9, " * 30_000, "(" * 90_000, "(1, " * 20_000])
def test_a_key_made_to_be_slow_ends(text: str) -> None:
    assert autotune._entry(f"('a', 'b', (({text}", ["R", 0]) is None
    assert autotune._entry(f"('a', 'b', (({text}!))", ["R", 0]) is None


def test_where_engines_keep_theirs(tmp_path: Path) -> None:
    def those(**environment: str) -> list[str]:
        found = folders.cache_folders({"HOME": str(tmp_path), **environment})
        return [str(path.relative_to(tmp_path)) for path in found]

    assert those() == []
    for folder in (
        *(".cache/vllm/flashinfer_autotune_cache", ".cache/sglang/flashinfer/autotune"),
        *(".cache/flashinfer/autotune", "v", "root/flashinfer_autotune_cache", "x/vllm"),
        *("x/vllm/flashinfer_autotune_cache", "s/flashinfer/autotune", "b/.cache/flashinfer"),
        *("b/.cache/flashinfer/autotune", "f"),
    ):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    standard = [
        ".cache/vllm/flashinfer_autotune_cache",
        ".cache/sglang/flashinfer/autotune",
        ".cache/flashinfer/autotune",
    ]
    assert those() == standard
    vllm, sglang, own = standard
    assert those(VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR=f"{tmp_path}/v")[0] == "v"
    assert those(VLLM_CACHE_ROOT="~/root")[0] == "root/flashinfer_autotune_cache"
    assert those(XDG_CACHE_HOME=f"{tmp_path}/x") == [
        "x/vllm/flashinfer_autotune_cache",
        sglang,
        own,
    ]
    assert those(SGLANG_CACHE_DIR=f"{tmp_path}/s") == [vllm, "s/flashinfer/autotune", own]
    based = those(FLASHINFER_WORKSPACE_BASE=f"{tmp_path}/b")
    assert based == [vllm, sglang, "b/.cache/flashinfer/autotune"]
    assert those(FLASHINFER_AUTOTUNE_CACHE_DIR=f"{tmp_path}/f")[-1] == "f"
    assert those(FLASHINFER_AUTOTUNE_CACHE_DIR=f"{tmp_path}/gone") == [vllm, sglang]
