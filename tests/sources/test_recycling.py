"""The source that reads the table of what the model said."""

from collections.abc import Sequence

from helpers.drafting import spread, successors

from jacobi import Path, TokenTree
from lookahead.sources import RecyclingSource, SuccessorTable
from lookahead.sources.successor_table import BEST, LEVELS


def tokens_of(candidates: Sequence[tuple[int, int]]) -> list[int]:
    return [token for token, _ in candidates]


def test_recycling_reads_the_prompts_end() -> None:
    """What the model said at the last prompt tokens is known under their contexts."""
    source = RecyclingSource(SuccessorTable())
    source.start([1, 2, 3, 4], successors([20, 21], [30, 31], [40, 41]))
    assert tokens_of(source.propose(source.root())) == [40, 41]
    assert tokens_of(source.propose((1, 2, 3))) == [30, 31]
    assert tokens_of(source.propose((7, 1, 2))) == [20, 21]
    assert tokens_of(source.propose((7, 7, 1))) == [20, 30, 40], "a new token: what is usual"
    assert tokens_of(source.propose((1, 2, 9))) == [30, 31, 20, 40], "what was said in its place comes first"
    careful = RecyclingSource(source._table, guess=False)
    assert careful.propose((7, 7, 1)) == careful.propose((1, 2, 9)) == []


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
    assert source.root() == (3, 4, 9)
    assert tokens_of(source.propose((2, 3, 5))) == [60]
    assert tokens_of(source.propose((3, 5, 6))) == [70]
    assert tokens_of(source.propose((1, 2, 3))) == [4]
    assert tokens_of(source.propose((0, 0, 6))) == [70]


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
    assert source._table.last((1, 2, 3), 1) == ([], [])


def test_rows_share_a_table() -> None:
    table = SuccessorTable()
    first, second = RecyclingSource(table), RecyclingSource(table)
    first.start([1, 2, 3], successors([8, 9]))
    second.start([1, 2, 3], None)
    assert tokens_of(second.propose(second.root())) == [8, 9]
