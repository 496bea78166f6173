"""The parts of drafting and choosing that are built in C, from ``_c``, where they are: ``speedups`` is None where there
was no compiler. Then Python does the same, more slowly; each function's twin says what it is for."""

from importlib import import_module
from typing import Any


def _loaded() -> Any:
    try:
        return import_module("lookahead._speedups")
    except ImportError:
        return None


speedups: Any = _loaded()
rows: Any = getattr(speedups, "rows", lambda *arrays: None)  # holds arrays for C, also while a test hides the rest
