"""Trees: the lookahead window, and what every tree must satisfy."""

import random
from collections.abc import Sequence

import pytest
import torch
from helpers.refusals import refuses
from helpers.toy import examples, functions, plain
from hypothesis import given
from hypothesis import strategies as st

from jacobi import TokenTree, ancestor_bits, branch_mask, walk

PATHS = st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=8)

# W=5, N=4, G=2, every token different.
WINDOW = [[11, 12, 13, 14], [20, 21, 22, 23, 24], [30, 31, 32, 33, 34]]
GUESSES = [[41, 42, 43], [51, 52, 53]]


def draw(mask: torch.Tensor) -> list[str]:
    """A bool mask as rows of X, which sees, and dots."""
    return ["".join("X" if seen else "." for seen in row) for row in mask.tolist()]


def closure(parents: Sequence[int]) -> list[list[bool]]:
    """Who sees whom, by climbing from every node."""
    seen = [[False] * len(parents) for _ in parents]
    for node in range(len(parents)):
        above = node
        while above >= 0:
            seen[node][above] = True
            above = parents[above]
    return seen


def token_paths(tree: TokenTree) -> set[tuple[int, ...]]:
    """What every node stands for: the tokens from below the root down to it."""
    return {tuple(tree.tokens[node] for node in tree.path(end)[1:]) for end in range(len(tree))}


def prefixes(paths: Sequence[Sequence[int]]) -> set[tuple[int, ...]]:
    """Every prefix of every path, the empty one included."""
    return {()} | {tuple(path[:length]) for path in paths for length in range(len(path) + 1)}


@st.composite
def parent_arrays(draw_from: st.DrawFn) -> list[int]:
    count = draw_from(st.integers(1, 70))
    return [-1] + [draw_from(st.integers(0, node - 1)) for node in range(1, count)]


def test_comb_is_the_published_lookahead_window() -> None:
    """Level 0 is a spine behind the root, a cell of a later level hangs below the one above it in its column, and so
    sees level 0 up to its column; a guess sees the root and itself, and nobody sees a guess."""
    tree = TokenTree(10)
    cells = tree.grow_comb(WINDOW)
    for guess in GUESSES:
        tree.extend(0, guess)
    assert cells == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 12, 13, 14]]
    assert tree.parents == [-1, *range(4), *range(10), 0, 15, 16, 0, 18, 19]
    assert tree.tokens == [10, *(token for part in (*WINDOW, *GUESSES) for token in part)]


def test_comb_cells_that_agree_are_one_node() -> None:
    """Column 0 of level 1 predicts the same place as the first spine token, and here they are the same token."""
    tree = TokenTree(1)
    assert tree.grow_comb([[2, 3], [2, 3, 4]]) == [[0, 1, 2], [1, 2, 3]]
    assert (tree.tokens, tree.parents) == ([1, 2, 3, 4], [-1, 0, 1, 2])
    tree = TokenTree(1)
    assert tree.grow_comb([[], [2], [3]]) == [[0], [1], [2]]
    assert tree.parents == [-1, 0, 1]


@examples(200)
@given(parent_arrays())
def test_branch_mask_is_the_ancestor_closure(parents: list[int]) -> None:
    mask = branch_mask(tuple(parents))
    assert mask.dtype is torch.bool
    assert mask.tolist() == closure(parents)


@examples(100)
@given(parent_arrays())
def test_depth_is_the_number_of_ancestors(parents: list[int]) -> None:
    """So root position + depth is the position plain decoding would give the node."""
    tree = TokenTree.from_parents(list(range(len(parents))), parents)
    assert tree.parents == parents
    assert tree.depths == [sum(row) - 1 for row in closure(parents)]
    for node in range(len(tree)):
        path = tree.path(node)
        assert (path[0], path[-1], len(path)) == (0, node, tree.depths[node] + 1)
        assert [tree.parents[below] for below in path[1:]] == path[:-1]


