"""The walk down a scored tree, and the rejection scheme's distribution."""

from collections.abc import Iterator, Sequence
from itertools import permutations

import pytest
import torch
from helpers.distributions import Chance
from helpers.toy import examples
from hypothesis import given
from hypothesis import strategies as st

from jacobi import Path, TokenTree, longest, reject, walk

PROBABILITIES = [0.4, 0.05, 0.25, 0.1, 0.15, 0.05]


def never(token: int) -> bool:
    return False


def test_walk_of_the_docstring() -> None:
    """Node 0 is <s>, 1 the, 2 cat, 3 sat, 4 dog; 5 is barks."""
    tree = TokenTree.from_paths(0, [[1, 2, 3], [1, 4]])
    assert walk(tree, {0: 1, 1: 4, 4: 5}.__getitem__, never) == Path([0, 1, 4], [1, 4, 5])
    judged = {0: {1: -0.1}, 1: {2: -0.5, 4: -0.3}, 2: {}}
    assert longest({0: tree}, lambda places: [judged[node] for _, node in places]) == {0: [0, 1, 4]}


def test_walk_asks_once_for_each_visited_node_in_order() -> None:
    tree = TokenTree.chain(0, [1, 2, 3])
    asked: list[int] = []

    def choose(node: int) -> int:
        asked.append(node)
        return [1, 2, 7, 8][node]

    assert walk(tree, choose, never).tokens == [1, 2, 7]
    assert asked == [0, 1, 2]


@examples(100)
@given(st.lists(st.lists(st.integers(0, 3), max_size=4), max_size=6), st.lists(st.integers(0, 3), min_size=30))
def test_walk_is_the_longest_drafted_prefix_and_one_more(paths: list[list[int]], text: list[int]) -> None:
    tree = TokenTree.from_paths(0, paths)
    path = walk(tree, lambda node: text[tree.depths[node]], never)

    def agreed(draft: list[int]) -> int:
        return next((i for i, (a, b) in enumerate(zip(draft, text, strict=False)) if a != b), len(draft))

    longest = max(map(agreed, paths), default=0)
    assert path.tokens == text[: longest + 1]
    assert len(path.nodes) == len(path.tokens)
    assert [tree.tokens[node] for node in path.nodes[1:]] == path.tokens[:-1]


@pytest.mark.parametrize("candidates", [[2], [0, 2, 1], [0, 1, 2, 3], []])
def test_reject_finds_the_only_possible_token(candidates: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    certain = torch.tensor([0.0, 0.0, 1.0, 0.0])
    assert {reject(certain, candidates, generator) for _ in range(20)} == {2}


def test_reject_leaves_its_argument_alone_and_repeats_with_its_generator() -> None:
    """It draws from the default generator, too."""
    probabilities = torch.tensor(PROBABILITIES)
    before = probabilities.clone()

    def draws() -> list[int]:
        generator = torch.Generator().manual_seed(5)
        return [reject(probabilities, [0, 2, 4], generator) for _ in range(30)]

    assert draws() == draws()
    assert torch.equal(probabilities, before)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        default = [reject(probabilities, [0, 3]) for _ in range(20)]
    generator = torch.Generator().manual_seed(3)
    assert default == [reject(probabilities, [0, 3], generator) for _ in range(20)]


def outcome(p: torch.Tensor, candidates: Sequence[int], q: torch.Tensor | None) -> torch.Tensor:
    """The exact distribution of what :func:`reject` chooses."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        found = Chance(monkeypatch).outcomes(lambda: reject(p, candidates, None, q))
    return torch.tensor([found.get(token, 0.0) for token in range(len(p))], dtype=p.dtype)


def draws_in_order(q: torch.Tensor, count: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every order in which ``count`` tokens come from q without replacement, and its probability."""
    for order in permutations([token for token in range(len(q)) if q[token] > 0], count):
        chance, rest = 1.0, 1.0
        for token in order:
            chance, rest = chance * float(q[token]) / rest, rest - float(q[token])
        yield order, chance


def normalised(weights: Sequence[int]) -> torch.Tensor:
    line = torch.tensor(weights, dtype=torch.float64)
    return line / line.sum()


WEIGHTS = st.lists(st.integers(0, 9), min_size=4, max_size=4).filter(any)


@examples(150)
@given(WEIGHTS, st.permutations(range(4)), st.integers(0, 4))
def test_reject_is_exact_for_given_candidates(target: list[int], order: list[int], count: int) -> None:
    p = normalised(target)
    torch.testing.assert_close(outcome(p, order[:count], None), p)


@examples(150)
@given(WEIGHTS, WEIGHTS, st.integers(1, 3))
def test_reject_is_exact_for_drawn_candidates(target: list[int], drafts: list[int], count: int) -> None:
    """Summed over every draw from q and every fall of the coins, the token is distributed as p."""
    p, q = normalised(target), normalised(drafts)
    count = min(count, int((q > 0).sum()))
    total = sum(chance * outcome(p, order, q) for order, chance in draws_in_order(q, count))
    torch.testing.assert_close(total, p)


def test_reject_of_the_docstring() -> None:
    """Accepted by algorithm 1's ratio, or drawn from the normalised rest: cat 0, dog 1, fox 2."""
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.8, 0.2, 0.0]).double()
    one = outcome(p, [0], q)
    torch.testing.assert_close(one, torch.tensor([5 / 8, 3 / 8 / 3, 3 / 8 * 2 / 3]).double())
    two = outcome(p, [0, 1], q)
    torch.testing.assert_close(two, torch.tensor([5 / 8, 3 / 8 / 3, 3 / 8 * 2 / 3]).double())
    sure = outcome(p, [0, 1], None)
    torch.testing.assert_close(sure, p)


def test_good_drafts_are_accepted_more_often_than_without_q() -> None:
    """A draft from p itself is always accepted; a token that p lacks never is."""
    p = torch.tensor([0.5, 0.0, 0.5]).double()
    assert outcome(p, [2], p).tolist() == [0.0, 0.0, 1.0]
    assert outcome(p, [1], normalised([1, 1, 1])).tolist() == [0.5, 0.0, 0.5]
