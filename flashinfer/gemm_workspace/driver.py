"""The CUDA driver API (``cuda.bindings``, imported here alone, on first need).

Calls it for everything but the reading of captured graphs, which is ``driver_graph``'s.

Every call runs on whatever thread asks. A thread may have no context, and another thread may
capture in global mode, where an unguarded allocation here ends that capture: hence
:func:`relaxed` and :func:`_in_context` around each.

All sizes in bytes. Every function raises :class:`DriverUnavailable` where the driver cannot be
reached, :class:`DriverOutOfMemory` or :class:`DriverError` where it refuses.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from .errors import CudnnCaptureUnsafeError, DriverError, DriverOutOfMemory, DriverUnavailable
from .semaphores import Semaphore, post_address

_CAPTURE_ACTIVE = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY

_PROBE = 0x5A  # the byte that can_map() writes and reads back


@functools.cache
def _found() -> Any:
    """cuda-python's driver module, or None; a failed import is remembered too."""
    # cuda-python before 12.8 has the same functions under the older name.
    for name in ("cuda.bindings.driver", "cuda.cuda"):
        with suppress(ImportError):
            return importlib.import_module(name)
    return None


def _bindings() -> Any:
    found = _found()
    if found is None:
        raise DriverUnavailable("neither cuda.bindings.driver nor cuda.cuda can be imported")
    return found


def _call(name: str, *arguments: object) -> tuple[Any, ...]:
    """Results of the driver function ``name`` without its status."""
    function = getattr(_bindings(), name, None)
    if function is None:
        raise DriverUnavailable(f"the installed cuda-python has no {name}")
    try:
        status, *results = function(*arguments)
    except RuntimeError as error:  # no libcuda, or a libcuda without this function
        raise DriverUnavailable(f"{name} cannot be called: {error}") from error
    if int(status) != 0:
        kind = DriverOutOfMemory if int(status) == _OUT_OF_MEMORY else DriverError
        raise kind(f"{name} failed: {status}")
    return tuple(results)


@contextmanager
def _in_context(index: int) -> Iterator[None]:
    (device,) = _call("cuDeviceGet", index)
    (context,) = _call("cuDevicePrimaryCtxRetain", device)
    try:
        _call("cuCtxPushCurrent", context)
        try:
            yield
        finally:
            _call("cuCtxPopCurrent")
    finally:
        _call("cuDevicePrimaryCtxRelease", device)


@contextmanager
def relaxed(required: bool = False) -> Iterator[None]:
    """Run in RELAXED capture mode and restore the thread's mode afterwards.

    Without a reachable driver the body runs as it is, unless ``required``.
    """
    previous: Any = None
    try:  # from here on, or an interrupt after the exchange would leave this thread so
        try:
            mode = _bindings().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
            (previous,) = _call("cuThreadExchangeStreamCaptureMode", mode)
        except (DriverUnavailable, DriverError, AttributeError):
            if required:
                raise
        yield
    finally:
        if previous is not None:
            _call("cuThreadExchangeStreamCaptureMode", previous)


@contextmanager
def _working(index: int) -> Iterator[None]:
    with relaxed(required=True), _in_context(index):
        yield


# Streams and captures. --------------------------------------------------------------------------


@functools.cache
def _capture_query() -> tuple[Any, Any]:
    # Major 12 and 13 return different tails and name the versions differently; the first three
    # results (status, id, graph) are the same in all of them.
    bindings = _bindings()
    for name in (
        "cuStreamGetCaptureInfo",
        "cuStreamGetCaptureInfo_v3",
        "cuStreamGetCaptureInfo_v2",
    ):
        if hasattr(bindings, name):
            return getattr(bindings, name), bindings.CUstream
    raise DriverUnavailable("the installed cuda-python has no cuStreamGetCaptureInfo")


def capture_info(stream: int) -> tuple[int, int]:
    """Id of the capture that ``stream`` is part of, unique for the life of the process, and the
    handle of its graph.

    Raises :class:`CudnnCaptureUnsafeError` when the capture is already invalid.
    """
    query, handle = _capture_query()
    try:
        error, *results = query(handle(stream))
    except RuntimeError as missing:  # no libcuda, or a libcuda without this function
        raise DriverUnavailable(f"cuStreamGetCaptureInfo cannot be called: {missing}") from missing
    if int(error) != 0:
        raise DriverError(f"cuStreamGetCaptureInfo failed: {error}")
    status, identity, graph = results[:3]
    if int(status) != _CAPTURE_ACTIVE:
        raise CudnnCaptureUnsafeError(
            f"the capture of stream {stream:#x} is no longer valid (status {status}, wanted "
            "active): an earlier call ended it. End the capture, fix that call, capture again."
        )
    return int(identity), int(graph)


def stream_id(stream: int) -> int:
    """Id of ``stream``; no other stream of the process ever has it (CUDA 12 on)."""
    (identity,) = _call("cuStreamGetId", _bindings().CUstream(stream))
    return int(identity)


def synchronize(index: int) -> None:
    """Wait for all work of device ``index``."""
    with _working(index):
        _call("cuCtxSynchronize")


class _Tie:
    """Released when the destructor of the graph's user object has run."""

    def __init__(self) -> None:
        self.semaphore: Semaphore | None = Semaphore.take()

    def released(self) -> bool:
        if self.semaphore is not None and self.semaphore.take_post():
            self.semaphore.give_back()
            self.semaphore = None
        return self.semaphore is None


