"""Errors of the runtime. The first three names are upstream's, and engines catch them."""

from __future__ import annotations

import torch


class CudnnCaptureUnsafeError(RuntimeError):
    """Something was asked for under capture that would end or spoil the capture."""


class CudnnWorkspaceTooSmallInCaptureError(CudnnCaptureUnsafeError):
    """A workspace could not be made or grown while the current stream captures."""


class CudnnPlanBuildInCaptureError(CudnnCaptureUnsafeError):
    """A cuDNN plan or handle would have been made while the current stream captures."""


class GemmWorkspaceError(torch.OutOfMemoryError):
    """A workspace could not be made or grown outside a capture; what existed is still in use.

    An out-of-memory error of torch's, because that is what the release raised here and what
    engines and the autotuner catch.
    """


class DriverUnavailable(RuntimeError):
    """The CUDA driver API cannot be reached from Python (internal; callers see a typed error)."""


class DriverError(RuntimeError):
    """A CUDA driver call failed.

    Outside a capture callers see it as it is when it is not for want of memory: a device that
    is broken must not look like one that is full.
    """


class DriverOutOfMemory(DriverError):
    """A CUDA driver call found no memory or no addresses (internal)."""


class RangeTooShort(DriverOutOfMemory):
    """More than the addresses of an arena (internal): memory would not help."""


#: What allocators raise for want of memory.
NO_MEMORY = (DriverOutOfMemory, MemoryError, torch.OutOfMemoryError)
