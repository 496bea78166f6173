"""The table of what the model said, and the source that reads it."""

from typing import Any

import numpy as np
import pytest
from helpers.drafting import spread, successors, tokens_of
from helpers.refusals import refuses
from helpers.toy import examples, seeded
from hypothesis import given
from hypothesis import strategies as st

from jacobi import Path, Successors, TokenTree
from lookahead.sources import RecyclingSource, SuccessorTable
from lookahead.sources.perturbed import BINS, Draw


def row_of(*numbers: int) -> Successors:
    """Rows that can be told apart."""
    return successors(*([number] for number in numbers))


def put(table: SuccessorTable, context: tuple[int, int, int], said: Successors, line: int = 0) -> None:
    """Write one row."""
    table.put(context, [-1], [context[2]], Successors(said.tokens[line:][:1], said.logits[line:][:1]))


def last_of(table: SuccessorTable, context: tuple[int, int, int]) -> tuple[int, int] | None:
    """The length of the longest known context, and the number of its row."""
    orders, rows = table.last(context, 1)
    return (orders[0], int(table.said(rows).tokens[0, 0])) if rows else None


@pytest.mark.parametrize("capacity", [0, -1, 3])
def test_table_holds_a_power_of_two(capacity: int) -> None:
    refuses(f"1, 2, 4, 8... rows: got capacity={capacity}", SuccessorTable, capacity)


@pytest.mark.usefixtures("either_way")
@examples(60)
@given(st.integers(0, 4), st.lists(st.tuples(st.integers(0, 99), st.integers(-1, 2)), max_size=90))
def test_a_trees_rows_are_rows_one_after_the_other(size: int, nodes: list[tuple[int, int]]) -> None:
    """Each under the context of its branch. The last one of a context counts; only as many as the table holds are
    known."""
    contexts, parents, tokens = [(1, -1, 2)], [-1], [2]
    for number, (parent, token) in enumerate(nodes, 1):
        parents.append(parent % number)
        tokens.append(token)
        contexts.append((*contexts[parents[-1]][1:], token))
    together, single = SuccessorTable(1 << size), SuccessorTable(1 << size)
    together.put(contexts[0], parents, tokens, row_of(*range(len(contexts))))
    for row, context in enumerate(contexts):
        put(single, context, row_of(row))
    for context, row in {context: row for row, context in enumerate(contexts)}.items():
        kept = row >= len(contexts) - (1 << size)
        for table in (together, single):
            order, number = last_of(table, context) or (0, 0)
            assert order < 3 or (number == row and kept)
    assert last_of(single, contexts[-1]) == (3, len(contexts) - 1)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("size", [1 << 12, 1 << 14])
def test_the_newest_rows_are_known(size: int) -> None:
    """All but a few, whose buckets are full of newer ones, for each length of context; none of the others."""
    table, rng = SuccessorTable(size), seeded(size)
    text = [rng.randrange(9000) for _ in range(3 * size + 2)]
    contexts = list(zip(text, text[1:], text[2:], strict=False))
    for start in range(0, len(contexts), 32):
        numbers = [number % 9000 for number in range(start, start + 32)]
        table.put(contexts[start], list(range(-1, 31)), text[start + 2 :][:32], row_of(*numbers))
    known = [last_of(table, context) == (3, row % 9000) for row, context in enumerate(contexts)]
    assert not any(known[: 2 * size])
    assert sum(known[2 * size :]) >= 0.97 * size
    twos = [last_of(table, (-1, *context[1:])) == (2, row % 9000) for row, context in enumerate(contexts)]
    assert sum(twos[2 * size :]) >= 0.97 * size


