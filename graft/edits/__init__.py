"""The edits, one small module each, in the order in which reports list them."""

from __future__ import annotations

from . import (
    cache_buffers,
    default_size,
    gemm_buffers,
    grow_sites,
    plan_builds,
    plan_lifetime,
    prepared_launches,
    retries,
    sm12x_gate,
)
from .base import Edit

EDITS: tuple[Edit, ...] = (
    grow_sites.EDIT,
    default_size.EDIT,
    gemm_buffers.EDIT,
    cache_buffers.EDIT,
    plan_builds.EDIT,
    retries.EDIT,
    plan_lifetime.EDIT,
    sm12x_gate.EDIT,
    prepared_launches.EDIT,
)

__all__ = ["EDITS", "Edit"]
