"""The release's autotuner: whether what it answered still is what it would answer.

Its choice depends on dicts that anybody may change and on per-thread overrides. The dicts are
replaced, once, by ones that say when they change, so that asking costs a few attribute reads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

# Where a choice is looked up: all releases have the first two, 0.7.4 the last two.
_CACHES = ("profiling_cache", "_file_configs", "_excluded_file_keys", "_invalidated_file_keys")

# Read by the releases' paths at each call; other variables they read once.
_VARIABLES = (
    "FLASHINFER_AUTOTUNER_LOAD_FROM_FILE",
    "FLASHINFER_ALLOW_EXPERIMENTAL_AUTO_BACKENDS",
    "FLASHINFER_DISABLE_CAKE_BF16_BMM_SWAP_AB",
    "FLASHINFER_LOGLEVEL",
    "FLASHINFER_TRACE_DUMP",  # the last: its value is asked for below
)

# ``os.environ`` encodes a name and decodes a value at each look, a microsecond for each.
_plain: dict[Any, Any] | None = getattr(os.environ, "_data", None)
_KEYS = [os.environ.encodekey(name) if _plain is not None else name for name in _VARIABLES]
_look: Callable[[Any], Any] = os.environ.get if _plain is None else _plain.get
_FILES, _AUTO, _CAKE, _LOG, _TRACE = _KEYS
_NOT_TRACING = (None, "", "0", b"", b"0")


def _telling(kind: type, *methods: str) -> type:
    """A subclass of ``kind`` that calls ``changed()`` after each of its ``methods``."""

    def telling(name: str) -> Callable[..., Any]:
        original = getattr(kind, name)

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(self, *args, **kwargs)
            finally:
                self.changed()

        method.__name__ = name
        return method

    names = {name: telling(name) for name in methods if hasattr(kind, name)}
    # A copy is a plain one: it is nobody's cache. ``changed`` is a slot, so that vars() stay.
    reduce = {"__reduce__": lambda self: (kind, (kind(self),)), "__slots__": ("changed",)}
    return type(f"Telling{kind.__name__.title()}", (kind,), {**names, **reduce})


_DICT = _telling(
    dict,
    *("__setitem__", "__delitem__", "__ior__"),
    *("clear", "pop", "popitem", "setdefault", "update"),
)
_SET = _telling(
    set,
    *("__iand__", "__ior__", "__isub__", "__ixor__", "add", "clear", "difference_update"),
    *("discard", "intersection_update", "pop", "remove", "symmetric_difference_update", "update"),
)
_TELLING: dict[type, type] = {dict: _DICT, set: _SET}


class _Stacks(threading.local):
    """This thread's overrides: the tuner that they are of, and its two lists."""

    tuner: Any = None
    buckets: Any = ()
    skipped: Any = ()


class Tuning:
    """Watches the tuner of the module whose globals are ``home``; ``changed()`` is called when
    its answers may have changed."""

    def __init__(self, home: dict[str, Any], changed: Callable[[], None]) -> None:
        self._home = home
        self._changed = changed
        self._choose: Any = None
        self._winners: Any = None
        self._configs: Any = None
        self._managed = False
        self._stacks = _Stacks()
        self._files = self._auto = self._cake = self._log = self._trace = None

    def steady(self) -> bool:
        """Whether a call on this thread now gets the answer that the last such call got.

        Not while anything is tuned, nor with overrides on this thread, nor with a cache on disk
        that other processes write to (0.7.0 on), nor while calls are traced.
        """
        kind = self._home["AutoTuner"]
        tuner = getattr(kind, "_instance", None)
        if (
            tuner is None
            or kind.choose_one is not self._choose
            # A tuner's own, so that another tuner is seen by them.
            or tuner.profiling_cache is not self._winners
            or tuner._file_configs is not self._configs
        ):
            self._changed()
            return False
        if tuner.is_tuning_mode:
            self._changed()
            return False
        stacks = self._stacks
        if stacks.tuner is not tuner:
            stacks.buckets = tuner._get_override_stack()
            # Before 0.6.14 nothing can be skipped.
            stacks.skipped = getattr(tuner, "_get_skip_ops_stack", tuple)()
            stacks.tuner = tuner
        if stacks.buckets or stacks.skipped:
            return False
        if self._managed and (tuner._managed_cache is not None or tuner._v2_local.active):
            return False
        # By identity: a variable that is set again is another object.
        if (
            _look(_FILES) is not self._files
            or _look(_AUTO) is not self._auto
            or _look(_CAKE) is not self._cake
            or _look(_LOG) is not self._log
            or _look(_TRACE) is not self._trace
        ):
            self._read_environment()
            return False
        return self._trace in _NOT_TRACING

    def meet(self) -> bool:
        """Take everything as it is now, and put caches that tell into the tuner; False if it has
        none that can."""
        kind = self._home["AutoTuner"]
        tuner = kind.get()
        lock = getattr(tuner, "_lock", None)
        if lock is None or not hasattr(tuner, "_get_override_stack"):
            return False
        with lock:
            for name in _CACHES:
                cache = getattr(tuner, name, None)
                if type(cache) in _TELLING:
                    cache = _TELLING[type(cache)](cache)
                    cache.changed = self._changed
                    setattr(tuner, name, cache)
                elif type(cache) not in (_DICT, _SET) and name in _CACHES[:2]:
                    return False
        self._winners, self._configs = tuner.profiling_cache, tuner._file_configs
        self._managed = hasattr(tuner, "_managed_cache") and hasattr(tuner, "_v2_local")
        self._choose = kind.choose_one
        self._read_environment()
        return True

    def _read_environment(self) -> None:
        before = (self._files, self._auto, self._cake, self._log, self._trace)
        found = tuple(map(_look, _KEYS))
        if found != before:
            self._changed()
        self._files, self._auto, self._cake, self._log, self._trace = found
