"""The cases, one module per group. Importing this imports torch and FlashInfer and fills the
registry; it makes no CUDA call."""

from . import concurrent, devices, dirty, memory, moved, plans, process, tuner

__all__ = ["concurrent", "devices", "dirty", "memory", "moved", "plans", "process", "tuner"]
