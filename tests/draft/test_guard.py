"""Periods of drafting are judged by the clock, and rests follow those that do not pay."""

from jacobi import Path, Step, TokenTree
from lookahead.draft.guard import Guard

CURVE = [10.0, 12.0, 14.0]  # milliseconds of passes over 1, 2, 3 nodes


def passes(guard: Guard, count: int, written: list[int], width: int = 2, ms: float = 12.0, counts: bool = True) -> None:
    """Passes that all took ``ms``, in which sequences wrote so many tokens each."""
    tree = TokenTree.chain(1, [2] * (width - 1))
    paths = [Path(list(range(tokens)), [2] * tokens) for tokens in written]
    for _ in range(count):
        step = Step([tree] * len(written), paths, 1.0, ms - 2.0, 0.5, 0.5)
        guard.observe(step, ms, CURVE, counts)


def rest_of(guard: Guard) -> int:
    """Plain passes until the guard lets drafts be."""
    count = 0
    while guard.least_gain > 1.0:
        passes(guard, 1, [1], width=1, ms=10.0)
        count += 1
    return count


def test_rests_double_while_nothing_pays() -> None:
    guard = Guard()
    guard.begin(1)
    rests = []
    for _ in range(7):
        passes(guard, 16, [1])  # 1.2 plain passes a token
        rests.append(rest_of(guard))
    assert rests == [8, 16, 32, 64, 128, 256, 256]


def test_a_period_that_pays_goes_on() -> None:
    guard = Guard()
    guard.begin(1)
    passes(guard, 200, [2])
    assert guard.least_gain == 1.0
    assert not guard.rests


def test_a_clear_loss_is_told_after_eight_passes() -> None:
    guard = Guard()
    guard.begin(1)
    passes(guard, 7, [1], ms=14.0)
    assert guard.least_gain == 1.0
    passes(guard, 1, [1], ms=14.0)
    assert guard.least_gain > 1.0
    assert not guard.rests, "a draft that promises much may come at once"
    passes(guard, 1, [1], width=1, ms=10.0)
    assert guard.rests
    assert rest_of(guard) == 7
    passes(guard, 8, [1], ms=14.0)
    assert rest_of(guard) == 16, "and the next rest is longer"


def test_a_draft_that_is_kept_ends_a_rest() -> None:
    guard = Guard()
    guard.begin(1)
    passes(guard, 8, [1], ms=14.0)
    passes(guard, 1, [3], width=3)
    assert guard.least_gain == 1.0


def test_passes_that_tell_nothing_do_not_count() -> None:
    guard = Guard()
    guard.begin(1)
    passes(guard, 50, [1], ms=14.0, counts=False)
    assert guard.least_gain == 1.0


def test_a_batch_is_judged_by_those_that_end_it() -> None:
    guard = Guard()
    guard.begin(2)
    passes(guard, 16, [1, 3], width=3, ms=14.0)
    assert guard.least_gain > 1.0
    guard = Guard()
    guard.begin(2)
    passes(guard, 24, [2, 3], width=3, ms=14.0)
    assert guard.least_gain == 1.0


def test_a_sequence_may_lag_behind_for_a_while() -> None:
    """Eight passes take the time of eleven plain ones; one of four sequences wrote eight tokens, the others twenty."""
    guard = Guard()
    guard.begin(4)
    passes(guard, 4, [1, 2, 3, 2], width=3, ms=14.0)
    passes(guard, 4, [1, 3, 2, 3], width=3, ms=14.0)
    assert guard.least_gain == 1.0


def test_what_one_sequence_accepts_is_not_faster_yet() -> None:
    guard = Guard()
    guard.begin(4)
    tree = TokenTree.chain(1, [2, 2])
    for tokens, expected in (([1, 1, 1, 2], False), ([2, 2, 2, 2], True)):
        paths = [Path(list(range(count)), [2] * count) for count in tokens]
        assert guard.observe(Step([tree] * 4, paths, 1.0, 12.0, 0.5, 0.5), 14.0, CURVE, True) == expected


def test_one_slow_pass_is_no_verdict() -> None:
    guard = Guard()
    guard.begin(1)
    passes(guard, 1, [2], ms=500.0)
    passes(guard, 23, [2])
    assert guard.least_gain == 1.0