@examples(150)
@given(PATHS, st.randoms(use_true_random=False))
def test_merging_changes_no_path(paths: list[list[int]], rng: random.Random) -> None:
    """Paths = prefix closure of what was put in, one node each, in whatever order and however often."""
    tree = TokenTree.from_paths(9, paths)
    assert token_paths(tree) == prefixes(paths)
    assert len(tree) == len(prefixes(paths))
    again = paths + paths[: len(paths) // 2]
    rng.shuffle(again)
    assert token_paths(TokenTree.from_paths(9, again)) == prefixes(paths)


@examples(150)
@given(PATHS, functions(4), st.randoms(use_true_random=False))
def test_sibling_order_changes_no_text(paths: list[list[int]], next_token, rng: random.Random) -> None:
    """A walk follows the model, so it writes plain decoding's text however the draft is ordered."""

    def written(tree: TokenTree) -> list[int]:
        def choose(node: int) -> int:
            return next_token([tree.tokens[above] for above in tree.path(node)])

        return walk(tree, choose, lambda token: False).tokens

    shuffled = list(paths)
    rng.shuffle(shuffled)
    text = written(TokenTree.from_paths(9, paths))
    assert text == written(TokenTree.from_paths(9, shuffled))
    assert text == plain(next_token, [9], len(text))
    assert tuple(text[:-1]) in prefixes(paths)
    assert tuple(text) not in prefixes(paths)


@examples(100)
@given(parent_arrays(), st.data())
def test_from_parents_merges_equal_siblings(parents: list[int], data: st.DataObject) -> None:
    tokens = data.draw(st.lists(st.integers(0, 2), min_size=len(parents), max_size=len(parents)))
    paths = [[tokens[above] for above in range(len(parents)) if row[above]][1:] for row in closure(parents)]
    tree = TokenTree.from_parents(tokens, parents)
    assert token_paths(tree) == prefixes(paths)
    assert len(tree) == len(prefixes(paths))
    assert all(parent < node for node, parent in enumerate(tree.parents))


def test_docstring_example() -> None:
    tree = TokenTree.from_paths(0, [[1, 2, 3], [1, 4]])
    assert (tree.tokens, tree.parents, tree.depths) == ([0, 1, 2, 3, 4], [-1, 0, 1, 2, 1], [0, 1, 2, 3, 2])
    assert repr(tree) == "TokenTree(tokens=[0, 1, 2, 3, 4], parents=[-1, 0, 1, 2, 1])"


def test_a_tree_asks_for_nothing_unless_told() -> None:
    """Deterministic drafts, and no next tokens gathered; what was told of a node goes with the node."""
    tree = TokenTree.from_paths(0, [[1, 2], [3]])
    assert tree.top_k == 0
    assert tree.drawn_from is None
    tree.truncate(3)
    assert tree.drawn_from is None
    tree.drawn_from = {0: {1: 0.5, 3: 0.5}, 2: {1: 1.0}}
    tree.truncate(2)
    assert list(tree.drawn_from) == [0]


def test_the_drawn_matrix_of_the_docstring() -> None:
    rows = [line.split()[1:] for line in str(branch_mask.__doc__).splitlines()[-6:-1]]
    assert draw(branch_mask([-1, 0, 1, 2, 1])) == ["".join("X" if mark == "T" else "." for mark in row) for row in rows]


@examples(100)
@given(parent_arrays())
def test_ancestor_bits_are_the_same_closure(parents: list[int]) -> None:
    assert ancestor_bits([-1, 0, 0, 1]) == [0b0001, 0b0011, 0b0101, 0b1011]
    seen = [[bool(bits >> node & 1) for node in range(len(parents))] for bits in ancestor_bits(parents)]
    assert seen == closure(parents)


@pytest.mark.parametrize(
    ("tokens", "parents", "message"),
    [
        ([], [], "one parent for each token: got 0 tokens and 0 parents"),
        ([1, 2], [-1], "one parent for each token: got 2 tokens and 1 parents"),
        ([1, 2], [0, 0], "Node 0 is the root and has parent -1: got 0"),
        ([1, 2, 3], [-1, 2, 0], "A parent comes before its child: node 1 names parent 2"),
        ([1, 2, 3], [-1, 0, 2], "A parent comes before its child: node 2 names parent 2"),
        ([1, 2], [-1, -1], "A parent comes before its child: node 1 names parent -1"),
    ],
)
def test_from_parents_refuses(tokens: list[int], parents: list[int], message: str) -> None:
    refuses(message, TokenTree.from_parents, tokens, parents)
