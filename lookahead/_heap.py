"""The process's heap after a call: what was freed goes back to the system."""

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Any

_LARGE = 16 << 20  # bytes of keys and values: what a call with a long prompt frees
_GROWN = 0.02  # of the process's memory: from there on calls that leave little each have left much together
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
