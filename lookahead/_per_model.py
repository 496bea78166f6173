"""What is kept of a model from call to call: one weak registry, in which nothing outlives its model."""

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Hashable
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from jacobi import LookaheadError

_LARGE = 16 << 20  # bytes of keys and values: what a call with a long prompt frees
_GROWN = 0.02  # of the process's memory: from there on calls that leave little each have left much together
MOST_KINDS = 16  # of calls of one model, of which things are kept apart
MOST_PASSES = 64  # of different shapes, that are kept recorded for one of them
_resident = 0  # bytes, when the heap was last trimmed


@cache
def _trim() -> Any:
    """glibc's own function; None where the C library is another one."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None


def resident_bytes() -> int:
    """Memory that the process takes; 0 where the system has no such file."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def hand_back(freed: int) -> None:
    """Let the C library give free memory back, after a call that has freed so many bytes of keys and values on the
    host, or where the process has grown since this was last done. glibc keeps what lies below a piece in use: after a
    long prompt that can be more than the model, and so it can after many short ones."""
    if freed >= _LARGE or resident_bytes() > (1.0 + _GROWN) * _resident:
        trim()


def trim() -> None:
    """Let the C library give all free memory back."""
    global _resident
    function = _trim()
    if function is not None:
        function(0)
        _resident = resident_bytes()


_T = TypeVar("_T")
_registry: "weakref.WeakKeyDictionary[Any, dict[PerModel[Any], Any]]" = weakref.WeakKeyDictionary()
_lock = threading.RLock()


def release(model: Any = None) -> None:
    """Free all that is kept for the next call of a model, or of every model (None): KV buffers and CUDA graphs, traces,
    packed weights, MTP layers, what drafts have learnt, verdicts of the self-test. The next call makes it anew; one
    under way keeps what it uses. What is free then goes back to the system.

    Raises:
        LookaheadError: ``model`` can be no model.
    """
    try:
        weakref.ref(model) if model is not None else None
    except TypeError:
        raise LookaheadError(
            f"lookahead.release() takes a model, or nothing to release what is kept of every model: got a "
            f"{type(model).__name__}. Pass what `generate` was called on."
        ) from None
    with _lock:
        kept = list(_registry.values()) if model is None else [_registry.pop(model, {})]
        if model is None:
            _registry.clear()
    kept.clear()  # outside of the lock: freeing may run code of anybody's
    trim()


def latest(kept: dict[Hashable, _T], key: Hashable, make: Callable[[], _T]) -> _T:
    """What is kept for a ``key``; where nothing is, what ``make`` gives, and what is kept for another one goes."""
    if key not in kept:
        kept.clear()
        kept[key] = make()
    return kept[key]


class PerModel(Generic[_T]):
    """One kind of thing that is kept for each model; ``make`` makes a model's first one."""

    def __init__(self, make: Callable[[], _T]) -> None:
        self._make = make

    def of(self, model: Any) -> _T:
        with _lock:
            kept = _registry.setdefault(model, {})
            if self not in kept:
                kept[self] = self._make()
            return kept[self]

    def take(self, model: Any) -> _T | None:
        """The model's, which is then kept no longer; None if there is none."""
        with _lock:
            return _registry.get(model, {}).pop(self, None)

    def put(self, model: Any, thing: _T) -> None:
        """Keep ``thing``, unless another one is kept by now."""
        with _lock:
            _registry.setdefault(model, {}).setdefault(self, thing)

    def clear(self) -> None:
        with _lock:
            for kept in _registry.values():
                kept.pop(self, None)