def tie(graph: int) -> _Tie:
    """A token that ``graph`` holds, with everything that is instantiated from it.

    The destructor of a user object must not call CUDA and must not wait for the GIL (it may run
    inside a CUDA call of a thread that has it). libc's ``sem_post`` does neither.
    """
    bindings, token = _bindings(), _Tie()
    assert token.semaphore is not None
    try:
        flag = bindings.CUuserObject_flags.CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
        move = bindings.CUuserObjectRetain_flags.CU_GRAPH_USER_OBJECT_MOVE
        destroy = bindings.CUhostFn(post_address())
    except AttributeError as error:
        token.semaphore.give_back()
        raise DriverUnavailable(
            f"the installed cuda-python has no user objects: {error}"
        ) from error
    with relaxed():
        try:
            (user_object,) = _call("cuUserObjectCreate", token.semaphore.address, destroy, 1, flag)
        except BaseException:
            token.semaphore.give_back()
            raise
        try:
            _call("cuGraphRetainUserObject", bindings.CUgraph(graph), user_object, 1, move)
        except BaseException:
            # Its destructor may still post: the semaphore is not given back.
            _call("cuUserObjectRelease", user_object, 1)
            raise
    return token


# Blocks. ----------------------------------------------------------------------------------------


def allocate(index: int, nbytes: int) -> int:
    """Address of ``nbytes`` zeroed bytes on device ``index``, outside every allocator pool.

    Safe under capture: nothing is recorded in the graph. When it raises, nothing stays allocated.
    """
    with _working(index):
        (address,) = _call("cuMemAlloc", nbytes)
        try:
            with _private_stream() as stream:
                _call("cuMemsetD8Async", address, 0, nbytes, stream)
        except BaseException:
            _call("cuMemFree", address)
            raise
        return int(address)


def free(index: int, address: int) -> None:
    """Give back what :func:`allocate` returned and nobody has seen."""
    with _working(index):
        _call("cuMemFree", address)


@contextmanager
def _private_stream() -> Iterator[Any]:
    """A stream that waits for nobody's and nobody's waits for, synchronised at the end.

    Work on the current stream would become a node of its graph, and on a blocking one it would
    wait for, or break, a capture of the null stream's neighbours.
    """
    flag = _bindings().CUstream_flags.CU_STREAM_NON_BLOCKING
    (stream,) = _call("cuStreamCreate", flag)
    try:
        yield stream
        _call("cuStreamSynchronize", stream)
    finally:
        _call("cuStreamDestroy", stream)


# Ranges. ----------------------------------------------------------------------------------------


def _memory_of(index: int) -> Any:
    bindings = _bindings()
    properties = bindings.CUmemAllocationProp()
    properties.type = bindings.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = bindings.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = index
    return properties


def granularity(index: int) -> int:
    """Bytes that a mapping on device ``index`` is a multiple of."""
    minimum = _bindings().CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    with _working(index):
        (size,) = _call("cuMemGetAllocationGranularity", _memory_of(index), minimum)
    return int(size)


def reserve_addresses(index: int, nbytes: int) -> int:
    """First of ``nbytes`` device addresses (a multiple of the granularity), nothing mapped."""
    with _working(index):
        (address,) = _call("cuMemAddressReserve", nbytes, 0, 0, 0)
    return int(address)


def free_addresses(index: int, address: int, nbytes: int) -> None:
    """Give back what :func:`reserve_addresses` returned and nothing is mapped into."""
    with _working(index):
        _call("cuMemAddressFree", address, nbytes)


def map_memory(index: int, address: int, nbytes: int) -> None:
    """Put ``nbytes`` of zeroed memory behind ``address``, both multiples of the granularity.

    When it raises, everything is as it was.
    """
    with _working(index):
        properties = _memory_of(index)
        (handle,) = _call("cuMemCreate", nbytes, properties, 0)
        mapped = True
        try:
            try:
                try:
                    _call("cuMemMap", address, nbytes, 0, handle, 0)
                except (DriverError, DriverUnavailable):
                    mapped = False
                    raise
                access = _bindings().CUmemAccessDesc()
                access.location = properties.location
                access.flags = _bindings().CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
                _call("cuMemSetAccess", address, nbytes, [access], 1)
                with _private_stream() as stream:
                    _call("cuMemsetD8Async", address, 0, nbytes, stream)
            finally:
                # The mapping keeps the memory; without one this frees it.
                _call("cuMemRelease", handle)
        except BaseException:
            # KeyboardInterrupt too, which arrives when a call returns: it has done its work then.
            if mapped:
                _call("cuMemUnmap", address, nbytes)
            raise


def unmap(index: int, address: int, nbytes: int) -> None:
    """Undo :func:`map_memory` of memory that nobody has seen."""
    with _working(index):
        _call("cuMemUnmap", address, nbytes)


def can_map(index: int) -> bool:
    """Whether device ``index`` can reserve, map, write and read back, tried for real.

    A device attribute is not enough: under vGPU, WSL or confidential computing it says yes.
    Leaves nothing behind. Raises only :class:`DriverOutOfMemory`: a full device says nothing.
    """
    try:
        size = granularity(index)
        address = reserve_addresses(index, size)
        try:
            map_memory(index, address, size)
            try:
                return _reads_back(index, address, size)
            finally:
                unmap(index, address, size)
        finally:
            free_addresses(index, address, size)
    except DriverOutOfMemory:
        raise
    except (DriverUnavailable, DriverError, AttributeError):
        return False


def _reads_back(index: int, address: int, nbytes: int) -> bool:
    got = ctypes.create_string_buffer(2)
    with _working(index), _private_stream() as stream:
        _call("cuMemcpyDtoHAsync", ctypes.addressof(got), address, 1, stream)
        _call("cuMemsetD8Async", address, _PROBE, nbytes, stream)
        _call("cuMemcpyDtoHAsync", ctypes.addressof(got) + 1, address + nbytes - 1, 1, stream)
    return got.raw == bytes([0, _PROBE])
