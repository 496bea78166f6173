"""The walk down a scored tree, and the rejection scheme's distribution."""

from collections.abc import Callable, Iterator, Sequence
from itertools import permutations

import pytest
import torch
from helpers.toy import examples
from hypothesis import given
from hypothesis import strategies as st

from jacobi import Path, TokenTree, longest, reject, walk

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


class Coins:
    """Stands for ``torch.rand``: falls as it is told to, and keeps with which probability it did."""

    def __init__(self, falls: Sequence[bool]) -> None:
        self.falls = iter(falls)
        self.weight = 1.0

    def __lt__(self, chance: torch.Tensor) -> bool:
        accepted = next(self.falls)
        heads = min(1.0, float(chance))
        self.weight *= heads if accepted else 1.0 - heads
        return accepted


def outcome(
    monkeypatch: pytest.MonkeyPatch,
    p: torch.Tensor,
    candidates: Sequence[int],
    q: torch.Tensor | None,
    rule: Callable[..., int] = reject,
) -> torch.Tensor:
    """The exact distribution of what ``rule`` chooses: every way its coins can fall, weighed."""
    result = torch.zeros_like(p)
    left: list[torch.Tensor] = []

    def drawn(weights: torch.Tensor, count: int, generator: object = None) -> torch.Tensor:
        left.append(weights)
        return torch.zeros(count, dtype=torch.long)

    with monkeypatch.context() as patched:
        patched.setattr(torch, "multinomial", drawn)
        for accepted in range(len(candidates) + 1):  # the place of the accepted candidate; the last one: none is
            coins = Coins([place == accepted for place in range(len(candidates))])
            patched.setattr(torch, "rand", lambda *args, coins=coins, **settings: coins)
            left.clear()
            token = rule(p, candidates, None, q)
            if left:
                result += coins.weight * left[0] / left[0].sum()
            else:
                result[token] += coins.weight
    return result


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
@given(WEIGHTS, WEIGHTS, st.integers(1, 3))
def test_reject_is_exact_for_drawn_candidates(target: list[int], drafts: list[int], count: int) -> None:
    """Summed over every draw from q and every fall of the coins, the token is distributed as p."""
    p, q = normalised(target), normalised(drafts)
    count = min(count, int((q > 0).sum()))
    with pytest.MonkeyPatch.context() as monkeypatch:
        total = sum(chance * outcome(monkeypatch, p, order, q) for order, chance in draws_in_order(q, count))
    torch.testing.assert_close(total, p)


def test_reject_of_the_docstring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepted by algorithm 1's ratio, or drawn from the normalised rest: cat 0, dog 1, fox 2."""
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.8, 0.2, 0.0]).double()
    one = outcome(monkeypatch, p, [0], q)
    torch.testing.assert_close(one, torch.tensor([5 / 8, 3 / 8 / 3, 3 / 8 * 2 / 3]).double())
    two = outcome(monkeypatch, p, [0, 1], q)
    torch.testing.assert_close(two, torch.tensor([5 / 8, 3 / 8 / 3, 3 / 8 * 2 / 3]).double())
    sure = outcome(monkeypatch, p, [0, 1], None)
    torch.testing.assert_close(sure, p)


def test_a_sure_draw_is_a_draft_without_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    p = torch.tensor(PROBABILITIES, dtype=torch.float64)
    for token in range(6):
        q = torch.zeros_like(p)
        q[token] = 1.0
        torch.testing.assert_close(outcome(monkeypatch, p, [token], q), outcome(monkeypatch, p, [token], None))


def test_good_drafts_are_accepted_more_often_than_without_q(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft from p itself is always accepted; a token that p lacks never is."""
    p = torch.tensor([0.5, 0.0, 0.5]).double()
    assert outcome(monkeypatch, p, [2], p).tolist() == [0.0, 0.0, 1.0]
    assert outcome(monkeypatch, p, [1], normalised([1, 1, 1])).tolist() == [0.5, 0.0, 0.5]


DRAFTS = torch.tensor([0.1, 0.3, 0.1, 0.0, 0.1, 0.4], dtype=torch.float64)


def drawing(rule: Callable[..., int], count: int) -> Sampler:
    """A sampler that draws its candidates first."""

    def sample(p: torch.Tensor, candidates: Sequence[int], generator: torch.Generator) -> int:
        drawn = torch.multinomial(DRAFTS, count, replacement=False, generator=generator).tolist()
        return rule(p, drawn, generator, DRAFTS)

    return sample


@pytest.mark.parametrize("count", [1, 2, 4])
def test_reject_has_the_given_distribution_for_drawn_candidates(count: int) -> None:
    statistic, critical = chi_square(drawing(reject, count), PROBABILITIES, [])
    assert statistic < critical


def with_replacement(p: torch.Tensor, candidates: Sequence[int], generator: object, q: torch.Tensor) -> int:
    """The mistake this rule invites: q stays whole, as for independent draws, although siblings are distinct."""
    for token in candidates:
        if torch.rand(()) < p[token] / q[token]:
            return token
        p = (p - q).clamp(min=0)
        p = p / p.sum()
    return int(torch.multinomial(p, 1))


def test_enumeration_can_tell() -> None:
    """It would have caught that mistake. To leave q out is none: less is accepted, of the same distribution."""
    p = torch.tensor(PROBABILITIES, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as monkeypatch:
        orders = list(draws_in_order(DRAFTS, 2))
        biased = sum(chance * outcome(monkeypatch, p, order, DRAFTS, with_replacement) for order, chance in orders)
        blind = sum(chance * outcome(monkeypatch, p, order, None) for order, chance in orders)
    assert (biased - p).abs().max() > 0.005
    torch.testing.assert_close(blind, p)
