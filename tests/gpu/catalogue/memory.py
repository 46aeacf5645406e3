"""Canaries: tensors of a serving process that nobody else may write to."""

from __future__ import annotations

import gc

import torch

MIB = 1 << 20


class Others:
    """Tensors filled with one byte, as many as take what was freed just before."""

    def __init__(
        self, count: int = 8, nbytes: int = 32 * MIB, device: torch.device | str = "cuda:0"
    ) -> None:
        self.tensors = [
            torch.full((nbytes,), 7, dtype=torch.uint8, device=device) for _ in range(count)
        ]

    def overwritten(self) -> int:
        """Bytes that are not as they were filled."""
        torch.cuda.synchronize()
        return sum(int((each != 7).sum()) for each in self.tensors)


def driver_bytes(device: int = 0) -> int:
    """Bytes of the device that are in use, of any process and allocator."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def churn(rounds: int = 4) -> None:
    """Allocate and free blocks of many sizes, so that what was freed is handed out again."""
    for number in range(rounds):
        blocks = [
            torch.full(((size + number) * MIB,), 7, dtype=torch.uint8, device="cuda")
            for size in (1, 2, 4, 8, 16, 32, 34, 40)
        ]
        del blocks
    torch.cuda.synchronize()


def tidy() -> None:
    """Drop what nobody refers to, and give idle blocks back to the driver."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
