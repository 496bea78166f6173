"""The process's heap after a call: what was freed goes back to the system."""

import ctypes
from functools import cache
from typing import Any

_LARGE = 16 << 20  # bytes of keys and values: below, a call leaves little behind


@cache
def _trim() -> Any:
    """glibc's own function; None where the C library is another one."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None


def hand_back(freed: int) -> None:
    """Let the C library give free memory back, after a call that has freed so many bytes of keys and values on the
    host. glibc keeps what lies below a piece in use, and after a long prompt that can be more than the model."""
    trim = _trim()
    if freed >= _LARGE and trim is not None:
        trim(0)
