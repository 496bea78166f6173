"""Typical and nucleus acceptance against their formulas, and the longest accepted path."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers.acceptance import slow_nucleus, slow_typical, softmax
from helpers.toy import examples
from hypothesis import given
from hypothesis import strategies as st

from jacobi import TokenTree, longest
from lookahead.verify.typical import nucleus, typical

SCORES = st.lists(st.floats(-8.0, 8.0) | st.just(-math.inf), min_size=1, max_size=7).filter(
    lambda line: max(line) > -math.inf
)


def near(values: Sequence[float], limit: float) -> bool:
    """Whether rounding decides."""
    return any(abs(value - limit) < 1e-9 for value in values)


@examples(300)
@given(SCORES, st.floats(0.01, 0.99), st.floats(0.01, 3.0))
def test_typical_is_its_formula(scores: list[float], epsilon: float, delta: float) -> None:
    chances = softmax(scores)
    accepts = slow_typical(epsilon, delta)
    entropy = -sum(chance * math.log(chance) for chance in chances if chance)
    if not near(chances, min(epsilon, delta * math.exp(-entropy))):
        expected = [accepts(chances, token) for token in range(len(scores))]
        assert typical(torch.tensor(scores, dtype=torch.float64), epsilon, delta).tolist() == expected


@examples(300)
@given(SCORES, st.floats(0.01, 1.0))
def test_nucleus_is_its_formula(scores: list[float], top_p: float) -> None:
    chances = softmax(scores)
    sums = [sum(sorted(chances, reverse=True)[:count]) for count in range(len(chances))]
    if not near(sums, top_p):
        expected = [slow_nucleus(top_p)(chances, token) for token in range(len(scores))]
        assert nucleus(torch.tensor(scores, dtype=torch.float64), top_p).tolist() == expected


def test_a_worked_example() -> None:
    """Which threshold counts: epsilon where the model is sure, delta * exp(-H) where it is not."""
    sure = torch.tensor([0.85, 0.1, 0.05]).log()  # H = 0.518, exp(-H) = 0.596, times 0.3 = 0.179
    assert typical(sure, 0.09, 0.3).tolist() == [True, True, False]
    assert typical(sure, 0.11, 0.3).tolist() == [True, False, False]
    unsure = torch.full((64,), 1 / 64).log()  # exp(-H) = 1/64
    assert typical(unsure, 0.09, 0.3).all()
    assert not typical(unsure, 0.09, 1.001).any()
    assert nucleus(torch.tensor([0.2, 0.5, 0.3]).log(), 0.6).tolist() == [False, True, True]
    assert nucleus(torch.tensor([0.2, 0.5, 0.3]).log(), 0.4).tolist() == [False, True, False]


TREES = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=0, max_size=8).map(
    lambda paths: TokenTree.from_paths(9, paths)
)


def all_paths(tree: TokenTree, kept: dict[int, float], ends: set[int]) -> list[tuple[int, float, list[int]]]:
    """Every path from the root of which all nodes are kept, by length and sum."""
    found = []
    for node in range(len(tree)):
        path = tree.path(node)
        below = path[1:]
        if all(each in kept for each in below) and not any(tree.tokens[each] in ends for each in below[:-1]):
            found.append((len(below), sum(kept[each] for each in below), path))
    return found


@examples(200)
@given(
    st.lists(TREES, min_size=1, max_size=3), st.randoms(use_true_random=False), st.sets(st.integers(0, 3), max_size=1)
)
def test_longest_against_all_paths(trees: list[TokenTree], rng: Any, ends: set[int]) -> None:
    """The longest, and of equally long ones that with the largest sum; each node is judged at most once."""
    kept = [{node: -rng.random() for node in range(1, len(tree)) if rng.random() < 0.7} for tree in trees]
    asked: list[tuple[int, int]] = []

    def judge(places: Sequence[tuple[int, int]]) -> list[dict[int, float]]:
        asked.extend(places)
        return [
            {token: kept[row][child] for token, child in trees[row].children[node].items() if child in kept[row]}
            for row, node in places
        ]

    for row, path in longest(dict(enumerate(trees)), judge, ends).items():
        found = all_paths(trees[row], kept[row], ends)
        length, value = next((length, value) for length, value, nodes in found if nodes == path)
        assert length == max(length for length, _, _ in found)
        assert value == pytest.approx(max(value for other, value, _ in found if other == length))
    assert len(set(asked)) == len(asked)
