"""The source that reads the table of what the model said."""

import numpy as np
import pytest
from helpers.drafting import successors, tokens_of

from jacobi import Path, Successors, TokenTree
from lookahead.sources import RecyclingSource, SuccessorTable
from lookahead.sources.perturbed import BINS, Draw


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


def test_recycling_takes_more_prompt_rows_than_there_are_tokens() -> None:
    """A row with padding: the first rows stand for pads."""
    source = RecyclingSource(SuccessorTable())
    source.start([5], successors([1], [2], [3], [4]))
    assert tokens_of(source.propose(source.root())) == [4]
    assert source._table.last((5, 5, 5), 3) == ([1], [0]), "and no others"


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


def test_recycling_without_successors_only_moves_on() -> None:
    source = RecyclingSource(SuccessorTable())
    source.start([1, 2, 3], None)
    source.learn(TokenTree(3), Path([0, 1], [4, 5]), None)
    assert source.root() == ((3, 4, 5), 2)
    assert source._table.last((1, 2, 3), 1) == ([], [])


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
