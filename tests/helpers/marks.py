"""Which parameters run in the quick suite, and what needs a compiler."""

from collections.abc import Iterable
from typing import Any

import pytest

from lookahead import _native

built = pytest.mark.skipif(_native.speedups is None, reason="nothing is built in C here")


def few(values: Iterable[Any], *quick: Any) -> list[Any]:
    """``values`` as parameters; all but the ``quick`` ones are marked slow."""
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values]


BATCH_AND_SAMPLE = [
    pytest.param(1, False, id="1-greedy", marks=pytest.mark.slow),
    pytest.param(1, True, id="1-sampled"),
    pytest.param(3, False, id="3-greedy"),
    pytest.param(3, True, id="3-sampled", marks=pytest.mark.slow),
]
