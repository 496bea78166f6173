"""Counts of a decode: they add up, survive JSON, and count what was written."""

import json
from typing import Any

import pytest
from helpers.toy import examples
from hypothesis import given
from hypothesis import strategies as st

from jacobi import LookaheadError, Path, Step, TokenTree
from lookahead import DecodingStats

COUNTS = st.integers(0, 1000)
# Whole milliseconds, so that sums do not depend on their order.
TIMES = st.integers(0, 1000).map(float)
STATS = st.builds(
    DecodingStats,
    steps=COUNTS,
    row_steps=COUNTS,
    emitted=COUNTS,
    drafted=COUNTS,
    accepted=COUNTS,
    histogram=st.dictionaries(st.integers(1, 6), st.integers(1, 9), max_size=4),
    prefill_ms=TIMES,
    draft_ms=TIMES,
    forward_ms=TIMES,
    verify_ms=TIMES,
    keep_ms=TIMES,
    passes=st.lists(st.fixed_dictionaries({"nodes": st.lists(COUNTS, max_size=2), "forward_ms": TIMES}), max_size=2),
)
NUMBERS = [
    "steps", "row_steps", "emitted", "drafted", "accepted",
    "prefill_ms", "draft_ms", "forward_ms", "verify_ms", "keep_ms",
]  # fmt: skip


def tokens_of(step: Step, going: list[bool]) -> list[int]:
    """Tokens that each row wrote, rows that had ended before counting as 0."""
    return [len(path.tokens) if row else 0 for path, row in zip(step.paths, going, strict=True)]


def step(*rows: tuple[int, int], ms: tuple[float, float, float, float] = (1.0, 2.0, 4.0, 8.0)) -> Step:
    """A pass from (nodes below the root, tokens written) of each row."""
    trees = [TokenTree.chain(0, range(drafted)) for drafted, _ in rows]
    paths = [Path(list(range(tokens)), list(range(tokens))) for _, tokens in rows]
    return Step(trees, paths, *ms)


def counted(steps: list[Step], *, detailed: bool = False) -> DecodingStats:
    stats = DecodingStats()
    for index, one in enumerate(steps):
        stats.count(one, tokens_of(one, [True] * len(one.paths)), first=index == 0, detailed=detailed)
    return stats


def test_count_times() -> None:
    """The prompt's pass is counted apart, the rest of its step is not."""
    stats = counted([step((0, 1), ms=(1.0, 100.0, 2.0, 3.0)), step((2, 1)), step((2, 1))])
    assert (stats.prefill_ms, stats.forward_ms) == (100.0, 4.0)
    assert (stats.draft_ms, stats.verify_ms, stats.keep_ms) == (1.0 + 2, 2.0 + 8, 3.0 + 16)


def test_count_rows_that_have_ended() -> None:
    """A pass is one for the batch; a row counts only while it writes."""
    stats = DecodingStats()
    stats.count(step((0, 1), (0, 1)), tokens_of(step((0, 1), (0, 1)), [True, True]), first=True, detailed=False)
    stats.count(step((5, 2), (3, 4)), tokens_of(step((5, 2), (3, 4)), [True, True]), first=False, detailed=False)
    stats.count(step((5, 2), (3, 1)), tokens_of(step((5, 2), (3, 1)), [True, False]), first=False, detailed=False)
    stats.count(step((5, 2), (3, 0)), tokens_of(step((5, 2), (3, 0)), [True, False]), first=False, detailed=False)
    stats.count(step((5, 0), (3, 1)), tokens_of(step((5, 0), (3, 1)), [True, True]), first=False, detailed=False)
    assert (stats.steps, stats.row_steps) == (5, 2 + 2 + 1 + 1 + 1)
    assert stats.emitted == 2 + 6 + 2 + 2 + 1
    assert stats.drafted == 8 + 5 + 5 + 3
    assert stats.accepted == 4 + 1 + 1 + 0
    assert stats.histogram == {1: 3, 2: 3, 4: 1}


def test_count_details() -> None:
    steps = [step((0, 1), (0, 1)), step((5, 2), (3, 4))]
    assert counted(steps).passes == []
    times = {"draft_ms": 1.0, "forward_ms": 2.0, "verify_ms": 4.0, "keep_ms": 8.0}
    assert counted(steps, detailed=True).passes == [
        {"nodes": [1, 1], "tokens": [1, 1]} | times,
        {"nodes": [6, 4], "tokens": [2, 4]} | times,
    ]


@examples(100)
@given(STATS, STATS)
def test_adding_up(a: DecodingStats, b: DecodingStats) -> None:
    before = (a.to_json(), b.to_json())
    both = a + b
    for name in NUMBERS:
        assert getattr(both, name) == getattr(a, name) + getattr(b, name)
    for tokens in range(8):
        assert both.histogram.get(tokens, 0) == a.histogram.get(tokens, 0) + b.histogram.get(tokens, 0)
    assert list(both.histogram) == sorted(both.histogram)
    assert both.passes == a.passes + b.passes
    assert (a.to_json(), b.to_json()) == before, "the summands stay as they are"
    assert (b + a).to_dict() | {"passes": []} == both.to_dict() | {"passes": []}


def test_counting_in_two_parts_is_counting_in_one() -> None:
    """Counting on into a total must not change its parts."""
    steps = [step((0, 1)), step((6, 3)), step((6, 1)), step((4, 3))]
    second = DecodingStats()
    for one in steps[2:]:
        second.count(one, tokens_of(one, [True]), first=False, detailed=True)
    assert counted(steps[:2], detailed=True) + second == counted(steps, detailed=True)
    part = counted([step((0, 1))])
    total = sum([part])
    total.count(step((2, 1)), tokens_of(step((2, 1)), [True]), first=False, detailed=False)
    assert part.steps == 1


@pytest.mark.parametrize("other", [1, "stats", None])
def test_adding_something_else(other: Any) -> None:
    with pytest.raises(TypeError):
        DecodingStats() + other
    with pytest.raises(TypeError):
        other + DecodingStats()


@examples(100)
@given(STATS)
def test_json_round_trip(stats: DecodingStats) -> None:
    read = json.loads(stats.to_json())
    assert DecodingStats.from_dict(read) == stats
    assert DecodingStats.from_dict(stats.to_dict()) == stats
    assert read["mean_acceptance_length"] == stats.mean_acceptance_length
    assert read["acceptance_rate"] == stats.acceptance_rate
    assert json.loads(stats.to_json(indent=2)) == read


def test_from_dict_fills_in_and_refuses() -> None:
    assert DecodingStats.from_dict({"steps": 3}) == DecodingStats(steps=3)
    with pytest.raises(LookaheadError, match=r"Unknown statistics \['emited', 'step'\]: expected .*'emitted'.*'steps'"):
        DecodingStats.from_dict({"step": 3, "emited": 2})
