"""What paired ratios say, and when they say nothing."""

from math import exp, log, sqrt
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lookahead.cli import common
from lookahead.cli.evidence import Evidence


def test_one_short_text_says_nothing() -> None:
    found = Evidence.of([4.59], 16)
    assert (found.speedup, found.interval) == (4.59, None)
    assert found.verdict == "too few to say (1 text of 16 tokens: at least 3 and 96 are needed)"
    assert Evidence.of([4.5, 4.6, 4.7], 95).verdict.startswith("too few to say (3 texts of 95 tokens")
    assert Evidence.of([4.5, 4.6], 1000).verdict.startswith("too few to say (2 texts of 1000 tokens")


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([4.5, 4.6, 4.7], "a win"),
        ([0.5, 0.55, 0.52, 0.5], "a loss"),
        ([1.0, 1.01, 0.99, 1.0], "no difference"),
        ([1.01, 1.01, 1.01, 1.01], "no difference"),
        ([0.8, 1.6, 2.9], "too few to say"),
        ([1.0, 9.0, 1.1], "too few to say"),
        ([0.9, 1.1] * 3, "too few to say"),
        ([0.9, 1.2] * 200, "a win"),
    ],
)
def test_the_scatter_decides(ratios: list[float], verdict: str) -> None:
    assert Evidence.of(ratios, 4000).verdict.startswith(verdict)


@given(st.lists(st.floats(0.2, 5.0), min_size=3, max_size=30))
def test_the_interval_is_students(ratios: list[float]) -> None:
    found, logs = Evidence.of(ratios, 4000), [log(ratio) for ratio in ratios]
    assert found.interval is not None
    low, high = found.interval
    assert low <= found.speedup <= high and found.speedup == pytest.approx(exp(fmean(logs)))
    reach = log(high / low) / 2
    assert reach >= 1.96 * stdev(logs) / sqrt(len(logs)) - 1e-9
    if found.verdict.startswith("a win"):
        assert low > 1.0
    if low < 0.95 and high > 1.05:
        assert found.verdict.startswith("too few to say")


def test_the_number_of_texts_that_is_asked_for_suffices() -> None:
    """As many texts again with the same scatter decide."""
    few = Evidence.of([0.8, 1.6, 2.9], 4000)
    assert few.needed > 3 and f"about {few.needed} such texts" in few.verdict
    assert Evidence.of(([0.8, 1.6, 2.9] * few.needed)[: 3 * few.needed], 4000).verdict == "a win"


def decoded(busy: float) -> Any:
    return common.Decoded([1], 2.0, None, busy)


def test_a_loaded_machine_is_told() -> None:
    """By a thread that did not run while it could have."""
    (told,) = common.load_told([decoded(0.9), decoded(1.1)], torch.device("cpu"))
    assert told.startswith("The machine is loaded: this process ran in 50% of the time")
    assert common.load_told([decoded(1.9), decoded(2.0)], torch.device("cpu")) == []
    assert common.load_told([decoded(0.1)], torch.device("cuda")) == []
