"""Accuracies of heads, and trees that no other tree of their size beats."""

import math
from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any

import pytest
from helpers.accuracies import table
from helpers.toy import examples
from hypothesis import given
from hypothesis import strategies as st

from jacobi import LookaheadError
from lookahead.heads.medusa.accuracies import HeadAccuracies, expected_length, grow_tree
from lookahead.medusa import ChoiceTree

Ranks = tuple[int, ...]


def tables(heads: int, ranks: int) -> st.SearchStrategy[HeadAccuracies]:
    """Tables in any order of ranks, with ties and with zeros; only the first head is right at least at times."""
    row = st.tuples(*[st.integers(0, 4)] * ranks).map(lambda counts: tuple(count / (4 * ranks) for count in counts))
    return st.tuples(row.filter(any), *[row] * (heads - 1)).map(lambda rows: table(*rows))


SMALL = st.one_of(tables(1, 4), tables(2, 3), tables(3, 2))


def all_trees(heads: int, ranks: int) -> Iterator[frozenset[Ranks]]:
    """Every prefix-closed set of paths, the empty one too."""
    if not heads:
        yield frozenset()
        return
    below = [None, *all_trees(heads - 1, ranks)]
    for parts in product(below, repeat=ranks):
        tree: set[Ranks] = set()
        for rank, part in enumerate(parts):
            if part is not None:
                tree |= {(rank,), *((rank, *path) for path in part)}
        yield frozenset(tree)


def worth(accuracies: HeadAccuracies, tree: frozenset[Ranks]) -> float:
    return math.fsum(math.prod(accuracies.accuracies[depth][rank] for depth, rank in enumerate(path)) for path in tree)


@examples(60)
@given(SMALL)
def test_no_tree_of_the_same_size_is_worth_more(accuracies: HeadAccuracies) -> None:
    """Against all trees there are, whether or not accuracies fall with the rank."""
    best: dict[int, float] = {}
    for tree in all_trees(len(accuracies.accuracies), len(accuracies.accuracies[0])):
        best[len(tree)] = max(best.get(len(tree), 0.0), worth(accuracies, tree))
    for nodes in range(1, max(best) + 1):
        grown = grow_tree(accuracies, nodes)
        assert len(grown.paths) <= nodes
        assert expected_length(accuracies, grown) == pytest.approx(best[nodes], abs=1e-12)
        assert expected_length(accuracies, grown) == pytest.approx(worth(accuracies, frozenset(grown.paths)))


@examples(60)
@given(st.one_of(SMALL, tables(4, 5)))
def test_larger_budgets_add_to_smaller_trees(accuracies: HeadAccuracies) -> None:
    """And every added node is worth at most as much as the one before."""
    grown = [set(grow_tree(accuracies, nodes).paths) for nodes in range(1, 40)]
    assert all(small <= large for small, large in pairwise(grown))
    lengths = [0.0, *(expected_length(accuracies, ChoiceTree(tuple(paths))) for paths in grown)]
    gains = [after - before for before, after in pairwise(lengths[: 1 + len(grown[-1])])]
    assert all(gain > 0.0 for gain in gains), "nodes that are worth nothing are left out"
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(gains))


def test_ranks_are_taken_by_their_accuracy() -> None:
    accuracies = table((0.1, 0.6, 0.2), (0.0, 0.3, 0.5))
    assert grow_tree(accuracies, 1).paths == ((1,),)
    assert grow_tree(accuracies, 4).paths == ((1,), (2,), (1, 1), (1, 2))
    assert grow_tree(accuracies, 4096).paths == tuple(
        sorted([(0,), (1,), (2,), *product((0, 1, 2), (1, 2))], key=lambda path: (len(path), path))
    )


def test_a_table_that_no_tree_can_be_made_of() -> None:
    nothing = table((0.0, 0.0), (1.0, 0.0))
    with pytest.raises(LookaheadError, match="No candidate of the first head was right in 100 samples"):
        grow_tree(nothing, 5)


@pytest.mark.parametrize("nodes", [0, -1, 4097, 2.0, True])
def test_budgets_out_of_range(nodes: Any) -> None:
    with pytest.raises(LookaheadError, match=r"cannot have .* nodes: expected 1 to 4096"):
        grow_tree(table((0.5,)), nodes)


@pytest.mark.parametrize("path", [(0, 0, 0), (2,), (0, 2)])
def test_a_path_beyond_the_table_is_named(path: Ranks) -> None:
    with pytest.raises(LookaheadError, match=rf"Path \[{', '.join(map(str, path))}\] is not covered"):
        expected_length(table((0.5, 0.2), (0.4, 0.1)), ChoiceTree((path,)))


@pytest.mark.parametrize(
    ("rows", "samples", "message"),
    [
        ((), (), "at least one head"),
        (((0.5,), (0.5, 0.1)), (1, 1), r"\[1, 2\] ranks"),
        (((),), (1,), r"\[0\] ranks"),
        (((0.5,),), (1, 1), "samples for 2 heads and accuracies for 1"),
        (((0.5, -0.1),), (1,), "rank 1 of head 0 is -0.1"),
        (((0.5,), (1.5,)), (1, 1), "rank 0 of head 1 is 1.5"),
        (((math.nan,),), (1,), "is nan"),
        (((0.5, 0.6, 0.7),), (1,), r"head 0 sum to 1.8: .* Give each rank's own share"),
    ],
)
def test_impossible_tables(rows: Any, samples: Any, message: str) -> None:
    with pytest.raises(LookaheadError, match=message):
        HeadAccuracies(rows, samples)


def test_top_is_summed_over_ranks() -> None:
    accuracies = table((0.5, 0.25, 0.125), (0.25, 0.0, 0.5))
    assert accuracies.top(1) == (0.5, 0.25)
    assert accuracies.top(2) == (0.75, 0.25)
    assert accuracies.top(9) == (0.875, 0.75)
