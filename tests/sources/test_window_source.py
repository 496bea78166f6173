"""The Jacobi window as a source: it feeds the pool, and grows and shrinks with the room."""

from collections.abc import Sequence

import numpy as np
import pytest
from helpers.toy import examples, seeded
from hypothesis import given
from hypothesis import strategies as st

from jacobi import Path, Successors, TokenTree
from lookahead.sources import WindowSource
from lookahead.sources.jacobi_window import window_nodes
from lookahead.sources.ngram_pool import NGRAM_SIZE


def tokens_of(candidates: Sequence[tuple[int, int]]) -> list[int]:
    return [token for token, _ in candidates]


def window_source(text: Sequence[int] = (1, 2, 3), vocab: int = 9, seed: int = 0) -> WindowSource:
    source = WindowSource(seeded(seed), vocab)
    source.start(text, None)
    return source


def grown(source: WindowSource, columns: int, room: int, root: int = 3) -> TokenTree:
    tree = TokenTree(root)
    source.grow(tree, columns, room)
    return tree


def following(tree: TokenTree, vocab: int = 9) -> Successors:
    """A model that counts: what it says next at every node."""
    said = np.array([[(token + 1) % vocab] for token in tree.tokens], np.int32)
    return Successors(said, np.zeros(said.shape, np.float32))


def written(tree: TokenTree, vocab: int = 9) -> Path:
    return Path([0], [(tree.tokens[0] + 1) % vocab])


def decode_window(source: WindowSource, columns: Sequence[int], room: int = 50, root: int = 3) -> list[TokenTree]:
    trees = []
    for count in columns:
        tree = grown(source, count, room, root)
        trees.append(tree)
        path = written(tree)
        source.learn(tree, path, following(tree))
        root = path.tokens[-1]
    return trees


def test_window_feeds_the_pool_and_the_pool_its_candidates() -> None:
    """After the warm-up every pass finishes one n-gram a column, which a counting model soon makes right."""
    source = window_source()
    decode_window(source, [6] * 12)
    assert len(source.pool) > 6
    root = source._text[-1]
    state, path = source.root(), []
    for _ in range(4):
        token = tokens_of(source.propose(state))[0]
        path.append(token)
        state = source.step(state, token)
    assert path == [(root + 1 + offset) % 9 for offset in range(4)]


def test_window_does_not_learn_from_prompt_or_output() -> None:
    source = window_source([1, 2, 3, 4, 5, 6, 7, 8])
    assert len(source.pool) == 0
    for token in range(8):
        source.learn(TokenTree(token), Path([0], [token]), None)
    assert len(source.pool) == 0


def test_window_of_no_columns_adds_nothing() -> None:
    source = window_source()
    assert len(grown(source, 0, 50)) == 1
    decode_window(source, [4, 4, 4])
    assert len(grown(source, 0, 50)) == 1
    assert source._window is None, "it stops"
    assert len(grown(source, 4, 50)) > 1, "and starts again"


@pytest.mark.parametrize("room", range(4))
def test_window_stops_where_no_room_is_left(room: int) -> None:
    source = window_source()
    decode_window(source, [4, 4, 4])
    assert len(grown(source, 4, room)) == 1
    assert source._window is None


@examples(60)
@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 20)), min_size=1, max_size=25),
    st.booleans(),
    st.integers(0, 9),
)
def test_window_fits_whatever_columns_and_room(plan: list[tuple[int, int]], empty: bool, seed: int) -> None:
    """No node deeper than the room, tokens of the vocabulary only, the newest level has a node for each column."""
    source, root = window_source([] if empty else [1, 2, 3], seed=seed), 3
    for columns, room in plan:
        tree = grown(source, columns, room, root)
        assert max(tree.depths) <= room
        assert all(0 <= token < 9 for token in tree.tokens)
        assert (len(tree) > 1) == (columns > 0 and room >= NGRAM_SIZE - 1)
        path = written(tree)
        source.learn(tree, path, following(tree))
        root = path.tokens[-1]


def test_window_grows_and_shrinks() -> None:
    source = window_source()
    for columns in (8, 3, 5, 1):
        trees = decode_window(source, [columns] * 8)
        assert source._window is not None
        assert list(map(len, source._window.levels)) == [columns - 1, *[columns] * (NGRAM_SIZE - 2)]
        assert len(trees[-1]) - 1 <= window_nodes(columns), "equal tokens share a node"


def test_a_narrowed_window_keeps_its_trajectories() -> None:
    """Fewer columns go on where they are: the next pass finishes n-grams at once, with no warm-up."""
    source = window_source()
    decode_window(source, [8] * 8)
    known = len(source.pool)
    source.pool = type(source.pool)(NGRAM_SIZE, 7)
    decode_window(source, [3])
    assert known and len(source.pool) >= 2


def test_window_shrinks_with_the_room() -> None:
    source = window_source()
    decode_window(source, [8] * 8)
    tree = grown(source, 8, 5)
    assert max(tree.depths) <= 5
    assert len(tree) > 1


def test_window_draws_from_its_own_generator() -> None:
    assert grown(window_source(seed=1), 6, 50).tokens == grown(window_source(seed=1), 6, 50).tokens
    draws = {tuple(grown(window_source(seed=seed), 6, 50).tokens) for seed in range(8)}
    assert len(draws) > 1
    assert all(set(tokens) <= {1, 2, 3} for tokens in draws), "from the text"
