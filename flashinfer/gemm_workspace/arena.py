"""Arena: storage whose address never changes.

A range of device addresses is reserved once; growing maps more memory behind its tail. So there
is nothing to retire, and no growth can hurt a captured graph or a running kernel.
"""

from __future__ import annotations

import torch

from .device import Device, Range
from .errors import DriverOutOfMemory, RangeTooShort

# Addresses reserved for one arena, if the device has as much memory. Bytes. Ranges of 64 GiB ran
# out after 2,046 of them; of these there is room for thousands of arenas.
RESERVED = 8 << 30

# A growing arena maps this part of the request more than was asked for, so that sizes that rise
# slowly from a to b cost about log(b / a) / log(1 + 1 / 8) mappings. The first mapping has no
# headroom: most arenas never grow.
HEADROOM = 8


class Arena:
    """One range. Memory mapped: what was asked for, rounded up to the granularity, plus at most
    an eighth of it."""

    kind = "arena"
    kept_bytes = 0

    def __init__(self, reserved: Range) -> None:
        self._range = reserved
        self._mapped = 0
        self._whole: torch.Tensor | None = None

    @classmethod
    def on(cls, device: Device, index: int) -> Arena | None:
        """An arena with nothing mapped, ``None`` where the device cannot. Raises DriverError."""
        reserved = device.new_range(index, min(RESERVED, device.total_bytes(index)))
        return None if reserved is None else cls(reserved)

    @property
    def nbytes(self) -> int:
        return self._mapped

    @property
    def address(self) -> int:
        return self._range.address

    def ranges(self) -> list[tuple[int, int, int]]:
        return [(self._range.address, self._mapped, self._range.nbytes)]

    def target(self, nbytes: int) -> int:
        return self._aligned(nbytes)

    def grow(self, nbytes: int, capturing: bool) -> None:  # noqa: ARG002 - mapping needs no leave
        wanted = self._aligned(nbytes)
        if wanted > self._range.nbytes:
            raise RangeTooShort(
                f"{wanted} bytes are more than the {self._range.nbytes} reserved for an arena"
            )
        roomy = min(self._aligned(wanted + wanted // HEADROOM), self._range.nbytes)
        try:
            self._map(wanted if self._mapped == 0 else roomy)
        except DriverOutOfMemory:
            if self._mapped == 0 or roomy == wanted:
                raise
            self._map(wanted)

    def cut(self, nbytes: int) -> torch.Tensor:
        assert nbytes <= self._mapped
        # Wrapping addresses as a tensor takes 10 us; slicing takes 1.
        if self._whole is None or self._whole.numel() < nbytes:
            self._whole = self._range.tensor(self._mapped)
        with torch.inference_mode(False):
            return self._whole[:nbytes]

    def _map(self, end: int) -> None:
        self._range.map(self._mapped, end - self._mapped)
        # Only the mapping may fail: from here on the memory is there and counted.
        self._mapped = end

    def _aligned(self, nbytes: int) -> int:
        step = self._range.granularity
        return -(-nbytes // step) * step
