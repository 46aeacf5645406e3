"""Storage that grows by a new block: the outgrown one is kept, its successor at least doubles.

For the release's cache, and for lanes on devices that cannot map memory behind an address.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from .errors import NO_MEMORY


class Storage(Protocol):
    """Bytes that a lane or a cache entry has. What was handed out stays valid for ever."""

    @property
    def kind(self) -> str:
        """``arena`` or ``blocks``."""

    @property
    def nbytes(self) -> int:
        """Bytes that can be cut from; 0 before the first growth."""

    @property
    def kept_bytes(self) -> int:
        """Bytes that are held besides, because they were handed out once."""

    @property
    def address(self) -> int:
        """Where :meth:`cut` begins."""

    def ranges(self) -> list[tuple[int, int, int]]:
        """Address, bytes that hold memory, and bytes reserved, of all that was handed out."""

    def target(self, nbytes: int) -> int:
        """How many bytes a growth to ``nbytes`` must get from the device."""

    def grow(self, nbytes: int, capturing: bool) -> None:
        """Hold at least ``nbytes``. When it raises, everything is as it was."""

    def cut(self, nbytes: int) -> torch.Tensor:
        """The first ``nbytes`` bytes, as a tensor usable in any mode."""


class Blocks:
    """One block in use, and the blocks that it outgrew.

    Blocks c1, c2, ... at least double, and each was outgrown by a larger request, so the kept
    bytes stay below twice the largest request and below the block in use; where memory is too
    short to double, a block has the bytes that were asked for.
    """

    kind = "blocks"

    def __init__(self, allocate: Callable[[int, bool], torch.Tensor]) -> None:
        self._allocate = allocate  # (bytes, capturing)
        self._block: torch.Tensor | None = None
        self._kept: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        return 0 if self._block is None else self._block.numel()

    @property
    def kept_bytes(self) -> int:
        return sum(block.numel() for block in self._kept)

    @property
    def address(self) -> int:
        assert self._block is not None
        return self._block.data_ptr()

    def ranges(self) -> list[tuple[int, int, int]]:
        blocks = self._kept if self._block is None else [*self._kept, self._block]
        sizes = [block.numel() * block.element_size() for block in blocks]
        return [(block.data_ptr(), size, size) for block, size in zip(blocks, sizes, strict=True)]

    def target(self, nbytes: int) -> int:
        return max(nbytes, 2 * self.nbytes)

    def grow(self, nbytes: int, capturing: bool) -> None:
        try:
            block = self._allocate(self.target(nbytes), capturing)
        except NO_MEMORY:
            if self.target(nbytes) == nbytes:
                raise
            # Better to keep more than twice than to fail where the memory would do.
            block = self._allocate(nbytes, capturing)
        if self._block is not None:
            self._kept.append(self._block)
        self._block = block

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep ``tensor`` as if outgrown, unless its bytes are held here already."""
        blocks = self._kept if self._block is None else [*self._kept, self._block]
        address = tensor.untyped_storage().data_ptr()
        if all(block.untyped_storage().data_ptr() != address for block in blocks):
            self._kept.append(tensor)

    def cut(self, nbytes: int) -> torch.Tensor:
        assert self._block is not None
        assert nbytes <= self._block.numel()
        with torch.inference_mode(False):
            return self._block[:nbytes]