def test_numbers_of_rows_may_overflow() -> None:
    """After four thousand million rows."""
    table = SuccessorTable(16)
    put(table, (0, 0, 0), row_of(0))
    table.written = (1 << 32) - 40
    for number in range(80):
        put(table, (number // 4, 2, 3), row_of(number))
        assert last_of(table, (number // 4, 2, 3)) == (3, number)
        told = table.said(table.last((-1, 2, 3), 4)[1][:4]).tokens[:, 0].tolist()
        assert told[: number + 1] == list(range(number, number - 4, -1))[: number + 1]
    assert table.written == 40


def test_rows_of_the_longest_known_context_win() -> None:
    table = SuccessorTable()
    put(table, (1, 2, 3), row_of(10))
    put(table, (9, 2, 3), row_of(11))
    put(table, (8, 8, 3), row_of(12))
    assert last_of(table, (1, 2, 3)) == (3, 10)
    assert last_of(table, (9, 2, 3)) == (3, 11)
    assert last_of(table, (7, 2, 3)) == (2, 11), "the newest row of two tokens"
    assert last_of(table, (7, 7, 3)) == (1, 12), "the newest row of one"
    assert last_of(table, (7, 7, 7)) is None


@pytest.mark.usefixtures("either_way")
def test_last_rows_come_newest_first() -> None:
    table = SuccessorTable(8)
    for number in range(5):
        put(table, (number, 2, 3), row_of(number))

    def known(context: tuple[int, int, int], most: int) -> list[tuple[int, int]]:
        orders, rows = table.last(context, most)
        return list(zip(orders, table.said(rows).tokens[:, 0].tolist(), strict=True))

    assert known((1, 2, 3), 2) == [(3, 1), (2, 4), (2, 3), (1, 4), (1, 3)]
    assert known((1, 2, 3), 3)[1:] == [(2, 4), (2, 3), (2, 2), (1, 4), (1, 3), (1, 2)]
    assert known((1, 2, 3), 1) == [(3, 1), (2, 4), (1, 4)]
    assert known((1, 2, 9), 2) == [(0, 1)]
    assert table.last((9, 9, 9), 2) == ([], [])


@pytest.mark.usefixtures("either_way")
@examples(60)
@given(st.integers(0, 3), st.integers(1, 4), st.integers(0, 99))
def test_what_is_told_stays_what_was_said(size: int, width: int, seed: int) -> None:
    """However often lines are used again: the last rows of a context are those that were written last, as far back as
    they go without a gap."""
    table, rng, written = SuccessorTable(capacity := 1 << size), seeded(seed), dict[Any, list[list[int]]]()
    for number in range(60):
        contexts = [(0, rng.randrange(2), rng.randrange(3)) for _ in range(rng.randrange(1, 4))]
        lines = [rng.sample(range(9), width - (number > 30 and width > 1)) for _ in contexts]
        contexts = list(dict.fromkeys(contexts))[:capacity]
        for context, line in zip(contexts, lines, strict=False):
            put(table, context, successors(line))
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
        put(table, (0, 0, 1), Successors(tokens, logits))
        said = table.said(table.last((0, 0, 1), 1)[1][:1])
        assert (said.tokens == tokens).all() and (said.logits == logits).all()
        found = [token for token, _ in RecyclingSource(table).propose(((0, 0, 1), 0))]
        assert found == tokens[0, :2].tolist(), "not those that are out of reach"


def test_memory_is_bounded() -> None:
    """What is written again and again, under the same few contexts, too; narrow rows take little."""
    table = SuccessorTable(64)
    told = Successors(np.zeros((33, 64), np.int32), np.zeros((33, 64), np.float32))
    for index in range(200):
        table.put((0, index % 2 * 100, 1), [-1, *[0] * 32], [1, *range(32)], told)
        assert (
            sum(array.nbytes for array in (table._entries, table._before, table._tokens, table._logits))
            <= 64 * (64 * 8 + 12) + 1024 * 64
        )
    assert last_of(table, (100, 1, 31)) == (3, 0)
    narrow = SuccessorTable(64)
    put(narrow, (1, 2, 3), spread([1.0, 0.0]))
    assert narrow._logits.shape[1] == 2


@pytest.mark.usefixtures("either_way")
def test_wider_rows_begin_a_new_table_and_narrow_ones_are_filled_up() -> None:
    table = SuccessorTable()
    put(table, (0, 0, 1), spread([3.0, 1.0]))
    put(table, (0, 0, 3), spread([3.0, 2.5, 2.0, 1.0]))
    put(table, (0, 0, 4), spread([3.0, -1.0]))
    assert last_of(table, (9, 9, 1)) is None
    said = [table.said(table.last((9, 9, last), 1)[1][:1]) for last in (3, 4)]
    assert [row.tokens.tolist() for row in said] == [[[4, 5, 6, 7]], [[4, 5, 0, 0]]]
    assert np.isneginf(said[1].logits[0, 2:]).all()


@pytest.mark.usefixtures("either_way")
def test_a_new_token_is_followed_by_what_followed_others_in_its_place() -> None:
    """The example of the docstring."""
    table = SuccessorTable()
    for context, token in (((1, 2, 3), 10), ((1, 2, 4), 20), ((5, 6, 7), 10)):
        put(table, context, Successors(np.array([[token, token + 1]], np.int32), np.array([[3.0, 1.0]], np.float32)))
    assert table.last((1, 2, 9), 2) == ([0], [1]), "the newest row"
    assert table.last((1, 2, 3), 2)[0] == [3, 2, 1], "longer contexts are enough"
    assert table.last((1, 2, 7), 2)[0] == [1, 0], "one token is not"
    assert table.likeliest((1, 2, 9)) == 20 and table.likeliest((8, 8, 9)) is None
    assert table.row_of(3) is not None and table.row_of(9) is None


def test_recycling_reads_the_prompts_end() -> None:
    """What the model said at the last prompt tokens is known under their contexts."""
    source = RecyclingSource(SuccessorTable())
    source.start([1, 2, 3, 4], successors([20, 21], [30, 31], [40, 41]))
    assert source.root() == ((2, 3, 4), 0)
    assert tokens_of(source.propose(source.root()))[:2] == [40, 41]
    assert tokens_of(source.propose(((1, 2, 3), 0)))[:2] == [30, 31]
    assert tokens_of(source.propose(((7, 1, 2), 0)))[:2] == [20, 21]
    assert source.propose(((7, 7, 1), 0)) == [], "a new token in a new place"
    assert tokens_of(source.propose(((1, 2, 9), 0)))[:2] == [30, 31], "what was said in its place comes first"
    careful = RecyclingSource(source._table, guess=False)
    assert careful.propose(((7, 7, 1), 0)) == careful.propose(((1, 2, 9), 0)) == []


def test_tokens_like_a_new_one_are_heard() -> None:
    """Token 9 is like token 2, not like 1, 3 and 4."""
    likes = np.eye(10, dtype=np.float32)
    likes[9] = likes[2]
    source = RecyclingSource(SuccessorTable(), embed=lambda tokens: likes[list(tokens)])
    source.start([1, 2, 3, 4], successors([10, 11], [20, 21], [30, 31], [40, 41]))
    assert tokens_of(source.propose(((7, 7, 9), 0)))[0] == 20
    source.learn(TokenTree(4), Path([0], [9]), successors([90]))
    source.learn(TokenTree(9), Path([0], [8]), successors([91]))
    assert tokens_of(source.propose(((7, 7, 9), 0)))[0] == 91, "it is no longer new"


def test_recycling_with_more_rows_than_tokens_and_with_none() -> None:
    """A row with padding: the first rows stand for pads; without successors it only moves on."""
    source = RecyclingSource(SuccessorTable())
    source.start([5], successors([1], [2], [3], [4]))
    assert tokens_of(source.propose(source.root())) == [4]
    assert source._table.last((5, 5, 5), 3) == ([1], [0]), "and no others"
    source.start([1, 2, 3], None)
    source.learn(TokenTree(3), Path([0, 1], [4, 5]), None)
    assert source.root() == ((3, 4, 5), 2)
    assert source._table.last((1, 2, 3), 1) == ([], [])


def test_recycling_learns_off_the_path() -> None:
    """Nodes that were not kept are learnt as well, under the context of their branch."""
    source = RecyclingSource(SuccessorTable())
    source.start([1, 2, 3], None)
    tree = TokenTree.from_parents([3, 4, 5, 6], [-1, 0, 0, 2])  # 3 -> 4, 3 -> 5 -> 6
    source.learn(tree, Path([0, 1], [4, 9]), successors([4], [9], [60], [70]))
    assert source.root() == ((3, 4, 9), 2)
    assert tokens_of(source.propose(((2, 3, 5), 1)))[0] == 60
    assert tokens_of(source.propose(((3, 5, 6), 1)))[0] == 70
    assert tokens_of(source.propose(((1, 2, 3), 1)))[0] == 4
    assert tokens_of(source.propose(((0, 0, 6), 1)))[0] == 70


def test_rows_share_a_table() -> None:
    table = SuccessorTable()
    first, second = RecyclingSource(table), RecyclingSource(table)
    first.start([1, 2, 3], successors([8, 9]))
    second.start([1, 2, 3], None)
    assert tokens_of(second.propose(second.root()))[:2] == [8, 9]


@pytest.mark.parametrize("drawn", [False, True])
def test_what_other_texts_taught_has_kinds_of_its_own(drawn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    table, rng = SuccessorTable(64), np.random.default_rng(0)
    noise = rng.exponential(size=(8, 30)).astype(np.float32)
    draw = Draw(lambda index: noise[index % 8]) if drawn else None

    def said(count: int) -> Successors:
        tokens = np.stack([rng.permutation(30)[:5] for _ in range(count)]).astype(np.int32)
        return Successors(tokens, -np.sort(rng.exponential(size=(count, 5)).astype(np.float32)))

    table.put((1, 2, 3), [-1, 0, 1], [3, 4, 5], said(3))
    source = RecyclingSource(table, draw)
    source.start([7, 8, 9], said(3))
    assert source.root() == ((7, 8, 9), 0)
    contexts = [(1, 2, 3), (9, 9, 5), (2, 9, 4), (7, 8, 9), (9, 1, 8), (6, 6, 6)]
    built = [source.propose((context, 0)) for context in contexts]
    assert [{kind // BINS for _, kind in offer} for offer in built] == [{6}, {4}, {4}, {2}, {0}, set()]
    monkeypatch.setattr("lookahead._native.speedups", None)
    assert [source.propose((context, 0)) for context in contexts] == built
