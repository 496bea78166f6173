"""The walk down a scored tree, and the rejection scheme's distribution."""

from collections.abc import Callable, Sequence

import pytest
import torch
from helpers.toy import examples
from hypothesis import given
from hypothesis import strategies as st

from jacobi import Path, TokenTree, reject, walk

# Upper 0.1% points of chi-square, by degrees of freedom.
CRITICAL = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52}
DRAWS = 4000
PROBABILITIES = [0.4, 0.05, 0.25, 0.1, 0.15, 0.05]

Sampler = Callable[[torch.Tensor, Sequence[int], torch.Generator], int]


def never(token: int) -> bool:
    return False


def chi_square(sample: Sampler, probabilities: Sequence[float], candidates: Sequence[int]) -> tuple[float, float]:
    """The statistic of many draws against ``probabilities``, and the value it exceeds once in a thousand."""
    generator = torch.Generator().manual_seed(1234)
    given_ = torch.tensor(probabilities, dtype=torch.float64)
    counts = [0] * len(probabilities)
    for _ in range(DRAWS):
        counts[sample(given_, candidates, generator)] += 1
    assert all(count == 0 for count, p in zip(counts, probabilities, strict=True) if p == 0), "an impossible token"
    cells = [(count, p * DRAWS) for count, p in zip(counts, probabilities, strict=True) if p > 0]
    return sum((count - mean) ** 2 / mean for count, mean in cells), CRITICAL[len(cells) - 1]


def without_zeroing(probabilities: torch.Tensor, candidates: Sequence[int], generator: torch.Generator) -> int:
    """The mistake the scheme invites: what is left after a rejection still holds the rejected token."""
    for token in candidates:
        if torch.rand((), generator=generator) < probabilities[token]:
            return token
    return int(torch.multinomial(probabilities, 1, generator=generator))


def without_renormalising(probabilities: torch.Tensor, candidates: Sequence[int], generator: torch.Generator) -> int:
    """The other one: later candidates are accepted with their old probability."""
    left = probabilities.clone()
    for token in candidates:
        if torch.rand((), generator=generator) < left[token]:
            return token
        left[token] = 0.0
    return int(torch.multinomial(left, 1, generator=generator))


def test_walk_follows_children_and_carries_the_next_token() -> None:
    tree = TokenTree.from_paths(0, [[1, 2, 3], [1, 4], [5]])
    chosen = {0: 1, 1: 4, 4: 9}
    assert walk(tree, chosen.__getitem__, never) == Path([0, 1, 4], [1, 4, 9])


def test_walk_asks_once_for_each_visited_node_in_order() -> None:
    tree = TokenTree.chain(0, [1, 2, 3])
    asked: list[int] = []

    def choose(node: int) -> int:
        asked.append(node)
        return [1, 2, 7, 8][node]

    assert walk(tree, choose, never).tokens == [1, 2, 7]
    assert asked == [0, 1, 2]


def test_walk_of_the_root_alone_is_plain_decoding() -> None:
    assert walk(TokenTree(3), lambda node: 8, never) == Path([0], [8])


def test_walk_carries_a_token_past_a_leaf() -> None:
    assert walk(TokenTree.chain(0, [1]), [1, 2].__getitem__, never) == Path([0, 1], [1, 2])


def test_walk_stops_at_a_token_although_it_was_drafted() -> None:
    told: list[int] = []

    def stop(token: int) -> bool:
        told.append(token)
        return token == 2

    path = walk(TokenTree.chain(0, [1, 2, 3]), [1, 2, 3, 4].__getitem__, stop)
    assert path == Path([0, 1], [1, 2])
    assert told == [1, 2]


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


@pytest.mark.parametrize(
    "candidates", [[], [0], [1], [0, 2], [2, 0], [5, 4, 3, 2, 1, 0], [3, 4]], ids=lambda tokens: f"{tokens}"
)
def test_reject_has_the_given_distribution(candidates: list[int]) -> None:
    statistic, critical = chi_square(reject, PROBABILITIES, candidates)
    assert statistic < critical


def test_reject_with_tokens_that_cannot_come() -> None:
    statistic, critical = chi_square(reject, [0.0, 0.7, 0.0, 0.3], [0, 1, 2])
    assert statistic < critical


@pytest.mark.parametrize("biased", [without_zeroing, without_renormalising])
def test_chi_square_can_tell(biased: Sampler) -> None:
    """The test above would have caught both common mistakes."""
    statistic, critical = chi_square(biased, PROBABILITIES, [0, 2])
    assert statistic > 2 * critical


@pytest.mark.parametrize("candidates", [[2], [0, 2, 1], [0, 1, 2, 3], []])
def test_reject_finds_the_only_possible_token(candidates: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    certain = torch.tensor([0.0, 0.0, 1.0, 0.0])
    assert {reject(certain, candidates, generator) for _ in range(20)} == {2}


def test_reject_leaves_its_argument_alone_and_repeats_with_its_generator() -> None:
    probabilities = torch.tensor(PROBABILITIES)
    before = probabilities.clone()

    def draws() -> list[int]:
        generator = torch.Generator().manual_seed(5)
        return [reject(probabilities, [0, 2, 4], generator) for _ in range(30)]

    assert draws() == draws()
    assert torch.equal(probabilities, before)


def test_reject_draws_from_the_default_generator_too() -> None:
    probabilities = torch.tensor(PROBABILITIES)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        default = [reject(probabilities, [0, 3]) for _ in range(20)]
    generator = torch.Generator().manual_seed(3)
    assert default == [reject(probabilities, [0, 3], generator) for _ in range(20)]
