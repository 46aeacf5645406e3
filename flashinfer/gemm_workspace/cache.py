"""Body of the release's workspace cache (``flashinfer.utils._get_cache_buf``).

The dict is the release's own: engines and tests read and clear it. Only the storage behind its
entries is held here, so that an outgrown or cleared buffer stays valid for whoever uses it.
"""

from __future__ import annotations

import torch

from . import state as _state
from . import torch_internals
from .growth import grow
from .lanes import reserve_lane
from .names import is_lane
from .storage import Storage

Cache = dict[tuple[str, torch.device], torch.Tensor]


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
    with state.lock:
        storage = state.buffers.get((name, index))
        if storage is None:
            storage = Storage()
        fresh = storage.nbytes < max(nbytes, 1)
        if fresh:
            key = ("cache", index)
            grow(
                state,
                storage,
                max(nbytes, 1),
                name=name,
                key=key,
                index=index,
                recorded=zero_init,
            )
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
