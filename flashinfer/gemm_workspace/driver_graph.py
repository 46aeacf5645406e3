"""Read a captured graph through the CUDA driver: the second half of ``driver``.

Everything is read, nothing changed. What cannot be read is said in the node, never skipped.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from .audit_graph import Bytes, Extent, Layout, Node, Packed, packed
from .audit_memory import Place
from .driver import _bindings, _call, _working
from .errors import DriverError, DriverUnavailable

# CUgraphNodeType.
_KERNEL, _MEMCPY, _MEMSET, _HOST, _CHILD, _EMPTY = range(6)
_WAIT, _RECORD, _SIGNAL_SEMAPHORE, _WAIT_SEMAPHORE, _ALLOC, _FREE, _BATCH, _CONDITIONAL = range(
    6, 14
)
_NAMES = {
    _KERNEL: "kernel",
    _MEMCPY: "memcpy",
    _MEMSET: "memset",
    _HOST: "host",
    _CHILD: "child graph",
    _EMPTY: "empty",
    _WAIT: "event wait",
    _RECORD: "event record",
    _SIGNAL_SEMAPHORE: "semaphore signal",
    _WAIT_SEMAPHORE: "semaphore wait",
    _ALLOC: "allocation",
    _FREE: "free",
    _BATCH: "memory operations",
    _CONDITIONAL: "conditional",
}
_WITHOUT_MEMORY = {_EMPTY, _WAIT, _RECORD}

# CUmemorytype.
_ON_HOST, _ON_DEVICE, _ARRAY, _UNIFIED = 1, 2, 3, 4

_INVALID_VALUE = 1  # CUDA_ERROR_INVALID_VALUE
_NOT_SUPPORTED = 801  # CUDA_ERROR_NOT_SUPPORTED

# Tags of a kernel's `extra`: CU_LAUNCH_PARAM_END, ..._BUFFER_POINTER, ..._BUFFER_SIZE.
_END, _POINTER, _SIZE = 0, 1, 2
_EXTRA = ctypes.c_void_p * 5  # both with their values, and the end

# No kernel takes more parameters or bytes: 32,764 bytes is the limit of CUDA 12.1 and later.
_MOST_PARAMETERS = 8192
_MOST_BYTES = 1 << 16

# Levels of child graphs that are followed.
_DEEPEST = 16

# A CUtensorMap, in bytes.
_TENSOR_MAP = 128


class _Parameter(NamedTuple):
    number: int
    nbytes: int


class _Function(NamedTuple):
    """What is known of a kernel: its name, its parameters, or why they are not known."""

    name: str
    parameters: tuple[_Parameter, ...]
    unread: str
    # Those of the parameters that can hold an address, with the bytes of their whole words.
    wide: tuple[_Parameter, ...] = ()
    layout: Layout = ()
    # void* kernelParams[] of it.
    pointers: Any = None

    @classmethod
    def of(cls, name: str, parameters: tuple[_Parameter, ...]) -> _Function:
        """A kernel with these parameters. What all its nodes have in common is made once."""
        wide = [_Parameter(number, nbytes // 8 * 8) for number, nbytes in parameters if nbytes >= 8]
        layout = tuple((f"parameter {number}", nbytes // 8) for number, nbytes in wide)
        return cls(name, parameters, "", tuple(wide), layout, ctypes.c_void_p * len(parameters))


@contextmanager
def reading(index: int) -> Iterator[_Reader]:
    """A reader in the primary context of device ``index``, on any thread, capturing or not.

    Raises :class:`DriverUnavailable` or :class:`DriverError`.
    """
    with _working(index):
        yield _Reader(tensor_maps_unread(index))


class _Reader:
    """Reads graphs and asks about addresses, in one context."""

    def __init__(self, tensor_maps_unread: str = "") -> None:
        self._bindings = _bindings()
        self._tensor_maps_unread = tensor_maps_unread
        self._functions: dict[tuple[int, int], _Function] = {}

    def nodes(self, graph: int) -> list[Node]:
        """The nodes of the graph with handle ``graph``, child graphs' right after their node.

        Raises :class:`DriverUnavailable` or :class:`DriverError` when the graph cannot be listed.
        """
        return list(self._nodes(self._bindings.CUgraph(graph), "", 0))

    def lookup(self, address: int) -> Place | None:
        """The allocation that ``address`` is in, as far as the driver knows one."""
        attributes = self._bindings.CUpointer_attribute
        kind = self._attribute(attributes.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address)
        if kind is None:
            return None
        start = self._attribute(attributes.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, address)
        nbytes = self._attribute(attributes.CU_POINTER_ATTRIBUTE_RANGE_SIZE, address)
        return Place(address if start is None else start, nbytes or 0, kind != _ON_HOST)

    def _attribute(self, attribute: Any, address: int) -> int | None:
        # An address that the driver does not know is an error, and which enumeration member a
        # future driver answers with is not ours to decide: both mean that nothing is known.
        try:
            status, value = self._bindings.cuPointerGetAttribute(attribute, address)
            return int(value) if int(status) == 0 else None
        except (RuntimeError, TypeError, ValueError):
            return None

    def _nodes(self, graph: Any, prefix: str, depth: int) -> Iterator[Node]:
        # The first call asks how many there are. Major 12 and 13 agree on these two results.
        _, count, *_ = _call("cuGraphGetNodes", graph, 0)
        handles: list[Any] = []
        if count:
            handles, count, *_ = _call("cuGraphGetNodes", graph, count)
        for number, handle in enumerate(handles[:count]):
            path = f"{prefix}{number}"
            try:
                kind = int(_call("cuGraphNodeGetType", handle)[0])
            except (DriverError, DriverUnavailable, ValueError) as error:
                # cuda-python raises ValueError for a type that is newer than itself.
                yield Node(path, "unknown", unread=(f"its type cannot be read: {error}",))
                continue
            yield self._node(handle, kind, path)
            if kind == _CHILD:
                yield from self._child(handle, path, depth)

    def _node(self, handle: Any, kind: int, path: str) -> Node:
        name = _NAMES.get(kind, f"type {kind}")
        read = _READERS.get(kind)
        if read is not None:
            try:
                return read(self, handle, path)
            # ValueError and AttributeError: cuda-python that is older or newer than the driver.
            except (DriverError, DriverUnavailable, ValueError, AttributeError) as error:
                return Node(path, name, unread=(f"its parameters cannot be read: {error}",))
        if kind in _WITHOUT_MEMORY or kind == _CHILD:
            return Node(path, name)
        what = {
            _HOST: "what a host function uses is not known",
            _CONDITIONAL: "bodies of conditional nodes are not read",
            _BATCH: "addresses of stream memory operations are not read",
        }.get(kind, f"{name} nodes are not read")
        return Node(path, name, unread=(what,))

    def _child(self, handle: Any, path: str, depth: int) -> Iterator[Node]:
        if depth >= _DEEPEST:
            yield Node(f"{path}.?", "child graph", unread=("graphs nested deeper are not read",))
            return
        try:
            (graph,) = _call("cuGraphChildGraphNodeGetGraph", handle)
            yield from self._nodes(graph, f"{path}.", depth + 1)
        except (DriverError, DriverUnavailable) as error:
            yield Node(f"{path}.?", "child graph", unread=(f"cannot be read: {error}",))

    # Kernels. ------------------------------------------------------------------------------------

    def _kernel(self, handle: Any, path: str) -> Node:
        (given,) = _call("cuGraphKernelNodeGetParams", handle)
        func, kern = given.func, given.kern
        function = self._function(func, kern)
        parts: tuple[Bytes, ...] | Packed = ()
        unread = []
        arguments, extra = int(given.kernelParams), int(given.extra)
        if arguments:
            if function.unread:
                unread.append(function.unread)
            parts = _arguments(arguments, function)
        if extra:
            blob, why = _extra(extra)
            if blob:
                parts = packed((*parts, Bytes("extra", blob)))
            unread += [why] if why else []
        if not arguments and not extra and (function.parameters or function.unread):
            unread.append("the driver gives no parameters for it")
        if self._tensor_maps_unread and any(len(part.data) >= _TENSOR_MAP for part in parts):
            unread.append(self._tensor_maps_unread)
        return Node(path, "kernel", function.name, parts, unread=tuple(unread))

    def _function(self, func: Any, kern: Any) -> _Function:
        key = int(func), int(kern)
        known = self._functions.get(key)
        if known is None:
            if key[0]:
                known = self._describe("cuFuncGetName", "cuFuncGetParamInfo", func)
            elif key[1]:
                known = self._describe("cuKernelGetName", "cuKernelGetParamInfo", kern)
            else:
                known = _Function("", (), "it has neither a function nor a kernel")
            self._functions[key] = known
        return known

    def _describe(self, name_of: str, info_of: str, handle: Any) -> _Function:
        try:
            raw = _call(name_of, handle)[0]
            name = raw.decode(errors="replace") if isinstance(raw, bytes) else str(raw)
        except (DriverError, DriverUnavailable):  # before CUDA 12.3
            name = ""
        sizes = getattr(self._bindings, info_of, None)
        if sizes is None:
            return _Function(name, (), f"the installed cuda-python has no {info_of}")
        parameters: list[_Parameter] = []
        for number in range(_MOST_PARAMETERS):
            try:
                status, *found = sizes(handle, number)
            except RuntimeError as error:  # a driver before CUDA 12.4
                return _Function(name, (), f"its parameters' sizes are not known: {error}")
            if int(status) == _INVALID_VALUE:  # there are no more
                return _Function.of(name, tuple(parameters))
            if int(status) != 0:
                break
            parameters.append(_Parameter(number, int(found[1])))
        return _Function(name, (), f"its parameters' sizes are not known: {info_of}: {status}")

    # Copies, fills, allocations. -----------------------------------------------------------------

    def _memcpy(self, handle: Any, path: str) -> Node:
        (given,) = _call("cuGraphMemcpyNodeGetParams", handle)
        extents, unread = [], []
        for side, name in (("src", "source"), ("dst", "destination")):
            kind = int(getattr(given, f"{side}MemoryType"))
            if kind in (_ON_DEVICE, _UNIFIED):
                extents.append(_side(given, side, name))
            elif kind != _ON_HOST:
                unread.append(f"its {name} is an array")
        return Node(path, "memcpy", extents=tuple(extents), unread=tuple(unread))

    def _memset(self, handle: Any, path: str) -> Node:
        (given,) = _call("cuGraphMemsetNodeGetParams", handle)
        row = int(given.elementSize) * int(given.width)
        nbytes = int(given.pitch) * max(int(given.height) - 1, 0) + row
        return Node(path, "memset", extents=(Extent("destination", int(given.dst), nbytes),))

    def _alloc(self, handle: Any, path: str) -> Node:
        (given,) = _call("cuGraphMemAllocNodeGetParams", handle)
        return Node(path, "allocation", allocates=(int(given.dptr), int(given.bytesize)))

    def _free(self, handle: Any, path: str) -> Node:
        (address,) = _call("cuGraphMemFreeNodeGetParams", handle)
        return Node(path, "free", extents=(Extent("memory", int(address), 0),))


_READERS: dict[int, Callable[[_Reader, Any, str], Node]] = {
    _KERNEL: _Reader._kernel,
    _MEMCPY: _Reader._memcpy,
    _MEMSET: _Reader._memset,
    _ALLOC: _Reader._alloc,
    _FREE: _Reader._free,
}


def _arguments(address: int, function: _Function) -> tuple[Bytes, ...] | Packed:
    """The parameters that can hold an address, from ``void* kernelParams[]``."""
    if not function.wide:
        return ()
    pointers = function.pointers.from_address(address)
    given = [(pointers[number], nbytes) for number, nbytes in function.wide]
    # No further than its size: what stands behind it is somebody else's.
    if all(pointer for pointer, _ in given):
        data = b"".join([ctypes.string_at(pointer, nbytes) for pointer, nbytes in given])
        return Packed(function.layout, data)
    return tuple(
        Bytes(where, ctypes.string_at(pointer, nbytes))
        for (where, _), (pointer, nbytes) in zip(function.layout, given, strict=True)
        if pointer
    )


def _extra(address: int) -> tuple[bytes, str]:
    """The packed parameters, from ``void* extra[]``: tags, each with a value, and an end."""
    buffer, nbytes = None, None
    entries = _EXTRA.from_address(address)
    # Two tags are defined, in either order; what is none of them ends the reading.
    for position in (0, 2, 4):
        tag = entries[position] or _END
        if tag == _END:
            break
        if position == 4 or tag not in (_POINTER, _SIZE):
            return b"", f"its extra holds something else (tag {tag})"
        value = entries[position + 1]
        if tag == _POINTER:
            buffer = value
        elif value:
            nbytes = ctypes.c_size_t.from_address(value).value
    if nbytes == 0:
        return b"", ""
    if not buffer or nbytes is None:
        return b"", "its extra has no buffer or no size"
    if nbytes > _MOST_BYTES:
        return b"", f"its extra has {nbytes} bytes, more than any kernel takes"
    return ctypes.string_at(buffer, nbytes), ""


def _side(given: Any, side: str, name: str) -> Extent:
    """The bytes that one side of a copy touches, rows and slices included."""
    field: Callable[[str], int] = lambda what: int(getattr(given, f"{side}{what}"))  # noqa: E731
    pitch, height = field("Pitch"), field("Height")
    start = field("Device") + field("XInBytes") + (field("Z") * height + field("Y")) * pitch
    rows = max(int(given.Depth) - 1, 0) * height + max(int(given.Height) - 1, 0)
    return Extent(name, start, int(given.WidthInBytes) + rows * pitch)


# Tensor maps. -----------------------------------------------------------------------------------

# Any address will do: encoding touches no memory. It has bits all over the 48 that count.
_SAMPLE = 0x7F5A_A5C3_3C00


@functools.cache
def tensor_maps_unread(index: int) -> str:  # noqa: ARG001 - the key of the cache
    """Why addresses in tensor maps cannot be read on device ``index``; empty if they can.

    A CUtensorMap is opaque. Where one that is encoded for a known address has that address as its
    first word, reading every word of the parameters finds it; asked once a device, in its context.
    """
    bindings = _bindings()
    try:
        one, row = bindings.cuuint32_t(1), bindings.cuuint64_t(256)
        status, *encoded = bindings.cuTensorMapEncodeTiled(
            bindings.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
            2,
            _SAMPLE,
            [row, row],
            [row],
            [bindings.cuuint32_t(16)] * 2,
            [one, one],
            bindings.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            bindings.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
            bindings.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
            bindings.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        if int(status) == _NOT_SUPPORTED:
            return ""  # a device without tensor maps: no kernel has any
        if int(status) == 0:
            first = ctypes.c_uint64.from_address(int(encoded[0].getPtr())).value
            if first == _SAMPLE:
                return ""
            found = f"one encoded for {_SAMPLE:#x} begins with {first:#x}"
        else:
            found = f"cuTensorMapEncodeTiled: {status}"
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        found = str(error)
    return (
        "a tensor map may be in its parameters, and where those keep addresses is not known "
        f"({found})"
    )
