"""The table of top-k candidates, and the source that reads it."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from helpers.toy import examples, seeded
from hypothesis import given
from hypothesis import strategies as st

from jacobi import LookaheadError, Path, Successors, TokenTree
from lookahead.sources import RecyclingSource, SuccessorTable, recycling
from lookahead.sources.perturbed import Draw
from lookahead.sources.recycling import BEST, LEVEL_STEPS, LEVELS, Row, Said

SAID = Said(Successors(np.zeros((1, 1), np.int32), np.zeros((1, 1), np.float32)))


def row_of(number: int) -> Row:
    return SAID, number


def tokens_of(candidates: Sequence[tuple[int, int]]) -> list[int]:
    return [token for token, _ in candidates]


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
        table.put([(rng.randrange(tokens), rng.randrange(tokens), rng.randrange(tokens))], [row_of(1)])
        assert len(table) <= 6 * capacity
        for generation in (*table._young, *table._old):
            assert len(generation) <= capacity


@examples(60)
@given(st.integers(1, 12), st.lists(st.tuples(*[st.integers(0, 3)] * 3), max_size=30))
def test_rows_that_come_together_are_rows_one_after_the_other(
    capacity: int, contexts: list[tuple[int, int, int]]
) -> None:
    together, single = SuccessorTable(capacity), SuccessorTable(capacity)
    together.put(contexts, [row_of(row) for row in range(len(contexts))])
    for row, context in enumerate(contexts):
        single.put([context], [row_of(row)])
    assert all(together.get(context)[0] == 3 for context in contexts[-capacity:])  # type: ignore[index]
    assert all(len(generation) <= capacity for generation in (*together._young, *together._old))
    if len(contexts) <= capacity:
        assert together._young == single._young


@examples(60)
@given(st.integers(2, 12), st.integers(0, 99))
def test_rows_outlive_newer_ones(capacity: int, seed: int) -> None:
    """However full the young generation is, a row is there until ``capacity - 1`` newer ones are."""
    table, fresh = SuccessorTable(capacity), iter(range(1000, 5000))

    def other() -> None:
        table.put([(next(fresh), next(fresh), next(fresh))], [row_of(1)])

    for _ in range(seed % (2 * capacity)):
        other()
    table.put([(1, 2, 3)], [row_of(7)])
    for _ in range(capacity - 1):
        other()
        assert table.get((1, 2, 3)) == (3, row_of(7))


@pytest.mark.parametrize("before", range(4))
def test_a_row_outlives_as_many_newer_ones_as_documented(before: int) -> None:
    """Rows outlive at least ``capacity`` newer ones, wherever in their generation they were written."""
    table = SuccessorTable(4)
    for token in range(before):
        table.put([(token, token, token)], [row_of(1)])
    table.put([(1, 2, 3)], [row_of(7)])
    for token in range(10, 14):
        table.put([(token, token, token)], [row_of(1)])
    assert table.get((1, 2, 3)) is not None


def test_rows_of_the_longest_known_context_win() -> None:
    table = SuccessorTable()
    table.put([(1, 2, 3)], [row_of(10)])
    table.put([(9, 2, 3)], [row_of(11)])
    table.put([(8, 8, 3)], [row_of(12)])
    assert table.get((1, 2, 3)) == (3, row_of(10))
    assert table.get((9, 2, 3)) == (3, row_of(11))
    assert table.get((7, 2, 3)) == (2, row_of(11)), "the newest row of two tokens"
    assert table.get((7, 7, 3)) == (1, row_of(12)), "the newest row of one"
    assert table.get((7, 7, 7)) is None


def test_an_old_row_of_a_longer_context_wins_over_a_young_shorter_one() -> None:
    table = SuccessorTable(2)
    table.put([(1, 2, 3)], [row_of(10)])
    table.put([(4, 4, 4)], [row_of(11)])  # the young generation is full and becomes the old one
    table.put([(9, 2, 3)], [row_of(12)])
    assert table.get((1, 2, 3)) == (3, row_of(10))
    assert table.get((7, 2, 3)) == (2, row_of(12))


@examples(60)
@given(st.integers(1, 12), st.integers(0, 60), st.integers(0, 99))
def test_settling_changes_nothing_that_is_known(capacity: int, count: int, seed: int) -> None:
    """Unless so many rows wait that old ones have to go."""
    table, rng = SuccessorTable(capacity), seeded(seed)
    for number in range(count):
        context = (rng.randrange(3), rng.randrange(3), rng.randrange(3))
        table.put([context], [row_of(number)])
        if rng.random() < 0.2:
            table.settle(2)
        assert table.get(context) == (3, row_of(number))
        assert table.last(context, 2)[0] == (3, row_of(number))

    def known() -> dict[Any, Any]:
        return {each: (table.get(each), table.last(each, 2)) for each in product(range(3), repeat=3)}

    before = known()
    gone = len(table._young[2]) + len(table._new[2]) > capacity
    table.settle(2)
    assert gone or before == known()


def test_last_rows_come_from_all_generations() -> None:
    table = SuccessorTable(3)
    for number in range(5):
        table.put([(number, 2, 3)], [row_of(number)])
        table.settle(2)
    assert table.last((1, 2, 3), 2) == [(order, row_of(at)) for order, at in ((3, 1), (2, 4), (2, 3), (1, 4), (1, 3))]
    assert table.last((1, 2, 3), 1) == [(3, row_of(1)), (2, row_of(4)), (1, row_of(4))]
    assert table.last((9, 9, 9), 2) == []


def successors(*lines: Sequence[int]) -> Successors:
    return Successors(np.array(lines, np.int32), np.zeros((len(lines), len(lines[0])), np.float32))


def test_what_is_held_is_copied_into_few_blocks() -> None:
    """No array of the pass's own stays, and a block is shared by many passes."""
    table = SuccessorTable()
    told = [successors([4, 5], [6, 7 + index]) for index in range(50)]
    held = [table.hold(one) for one in told]
    for one, said in zip(told, held, strict=True):
        assert (said.tokens == one.tokens).all() and not np.shares_memory(said.tokens, one.tokens)
        assert said.tokens.base is held[0].tokens.base and said.logits.base is held[0].logits.base
    wide = table.hold(Successors(np.zeros((3, 9), np.int32), np.ones((3, 9), np.float32)))
    assert wide.logits.shape == (3, 9) and held[0].tokens[1, 1] == 7


