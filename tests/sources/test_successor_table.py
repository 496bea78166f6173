"""The table of what the model said."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from helpers.drafting import spread, successors
from helpers.toy import examples, seeded
from hypothesis import given
from hypothesis import strategies as st

from jacobi import LookaheadError, Successors
from lookahead.sources import RecyclingSource, SuccessorTable
from lookahead.sources.successor_table import BEST, LEVEL_STEPS, LEVELS


def row_of(*numbers: int) -> Successors:
    """Rows that can be told apart."""
    return successors(*([number] for number in numbers))


def last_of(table: SuccessorTable, context: tuple[int, int, int]) -> tuple[int, int] | None:
    """The length of the longest known context, and the number of its row."""
    found = table.get(context)
    return found and (found[0], table.best(found[1]))


@pytest.mark.parametrize("capacity", [0, -1])
def test_table_holds_at_least_one_row(capacity: int) -> None:
    with pytest.raises(LookaheadError, match="at least one row"):
        SuccessorTable(capacity)


@examples(60)
@given(st.integers(1, 12), st.integers(1, 6), st.integers(0, 200), st.integers(0, 99))
def test_table_is_bounded(capacity: int, tokens: int, count: int, seed: int) -> None:
    """Two generations of ``capacity`` rows for each of three lengths of context, at any time."""
    table, rng = SuccessorTable(capacity), seeded(seed)
    for _ in range(count):
        table.put([(rng.randrange(tokens), rng.randrange(tokens), rng.randrange(tokens))], row_of(1))
        assert len(table) <= 6 * capacity
        for generation in (*table._young, *table._old):
            assert len(generation) <= capacity


@examples(60)
@given(st.integers(1, 12), st.lists(st.tuples(*[st.integers(0, 3)] * 3), max_size=30))
def test_rows_that_come_together_are_rows_one_after_the_other(
    capacity: int, contexts: list[tuple[int, int, int]]
) -> None:
    together, single = SuccessorTable(capacity), SuccessorTable(capacity)
    together.put(contexts, row_of(*range(max(1, len(contexts)))))
    for row, context in enumerate(contexts):
        single.put([context], row_of(row))
    assert all(last_of(together, context)[0] == 3 for context in contexts[-capacity:])  # type: ignore[index]
    assert all(len(generation) <= capacity for generation in (*together._young, *together._old))
    if len(contexts) <= capacity:
        assert all(last_of(together, context) == last_of(single, context) for context in contexts)


@examples(60)
@given(st.integers(2, 12), st.integers(0, 99))
def test_rows_outlive_newer_ones(capacity: int, seed: int) -> None:
    """However full the young generation is, a row is there until ``capacity - 1`` newer ones are."""
    table, fresh = SuccessorTable(capacity), iter(range(1000, 5000))

    def other() -> None:
        table.put([(next(fresh), next(fresh), next(fresh))], row_of(1))

    for _ in range(seed % (2 * capacity)):
        other()
    table.put([(1, 2, 3)], row_of(7))
    for _ in range(capacity - 1):
        other()
        assert last_of(table, (1, 2, 3)) == (3, 7)


@pytest.mark.parametrize("before", range(4))
def test_a_row_outlives_as_many_newer_ones_as_documented(before: int) -> None:
    """Rows outlive at least ``capacity`` newer ones, wherever in their generation they were written."""
    table = SuccessorTable(4)
    for token in range(before):
        table.put([(token, token, token)], row_of(1))
    table.put([(1, 2, 3)], row_of(7))
    for token in range(10, 14):
        table.put([(token, token, token)], row_of(1))
    assert table.get((1, 2, 3)) is not None


def test_rows_of_the_longest_known_context_win() -> None:
    table = SuccessorTable()
    table.put([(1, 2, 3)], row_of(10))
    table.put([(9, 2, 3)], row_of(11))
    table.put([(8, 8, 3)], row_of(12))
    assert last_of(table, (1, 2, 3)) == (3, 10)
    assert last_of(table, (9, 2, 3)) == (3, 11)
    assert last_of(table, (7, 2, 3)) == (2, 11), "the newest row of two tokens"
    assert last_of(table, (7, 7, 3)) == (1, 12), "the newest row of one"
    assert table.get((7, 7, 7)) is None


def test_an_old_row_of_a_longer_context_wins_over_a_young_shorter_one() -> None:
    table = SuccessorTable(2)
    table.put([(1, 2, 3)], row_of(10))
    table.put([(4, 4, 4)], row_of(11))  # the young generation is full and becomes the old one
    table.put([(9, 2, 3)], row_of(12))
    assert last_of(table, (1, 2, 3)) == (3, 10)
    assert last_of(table, (7, 2, 3)) == (2, 12)


@examples(60)
@given(st.integers(1, 12), st.integers(0, 60), st.integers(0, 99))
def test_settling_changes_nothing_that_is_known(capacity: int, count: int, seed: int) -> None:
    table, rng = SuccessorTable(capacity), seeded(seed)
    for number in range(count):
        context = (rng.randrange(3), rng.randrange(3), rng.randrange(3))
        table.put([context], row_of(number))
        if rng.random() < 0.2:
            table.settle()
        assert last_of(table, context) == (3, number)

    def known() -> dict[Any, Any]:
        return {each: (table.get(each), table.last(each, 2)) for each in product(range(3), repeat=3)}

    before = known()
    table.settle()
    assert before == known()


@pytest.mark.usefixtures("either_way")
def test_last_rows_come_from_all_generations() -> None:
    table = SuccessorTable(3)
    for number in range(5):
        table.put([(number, 2, 3)], row_of(number))
        table.settle()

    def known(context: tuple[int, int, int], most: int) -> list[tuple[int, int]]:
        orders, rows = table.last(context, most)
        return list(zip(orders, map(table.best, rows), strict=True))

    assert known((1, 2, 3), 2) == [(3, 1), (2, 4), (2, 3), (1, 4), (1, 3)]
    assert known((1, 2, 3), 3)[1:] == [(2, 4), (2, 3), (2, 2), (1, 4), (1, 3), (1, 2)]
    assert known((1, 2, 3), 1) == [(3, 1), (2, 4), (1, 4)]
    assert known((9, 9, 9), 2) == []


@examples(60)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 99))
def test_what_is_told_stays_what_was_said(capacity: int, width: int, seed: int) -> None:
    """However often lines are used again: the last rows of a context are those that were written last, as far back as
    they go without a gap."""
    table, rng, written = SuccessorTable(capacity), seeded(seed), dict[Any, list[list[int]]]()
    for number in range(60):
        contexts = [(0, rng.randrange(2), rng.randrange(3)) for _ in range(rng.randrange(1, 4))]
        lines = [rng.sample(range(9), width - (number > 30 and width > 1)) for _ in contexts]
        contexts = list(dict.fromkeys(contexts))[:capacity]
        table.put(contexts, successors(*lines))
        table.settle()
        for context, line in zip(contexts, lines, strict=False):
            written.setdefault(context, []).insert(0, line)
        for context, before in written.items():
            orders, rows = table.last(context, 3)
            told = table.said([row for order, row in zip(orders, rows, strict=True) if order == 3])
            kept = [
                [t for t, x in zip(*each, strict=True) if x == 0.0]
                for each in zip(told.tokens, told.logits, strict=True)
            ]
            assert kept == before[: len(kept)]
            assert kept or context not in contexts


@pytest.mark.usefixtures("either_way")
def test_rows_tell_what_was_said() -> None:
    """Infinite logits as well, and tokens of any vocabulary."""
    logits = np.array([[40.0, 39.5, 12.3, -1e30, -np.inf]], np.float32)
    for size in (1 << 16, 200_000):
        table, tokens = SuccessorTable(vocab_size=size), np.array([[65_535, 3, 9, 0, 1]], np.int32) + (size > 1 << 16)
        table.put([(0, 0, 1)], Successors(tokens, logits))
        ((_, row),) = [table.get((0, 0, 1)) or (0, 0)]
        said = table.said([row])
        assert (said.tokens == tokens).all() and (said.logits == logits).all()
        assert [token for token, _ in table.ranked((0, 0, 1))] == tokens[0, :4].tolist()


def test_memory_is_bounded() -> None:
    """What is written again and again, under the same few contexts, too; narrow rows take little."""
    table = SuccessorTable(64)
    told = Successors(np.zeros((32, 64), np.int32), np.zeros((32, 64), np.float32))
    for index in range(200):
        table.put([(index % 2 * 100, 1, node) for node in range(32)], told)
        table.settle()
        assert table._tokens.nbytes + table._logits.nbytes <= 2 * 2 * 65 * 64 * 8
    assert table.get((100, 1, 31)) is not None
    narrow = SuccessorTable(64)
    narrow.put([(1, 2, 3)], spread([1.0, 0.0]))
    assert narrow._logits.shape[1] == 2


@pytest.mark.usefixtures("either_way")
def test_wider_rows_begin_a_new_table_and_narrow_ones_are_filled_up() -> None:
    table = SuccessorTable()
    table.put([(0, 0, 1)], spread([3.0, 1.0]))
    table.put([(0, 0, 3)], spread([3.0, 2.5, 2.0, 1.0]))
    table.put([(0, 0, 4)], spread([3.0, -1.0]))
    assert table.get((9, 9, 1)) is None
    found = [levels_of(table.ranked((9, 9, last))) for last in (3, 4)]
    assert found == [[(4, 2), (5, 2), (6, 3), (7, 4)], [(4, 6), (5, 6)]]


def ranked(*lines: list[float]) -> list[list[tuple[int, int]]]:
    """Tokens and levels after contexts of one token."""
    table = SuccessorTable()
    table.put([(0, 0, node) for node in range(len(lines))], spread(*lines))
    return [levels_of(table.ranked((9, 9, node))) for node in range(len(lines))]


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("settled", [False, True])
def test_a_new_token_is_followed_by_what_followed_others_in_its_place(settled: bool) -> None:
    """The example of the docstring."""
    table = SuccessorTable()
    for context, token in (((1, 2, 3), 10), ((1, 2, 4), 20), ((5, 6, 7), 10)):
        table.put([context], Successors(np.array([[token, token + 1]], np.int32), np.array([[3.0, 1.0]], np.float32)))
    if settled:
        table.settle()
    assert table.get((1, 2, 9)) == (0, 2), "the newest row"
    assert table.last((1, 2, 9), 2) == ([0], [2])
    assert table.last((1, 2, 3), 2)[0] == [3, 2, 1], "longer contexts are enough"
    assert table.last((1, 2, 7), 2)[0] == [1, 0], "one token is not"
    assert [token for token, _ in table.ranked((1, 2, 9))] == [20, 21, 10]
    assert [token for token, _ in table.ranked((8, 8, 9))] == [10], "what was usual when it was counted"
    kinds = {kind for context in ((1, 2, 9), (8, 8, 9), (1, 2, 3)) for _, kind in table.ranked(context)}
    assert len(kinds) == 2 + 2 + 1
    assert max(kinds) < len(RecyclingSource.priors)
    assert not table.ranked((1, 2, 9), guess=False)
    assert table.ranked((1, 2, 3), guess=False) == table.ranked((1, 2, 3))


@pytest.mark.usefixtures("either_way")
def test_what_is_usual_changes_with_the_text() -> None:
    table = SuccessorTable(capacity=4)
    for token in (1, 2):
        for at in range(200):
            table.put([(0, 0, at % 3)], Successors(np.array([[token]], np.int32), np.array([[1.0]], np.float32)))
        assert [usual for usual, _ in table.ranked((7, 7, 7))] == [token]


@pytest.mark.usefixtures("either_way")
def test_levels_are_distances_in_logits() -> None:
    near, torn, sure = ranked([2.0, 1.9, 1.2, -6.0], [5.0, -3.0, -np.inf, -np.inf], [5.0, *[-np.inf] * 3])
    assert near == [(4, 0), (5, 0), (6, 2), (7, LEVELS - 1)]
    assert torn == [(4, LEVELS - 1), (5, LEVELS - 1)], "excluded tokens are no successors"
    assert sure == [(4, LEVELS - 1)]
    gaps = [0.0, 0.3, 1.0, 2.0, 3.9, 4.0, 7.0]
    (steps,) = ranked([-gap for gap in gaps])
    assert [level for _, level in steps] == [sum(gap >= step for step in LEVEL_STEPS) for gap in (0.3, *gaps[1:BEST])]


def levels_of(candidates: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Tokens and levels, of candidates in a context of one token."""
    return [(token, kind - rank * LEVELS) for rank, (token, kind) in enumerate(candidates)]
