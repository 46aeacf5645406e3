"""Storage that grows: an outgrown block is kept and its successor at least doubles.

The address-stable arena takes this module's place later; ``grow`` and ``cut`` are all that the
policy uses.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


class Storage:
    """One block in use, and the blocks that it outgrew.

    Blocks c1, c2, ... at least double, and each was outgrown by a larger request, so the kept
    bytes stay below twice the largest request.
    """

    def __init__(self) -> None:
        self._block: torch.Tensor | None = None
        self._kept: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the block in use; 0 before the first."""
        return 0 if self._block is None else self._block.numel()

    @property
    def kept_bytes(self) -> int:
        """Bytes of outgrown blocks, which running kernels and captured graphs may still use."""
        return sum(block.numel() for block in self._kept)

    @property
    def address(self) -> int:
        """Address of the block in use."""
        assert self._block is not None
        return self._block.data_ptr()

    def successor_bytes(self, nbytes: int) -> int:
        """Size of the block that a request for ``nbytes`` would make."""
        return max(nbytes, 2 * self.nbytes)

    def grow(self, nbytes: int, allocate: Callable[[int], torch.Tensor]) -> None:
        """Hold at least ``nbytes``. When ``allocate`` raises, everything stays as it was."""
        block = allocate(self.successor_bytes(nbytes))
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
        """The first ``nbytes`` bytes of the block in use, as a tensor usable in any mode."""
        assert self._block is not None
        assert nbytes <= self._block.numel()
        with torch.inference_mode(False):
            return self._block[:nbytes]
