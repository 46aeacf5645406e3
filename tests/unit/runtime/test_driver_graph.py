"""Reading a graph: the real cuda-python over a libcuda of our own that holds one graph."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flashinfer.gemm_workspace import driver, driver_graph
from flashinfer.gemm_workspace.errors import DriverUnavailable

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SOURCE = "standin_libcuda.c"
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")

A = 0x7F5A_0000_0000  # of standin_libcuda.c
FOREIGN = 0x7FDE_ADBE_0000

# Prints what the reader makes of the stand-in's graph.
READ = """
import ctypes, dataclasses, json, sys
lib = ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
from flashinfer.gemm_workspace import driver_graph
from tests.unit.runtime.audit_words import words
with driver_graph.reading(0) as reader:
    nodes = reader.nodes(ctypes.addressof(ctypes.c_char.in_dll(lib, "graph")))
    places = [reader.lookup(int(address)) for address in sys.argv[1:]]
print(json.dumps({
    "nodes": {node.path: {
        "kind": node.kind, "name": node.name, "unread": node.unread, "allocates": node.allocates,
        "parts": [[where, len(data)] for where, data in node.parts],
        "extents": node.extents,
        "words": [[word.where, word.offset, word.value] for word in words(node)],
    } for node in nodes},
    "places": places,
    "calls outside a context": ctypes.c_int.in_dll(lib, "calls_outside").value,
    "tensor maps": driver_graph.tensor_maps_unread(0),
}))
"""


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("cuda.bindings.driver", reason="needs cuda-python 12.8 or later")
    if COMPILER is None or sys.platform != "linux":
        pytest.skip("needs a C compiler on Linux for the stand-in libcuda")
    folder = tmp_path_factory.mktemp("libcuda")
    subprocess.run(
        [COMPILER, "-shared", "-fPIC", "-o", folder / "libcuda.so.1", HERE / SOURCE, "-ldl"],
        check=True,
    )
    addresses = [A + 16, FOREIGN + 5, 0x1234_5678_9ABC, 1 << 63]
    # With the cuda-python that this process finds.
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", READ, *map(str, addresses)],
        cwd=ROOT,
        env={**os.environ, "LD_LIBRARY_PATH": str(folder), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,  # importing torch on a busy machine
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_every_node_is_there_in_order(read: dict[str, Any]) -> None:
    assert [(path, node["kind"]) for path, node in read["nodes"].items()] == [
        ("0", "kernel"),
        ("1", "kernel"),
        ("2", "memset"),
        ("3", "memcpy"),
        ("4", "child graph"),
        ("4.0", "kernel"),
        ("5", "conditional"),
        ("6", "allocation"),
        ("7", "host"),
        ("8", "empty"),
        ("9", "memcpy"),
        ("10", "kernel"),
        ("11", "kernel"),
        ("12", "unknown"),
        ("13", "free"),
        ("14", "memcpy"),
    ]


@pytest.mark.parametrize("path", ["0", "4.0"])
def test_parameters_are_read_to_their_size_and_no_further(read: dict[str, Any], path: str) -> None:
    """The byte after the four-byte parameter, and after the structure, is somebody else's."""
    node = read["nodes"][path]
    assert node["name"] == "plain_kernel"
    assert node["parts"] == [["parameter 0", 8], ["parameter 2", 40]]
    assert node["words"] == [["parameter 0", 0, A + 0x1000], ["parameter 2", 16, A + 0x2000]]
    assert node["unread"] == []


def test_a_packed_blob_of_a_kernel_without_a_function(read: dict[str, Any]) -> None:
    node = read["nodes"]["1"]
    assert node["name"] == "packed_kernel"
    assert node["parts"] == [["extra", 1720]]
    assert node["words"] == [
        ["extra", 688, A + 0x3000],
        ["extra", 752, A + 0x3000],
        ["extra", 1608, A + 0x3010],
    ]


