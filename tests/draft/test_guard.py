"""The ledger of what drafts have won and lost by the clock."""

import random

import pytest

from jacobi import Path, Step, TokenTree
from lookahead.draft.guard import Guard, reached

CURVE = [10.0, 12.0, 14.0]  # milliseconds of passes over 1, 2, 3 nodes


def seen(guard: Guard, written: list[int], width: int = 2, ms: float = 12.0, counts: bool = True) -> bool:
    """A pass that took ``ms``, in which sequences wrote so many tokens each."""
    tree = TokenTree.chain(1, [2] * (width - 1))
    paths = [Path(list(range(tokens)), [2] * tokens) for tokens in written]
    step = Step([tree] * len(written), paths, 1.0, ms - 2.0, 0.5, 0.5)
    return guard.observe(step, ms, CURVE, plain=width == 1, counts=counts)


def begun(batch: int = 1) -> Guard:
    guard = Guard()
    guard.begin(batch)
    return guard


def fails_until_it_rests(guard: Guard) -> int:
    passes = 0
    while not guard.rests:
        seen(guard, [1], ms=13.0)
        passes += 1
    return passes


def test_later_they_lose_a_hundredth_of_the_time() -> None:
    guard = begun()
    assert 3 <= fails_until_it_rests(guard) <= 6, "a stake to lose"
    failed = 0
    for _ in range(3000):
        failed += not guard.rests
        seen(guard, [1], width=1 if guard.rests else 2, ms=10.0 if guard.rests else 13.0)
    assert 0.3 * failed <= 0.011 * 3000
    assert failed > 50


def test_drafts_that_pay_go_on() -> None:
    guard = begun()
    for _ in range(200):
        seen(guard, [2])
        assert not guard.rests
    assert guard.wins


def test_no_text_makes_them_lose_more_than_they_have_won() -> None:
    """Drafts that pay for a while, and fail for a while, as often as the ledger lets them."""
    rng, guard, taken, tokens = random.Random(0), begun(), 0.0, 0
    for passed in range(4000):
        ms = 10.0 if guard.rests else 13.0
        written = 1 if guard.rests or passed % 400 > 40 else rng.choice((1, 2))
        seen(guard, [written], width=1 if guard.rests else 2, ms=ms)
        taken, tokens = taken + ms, tokens + written
        assert taken <= 1.011 * 10.0 * tokens + 20.0


def test_a_question_in_vain_costs_what_it_took_to_ask() -> None:
    guard = begun()
    step = Step([TokenTree(1)], [Path([0], [2])], 1.0, 30.0, 0.5, 0.5)
    asked = 0
    while not guard.rests:
        guard.observe(step, 32.0, CURVE, plain=False, counts=True)
        asked += 1
    assert 14 <= asked <= 17  # a tenth of a plain pass each, whatever else held the pass up


def test_being_held_up_is_soon_forgotten() -> None:
    guard = begun()
    for _ in range(20):
        seen(guard, [1], ms=500.0)
    passes = 0
    while guard.rests:
        seen(guard, [1], width=1, ms=10.0)
        passes += 1
    assert passes <= 120


def test_what_is_no_verdict() -> None:
    """Passes that tell nothing, and one that was slow."""
    guard = begun()
    for _ in range(50):
        seen(guard, [1], ms=14.0, counts=False)
    assert not guard.rests
    guard = begun()
    seen(guard, [2], ms=500.0)
    assert not guard.rests


@pytest.mark.parametrize(("written", "rests"), [([1, 3], True), ([3, 3], False)])
def test_a_batch_is_judged_by_those_that_end_it(written: list[int], rests: bool) -> None:
    guard = begun(2)
    for _ in range(16):
        seen(guard, written, width=3, ms=14.0)
    assert guard.rests == rests


def test_a_sequence_may_lag_behind_for_a_while() -> None:
    """Eight passes take the time of eleven plain ones; one of four sequences wrote eight tokens, the others twenty."""
    guard = begun(4)
    for written in [[1, 2, 3, 2]] * 4 + [[1, 3, 2, 3]] * 4:
        seen(guard, written, width=3, ms=14.0)
    assert not guard.rests


def test_what_one_sequence_accepts_is_not_faster_yet() -> None:
    guard = begun(4)
    assert not seen(guard, [1, 1, 1, 2], width=3, ms=14.0)
    assert seen(guard, [2, 2, 2, 2], width=3, ms=14.0)


def test_a_lead_counts_less_than_what_all_have_written() -> None:
    assert reached([20, 20]) == 20.0
    assert 21.0 < reached([21, 25]) < 22.5
    assert reached([7]) == 7.0
