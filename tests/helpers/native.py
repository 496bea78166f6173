"""Calls in C and in Python, and the numbers that they are compared by."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lookahead import _native

SPECIAL = np.array(
    [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-45, 1e-39, 3.4e38, -3.4e38, 1.0, 1.0, -1.0], np.float32
)


def either(call: Callable[[], Any]) -> tuple[Any, Any]:
    """What a call gives in C, and in Python."""
    found = call()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_native, "speedups", None)
        return found, call()


def line_of(rng: random.Random, numbers: np.random.Generator, width: int) -> np.ndarray:
    """Logits ``[width]``: usual ones, rounded ones, special ones, or nothing but -inf, and a few special ones."""
    kind, line = rng.randrange(6), numbers.normal(size=width).astype(np.float32) * np.float32(3.0)
    if kind == 0:
        line = line.round()
    elif kind == 1:
        line = numbers.choice(SPECIAL[rng.choice([0, 2, 3, 4]) :], width)
    elif kind == 2:
        line = np.full(width, -np.inf, np.float32)
    elif kind == 3:
        line = np.where(numbers.random(width) < 0.8, np.float32(-np.inf), line)
    for _ in range(rng.choice([0, 0, 1, 3])):
        line[rng.randrange(width)] = rng.choice(SPECIAL.tolist())
    return line.astype(np.float32)
