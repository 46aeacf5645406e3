"""Body of the release's workspace cache (``flashinfer.utils._get_cache_buf``).

The dict is the release's own: engines and tests read and clear it. Only the storage behind its
entries is held here, so that an outgrown or cleared buffer stays valid for whoever uses it.
"""

from __future__ import annotations

import functools

import torch

from . import state as _state
from . import torch_internals
from .device import Device
from .growth import Asker, grow, served
from .lanes import reserve_lane
from .names import is_lane
from .state import State
from .storage import Blocks

Cache = dict[tuple[str, torch.device], torch.Tensor]

# In place of a capture's id, which nobody here needs.
CAPTURING = -1


def _allocate(
    device: Device, index: int, zero_init: bool, nbytes: int, capturing: bool
) -> torch.Tensor:
    """Under capture a block of torch's allocator would belong to that graph's pool: a plain
    buffer is the driver's then. A zeroed one is such a block, zeroed again by each replay."""
    if capturing and not zero_init:
        return device.allocate(index, nbytes, True)
    return device.allocate_torch(index, nbytes)


def cache_buffer(
    cache: Cache, name: str, nbytes: int, device: torch.device, zero_init: bool = False
) -> torch.Tensor:
    """``cache[(name, device)]``, made anew with ``nbytes`` bytes if it is shorter.

    The length is what the release would return. ``zero_init`` buffers are zeroed whenever they
    are made anew, on the current stream; under capture that is recorded and each replay repeats
    it. A lane's name reserves for that lane instead and leaves ``cache`` alone. Raises
    :class:`GemmWorkspaceError`, under capture :class:`CudnnWorkspaceTooSmallInCaptureError`.
    """
    if is_lane(name):
        return reserve_lane(name, nbytes, device)
    state = _state.current
    place = torch.device(device)
    index = None if torch_internals.tracing() else state.device.index_of(place)
    if index is None:
        make = torch.zeros if zero_init else torch.empty
        return make(nbytes, dtype=torch.uint8, device=place)
    buffer = cache.get((name, device))
    # `cuda` is another device on each visit: an entry under that key may be of the wrong one.
    if (
        buffer is not None
        and buffer.size(0) >= nbytes
        and (place.index is not None or state.device.index_of(buffer.device) == index)
    ):
        return buffer
    arguments = (state, cache, name, nbytes, device, zero_init, index)

    def renew() -> torch.Tensor:
        with state.lock:
            return _renew(*arguments)

    return served(state, index, renew)


def _renew(
    state: State,
    cache: Cache,
    name: str,
    nbytes: int,
    device: torch.device,
    zero_init: bool,
    index: int,
) -> torch.Tensor:
    """The entry, made anew; the caller has ``state.lock``."""
    storage = state.buffers.get((name, index))
    if storage is None:
        storage = Blocks(functools.partial(_allocate, state.device, index, zero_init))
    fresh = storage.nbytes < max(nbytes, 1)
    if fresh:
        stream = state.device.raw_stream(index)
        capture = CAPTURING if state.device.is_capturing(index) else None
        asker = Asker(name, name, ("cache", index), index, stream, capture)
        grow(state, storage, max(nbytes, 1), asker)
        state.buffers[name, index] = storage
    buffer = storage.cut(nbytes)
    if zero_init and not fresh:
        # The release would have made a new zeroed tensor at this point of this stream.
        with state.device.device_guard(index), torch.inference_mode(False):
            buffer.zero_()
    outgrown = cache.get((name, device))
    if outgrown is not None and state.device.index_of(outgrown.device) == index:
        storage.keep(outgrown)  # an engine's own entry: it was handed out too
    cache[name, device] = buffer
    return buffer
