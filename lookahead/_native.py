"""The parts of drafting and choosing that are built in C, from ``_c``: ``speedups`` is None where they are ``missing``.
Then Python does the same, more slowly; each function's twin says what it is for."""

import logging
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

CURE = "`pip install -v --force-reinstall --no-deps --no-binary lookahead-decoding lookahead-decoding` shows why"


def _loaded() -> tuple[Any, str]:
    try:
        return import_module("lookahead._speedups"), ""
    except ImportError as error:
        absent = isinstance(error, ModuleNotFoundError)
        return None, "it was not built when lookahead was installed" if absent else f"it does not load ({error})"


speedups, missing = _loaded()

# Operations whose kernels are in `_c/operations.c`; the first three are traces' own, `attend` is Python's.
LIBRARY = torch.library.Library("lookahead", "DEF")
LIBRARY.define("normed(Tensor rows, Tensor weight, float epsilon, int lanes, int less) -> Tensor")
LIBRARY.define("rotated(Tensor states, Tensor cosines, Tensor sines) -> Tensor")
_STATES = "Tensor query, Tensor key, Tensor value"
LIBRARY.define(f"attended({_STATES}, Tensor mask, Tensor sequences, float scale, int windowed) -> Tensor")
LIBRARY.define(f"attend({_STATES}, Tensor? mask, Tensor sequences, float scale, int windowed) -> Tensor")
LIBRARY.define("multiplied(Tensor rows, Tensor weight, Tensor bias, int chain) -> Tensor")
LIBRARY.define("multiplied_bytes(Tensor rows, Tensor weight, Tensor scales, Tensor bias) -> Tensor")


@cache
def operations() -> bool:
    """Whether torch has taken the operations of C: then they are in ``torch.ops.lookahead``."""
    folder = Path(torch.__file__).parent / "lib"
    try:
        speedups.operations(str(folder / ("libtorch_cpu.dylib" if sys.platform == "darwin" else "libtorch_cpu.so")))
    except (AttributeError, RuntimeError):  # nothing is built in C; or torch takes none
        return False
    return True


@cache
def warn_if_missing() -> None:
    """Say once a process, when something is first drafted, that drafting takes longer than it has to, and why."""
    if speedups is None:
        text = "Lookahead's C part is missing: %s. Texts are the same, but drafting takes longer. %s."
        logging.getLogger("lookahead").warning(text, missing, CURE)
