"""A Triton kernel of our own, for the audit's test. Triton reads its source from this file."""

import triton
import triton.language as tl


@triton.jit
def add_one(pointer, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    tl.store(pointer + at, tl.load(pointer + at, mask=inside) + 1, mask=inside)
