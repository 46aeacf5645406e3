"""The only module that calls the CUDA driver API (``cuda.bindings``, imported on first need).

Every call runs on whatever thread asks. A thread may have no context, and another thread may
capture in global mode, where an unguarded allocation here ends that capture: hence
:func:`relaxed` and :func:`_in_context` around each.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from .errors import CudnnCaptureUnsafeError, DriverError, DriverUnavailable

_CAPTURE_ACTIVE = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE


@functools.cache
def _bindings() -> Any:
    # cuda-python before 12.8 has the same functions under the older name.
    for name in ("cuda.bindings.driver", "cuda.cuda"):
        with suppress(ImportError):
            return importlib.import_module(name)
    raise DriverUnavailable("neither cuda.bindings.driver nor cuda.cuda can be imported")


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
        raise DriverError(f"{name} failed: {status}")
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

    Without a reachable driver the body runs as it is, unless ``required``: then
    :class:`DriverUnavailable` or :class:`DriverError` is raised.
    """
    previous: Any = None
    try:
        mode = _bindings().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        (previous,) = _call("cuThreadExchangeStreamCaptureMode", mode)
    except (DriverUnavailable, DriverError, AttributeError):
        if required:
            raise
    try:
        yield
    finally:
        if previous is not None:
            _call("cuThreadExchangeStreamCaptureMode", previous)


def capture_id(stream: int) -> int:
    """Id of the capture that ``stream`` is part of; unique for the life of the process.

    Raises :class:`DriverUnavailable` without a driver, :class:`CudnnCaptureUnsafeError` when the
    capture is already invalid.
    """
    bindings = _bindings()
    # Major 12 and 13 return different tails and name the versions differently; the first three
    # results (status, id, graph) are the same in all of them.
    for name in (
        "cuStreamGetCaptureInfo",
        "cuStreamGetCaptureInfo_v3",
        "cuStreamGetCaptureInfo_v2",
    ):
        if hasattr(bindings, name):
            break
    status, identity = _call(name, bindings.CUstream(stream))[:2]
    if int(status) != _CAPTURE_ACTIVE:
        raise CudnnCaptureUnsafeError(
            f"the capture of stream {stream:#x} is no longer valid (status {status}, wanted "
            "active): an earlier call ended it. End the capture, fix that call, capture again."
        )
    return int(identity)


def allocate(index: int, nbytes: int) -> int:
    """Address of ``nbytes`` zeroed bytes on device ``index``, outside every allocator pool.

    Safe under capture: nothing is recorded in the graph. Raises :class:`DriverUnavailable` or
    :class:`DriverError`, and then nothing stays allocated.
    """
    with relaxed(required=True), _in_context(index):
        (address,) = _call("cuMemAlloc", nbytes)
        try:
            _zero(address, nbytes)
        except BaseException:
            _call("cuMemFree", address)
            raise
        return int(address)


def _zero(address: Any, nbytes: int) -> None:
    # A stream of our own: a memset on the current one would become a node of the graph, and on
    # a blocking one it would wait for, or break, a capture of the null stream's neighbours.
    flag = _bindings().CUstream_flags.CU_STREAM_NON_BLOCKING
    (stream,) = _call("cuStreamCreate", flag)
    try:
        _call("cuMemsetD8Async", address, 0, nbytes, stream)
        _call("cuStreamSynchronize", stream)
    finally:
        _call("cuStreamDestroy", stream)


def free(index: int, address: int) -> None:
    """Give back what :func:`allocate` returned and nobody has seen."""
    with relaxed(required=True), _in_context(index):
        _call("cuMemFree", address)