def test_fills_and_copies_count_rows_and_slices(read: dict[str, Any]) -> None:
    assert read["nodes"]["2"]["extents"] == [["destination", A + 0x4000, 2 * 256 + 64]]
    source = A + 0x5000 + 8 + (1 * 4 + 2) * 128
    assert read["nodes"]["3"]["extents"] == [
        ["source", source, 64 + (1 * 4 + 2) * 128],
        ["destination", A + 0x6000, 64 + (1 * 3 + 2) * 64],
    ]
    # From the host: only the side on the device.
    assert [each[0] for each in read["nodes"]["9"]["extents"]] == ["destination"]


def test_allocations_of_the_graph(read: dict[str, Any]) -> None:
    assert read["nodes"]["6"]["allocates"] == [A + 0x7000, 4096]
    assert read["nodes"]["13"]["extents"] == [["memory", A + 0x7000, 0]]


def test_what_cannot_be_read_is_said(read: dict[str, Any]) -> None:
    unread = {path: node["unread"] for path, node in read["nodes"].items() if node["unread"]}
    assert set(unread) == {"5", "7", "10", "11", "12", "14"}
    for path, words in {
        "5": "conditional",
        "7": "host function",
        "10": "sizes are not known: cuFuncGetParamInfo",
        "11": "tag 9",
        "12": "type cannot be read",
        "14": "source is an array",
    }.items():
        assert words in unread[path][0]
    # Sizes that are not known are not guessed.
    assert read["nodes"]["10"]["parts"] == read["nodes"]["11"]["parts"] == []


def test_the_driver_says_whose_an_address_is(read: dict[str, Any]) -> None:
    assert read["places"] == [[A, 0x100000, True], [FOREIGN, 0x100000, False], None, None]


def test_every_query_is_made_in_a_context(read: dict[str, Any]) -> None:
    assert read["calls outside a context"] == 0


def test_tensor_maps_begin_with_their_address(read: dict[str, Any]) -> None:
    assert read["tensor maps"] == ""


class Encoder:
    """As much of cuda-python as encoding a tensor map needs; any enumeration will do."""

    cuuint32_t = cuuint64_t = int

    def __init__(self, status: int, shift: int = 0) -> None:
        self.status, self.shift = status, shift

    def __getattr__(self, name: str) -> Any:
        if name.startswith("CU"):
            return type(name, (), {"__getattr__": lambda self, member: 0})()
        raise AttributeError(name)

    def cuTensorMapEncodeTiled(self, kind: int, rank: int, address: int, *rest: Any) -> Any:
        import ctypes

        self.map = ctypes.create_string_buffer((address << self.shift).to_bytes(8, "little"), 128)
        pointer = ctypes.addressof(self.map)
        return self.status, type("Map", (), {"getPtr": lambda self: pointer})()


@pytest.mark.parametrize(
    ("encoder", "said"),
    [
        (Encoder(0), ""),
        (Encoder(801), ""),  # a device that has none
        (Encoder(0, shift=1), "begins with 0x"),
        (Encoder(1), "cuTensorMapEncodeTiled: 1"),
        (type("Old", (), {})(), "no attribute"),
    ],
)
def test_tensor_maps_are_trusted_only_after_a_trial(
    monkeypatch: pytest.MonkeyPatch, encoder: Any, said: str
) -> None:
    monkeypatch.setattr(driver_graph, "_bindings", lambda: encoder)
    driver_graph.tensor_maps_unread.cache_clear()
    try:
        found = driver_graph.tensor_maps_unread(0)
    finally:
        driver_graph.tensor_maps_unread.cache_clear()
    assert bool(found) == bool(said)
    assert said in found


def test_without_cuda_python(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cuda", "cuda.bindings", "cuda.bindings.driver", "cuda.cuda"):
        monkeypatch.setitem(sys.modules, name, None)
    driver._found.cache_clear()
    try:
        with pytest.raises(DriverUnavailable, match="neither"), driver_graph.reading(0):
            pass
    finally:
        driver._found.cache_clear()


def test_cuda_python_is_imported_in_one_module() -> None:
    package = ROOT / "flashinfer" / "gemm_workspace"
    naming = [
        path.name
        for path in package.glob("*.py")
        if any(
            '"cuda.bindings' in line or "import cuda" in line or "from cuda" in line
            for line in path.read_text(encoding="utf-8").splitlines()
        )
    ]
    assert naming == ["driver.py"]