def test_what_is_held_tells_what_was_said() -> None:
    """Infinite logits as well, and tokens of any vocabulary."""
    logits = np.array([[40.0, 39.5, 12.3, -1e30, -np.inf]], np.float32)
    tokens = np.array([[65_535, 3, 9, 0, 1]], np.int32)
    draw = Draw(lambda index: None, temperature=0.7)
    exact = draw.chances(logits)
    for size in (1 << 16, 200_000):
        table = SuccessorTable(vocab_size=size)
        said = table.hold(Successors(tokens + (size > 1 << 16), logits))
        assert (said.tokens == tokens + (size > 1 << 16)).all()
        assert np.allclose(table.chances(said, draw)[0], exact[0], rtol=1e-6)
        assert [token for token, _ in said.candidates(0, 1)][:3] == (tokens[0, :3] + (size > 1 << 16)).tolist()


def bytes_of(table: SuccessorTable) -> int:
    kept = [row for held in (*table._young, *table._old) for rows in held.values() for row in rows]
    blocks = {id(said.tokens.base): said for said, _ in kept}
    return sum(said.tokens.base.nbytes + said.logits.base.nbytes for said in blocks.values())


def test_a_generation_ends_with_its_bytes() -> None:
    """What is written again and again, under the same few contexts, holds no more memory than other rows do."""
    table = SuccessorTable(most_bytes=1 << 20)
    told = Successors(np.zeros((32, 64), np.int32), np.zeros((32, 64), np.float32))
    for index in range(1000):
        said = table.hold(told)
        table.put([(index % 2 * 100, 1, node) for node in range(32)], [(said, node) for node in range(32)])
        table.settle(2)
    assert bytes_of(table) <= 4 << 20
    assert table.get((100, 1, 31)) is not None
    stale = SuccessorTable(most_bytes=1 << 20)
    for index in range(2000):  # contexts that are new from time to time would each keep a pass
        said = stale.hold(told)
        stale.put([(1, 1, 1), (2, 2, index // 40)], [(said, 0), (said, 1)])
        stale.settle(2)
    assert bytes_of(stale) <= 4 << 20


def test_what_was_made_of_rows_is_kept_for_the_last_that_were_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recycling, "_MOST_RANKED", 3)
    table, draw = SuccessorTable(), Draw(lambda index: None, temperature=0.5)
    held = [table.hold(successors([4, 5], [6, 7])) for _ in range(8)]
    for said in held:
        assert (table.chances(said, draw) == 1.0).all() and len(table.candidates(said, 1, 1)) == 2
    assert [said.is_warped for said in held] == [False] * 7 + [True]
    assert (table.chances(held[0], draw) == 1.0).all()


def test_recycling_reads_the_prompts_end() -> None:
    """What the model said at the last prompt tokens is known under their contexts."""
    source = RecyclingSource(SuccessorTable())
    source.start([1, 2, 3, 4], successors([20, 21], [30, 31], [40, 41]))
    assert tokens_of(source.propose(source.root())) == [40, 41]
    assert tokens_of(source.propose((1, 2, 3))) == [30, 31]
    assert tokens_of(source.propose((7, 1, 2))) == [20, 21]
    assert source.propose((7, 7, 1)) == []


def test_recycling_takes_more_prompt_rows_than_there_are_tokens() -> None:
    """A row with padding: the first rows stand for pads."""
    source = RecyclingSource(SuccessorTable())
    source.start([5], successors([1], [2], [3], [4]))
    assert tokens_of(source.propose(source.root())) == [4]
    assert len(source._table) == 3


def test_recycling_learns_off_the_path() -> None:
    """Nodes that were not kept are learnt as well, under the context of their branch."""
    source = RecyclingSource(SuccessorTable())
    source.start([1, 2, 3], None)
    tree = TokenTree.from_parents([3, 4, 5, 6], [-1, 0, 0, 2])  # 3 -> 4, 3 -> 5 -> 6
    source.learn(tree, Path([0, 1], [4, 9]), successors([4], [9], [60], [70]))
    assert source.root() == (3, 4, 9)
    assert tokens_of(source.propose((2, 3, 5))) == [60]
    assert tokens_of(source.propose((3, 5, 6))) == [70]
    assert tokens_of(source.propose((1, 2, 3))) == [4]
    assert tokens_of(source.propose((0, 0, 6))) == [70]


def spread(*lines: Sequence[float]) -> Successors:
    """Tokens 4, 5, ... with these logits."""
    tokens = np.arange(4, 4 + len(lines[0]), dtype=np.int32)
    return Successors(np.tile(tokens, (len(lines), 1)), np.array(lines, np.float32))


def test_levels_are_distances_in_logits() -> None:
    said = Said(spread((2.0, 1.9, 1.2, -6.0), (5.0, -3.0, -np.inf, -np.inf), (5.0, *[-np.inf] * 3)))
    assert levels_of(said.candidates(0, 1)) == [(4, 0), (5, 0), (6, 2), (7, LEVELS - 1)]
    assert levels_of(said.candidates(1, 1)) == [(4, LEVELS - 1), (5, LEVELS - 1)], "excluded tokens are no successors"
    assert levels_of(said.candidates(2, 1)) == [(4, LEVELS - 1)]
    gaps = [0.0, 0.3, 1.0, 2.0, 3.9, 4.0, 7.0]
    steps = levels_of(Said(spread([-gap for gap in gaps])).candidates(0, 1))
    assert [level for _, level in steps] == [sum(gap >= step for step in LEVEL_STEPS) for gap in (0.3, *gaps[1:BEST])]


def levels_of(candidates: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Tokens and levels, of candidates in a context of one token."""
    return [(token, kind - rank * LEVELS) for rank, (token, kind) in enumerate(candidates)]


def test_recycling_kinds_tell_context_rank_and_level() -> None:
    source = RecyclingSource(SuccessorTable())
    source.start([1, 2, 3], None)
    source.learn(TokenTree(3), Path([0], [4]), spread((9.0, 8.0, 7.25, 2.0)))
    full = source.propose((1, 2, 3))
    longest = 2 * BEST * LEVELS
    assert full == [(4, longest + 3), (5, longest + 8 + 3), (6, longest + 16 + 4), (7, longest + 24 + 7)]
    assert [kind for _, kind in source.propose((0, 2, 3))] == [kind - BEST * LEVELS for _, kind in full]
    assert [kind for _, kind in source.propose((0, 0, 3))] == [kind - 2 * BEST * LEVELS for _, kind in full]


def test_recycling_without_successors_only_moves_on() -> None:
    source = RecyclingSource(SuccessorTable())
    source.start([1, 2, 3], None)
    source.learn(TokenTree(3), Path([0, 1], [4, 5]), None)
    assert source.root() == (3, 4, 5)
    assert len(source._table) == 0


def test_rows_share_a_table() -> None:
    table = SuccessorTable()
    first, second = RecyclingSource(table), RecyclingSource(table)
    first.start([1, 2, 3], successors([8, 9]))
    second.start([1, 2, 3], None)
    assert tokens_of(second.propose(second.root())) == [8, 9]
