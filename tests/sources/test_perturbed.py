"""Drafts under noise: shares, warped chances, and the source that reads them."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from helpers.toy import examples
from hypothesis import given
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from jacobi import Path, Successors, TokenTree
from lookahead.sources import SuccessorTable
from lookahead.sources.perturbed import BINS, Draw, offer
from lookahead.sources.recycling import RecyclingSource, votes_of

VOCAB = 12
WARPERS: dict[str, Callable[[float], object]] = {
    "temperature": TemperatureLogitsWarper,
    "top_k": TopKLogitsWarper,
    "top_p": TopPLogitsWarper,
    "min_p": MinPLogitsWarper,
}


DRAW = Draw(lambda index: None)


def lines(seed: int) -> tuple[Callable[[int], np.ndarray], np.ndarray]:
    noise = np.random.default_rng(seed).exponential(size=(64, VOCAB)).astype(np.float32)
    return noise.__getitem__, noise


def test_the_example_of_the_docstring() -> None:
    chances, noise = np.array([0.50, 0.30, 0.05]), np.array([1.90, 0.25, 0.40])
    weights = chances / noise
    assert weights == pytest.approx([0.26, 1.20, 0.13], abs=0.01)
    assert weights / weights.sum() == pytest.approx([0.16, 0.76, 0.08], abs=0.01)
    (first, likely), (second, unlikely), *_ = Draw(noise.__getitem__).best(np.arange(3), chances, noise)
    assert (first, second) == (1, 0)
    assert 0 <= unlikely < likely < BINS


@pytest.mark.parametrize(("name", "value"), [("temperature", 0.6), ("top_k", 4), ("top_p", 0.7), ("min_p", 0.2)])
@examples(30)
@given(seed=st.integers(0, 999))
def test_chances_are_what_the_warpers_leave(name: str, value: float, seed: int) -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2.0
    warper = WARPERS[name](value)
    expected = warper(torch.zeros(1, 1, dtype=torch.long), logits.clone()).softmax(-1)[0]  # type: ignore[operator]
    highest, tokens = logits[0].sort(descending=True)
    chances = Draw(lambda index: None, **{name: value}).chances(highest.numpy())  # type: ignore[arg-type]
    assert ((chances > 0) == (expected[tokens].numpy() > 0)).all()
    whole = np.zeros(VOCAB, np.float32)
    whole[tokens.numpy()] = chances / chances.sum()
    assert whole == pytest.approx(expected.numpy(), abs=1e-5)


@examples(60)
@given(seed=st.integers(0, 999), vocab=st.integers(1, 400))
def test_what_is_known_exactly_is_proposed_first(seed: int, vocab: int) -> None:
    """If q is p, the candidate with the largest share is the token that is drawn."""
    rng = np.random.default_rng(seed)
    chances = rng.dirichlet(np.full(vocab, 0.3)).astype(np.float32)
    noise = rng.exponential(size=vocab).astype(np.float32)
    offer = DRAW.best(np.arange(vocab), chances, noise)
    tokens, bins = [token for token, _ in offer], [level for _, level in offer]
    assert tokens[0] == (chances / noise).argmax()
    assert len(tokens) == len(set(tokens)) <= 8
    assert bins == sorted(bins, reverse=True)
    assert bins[0] < BINS


def test_noise_of_zero_decides() -> None:
    noise = np.ones(VOCAB, np.float32)
    noise[5] = 0.0
    assert DRAW.best(np.arange(VOCAB), np.full(VOCAB, 0.1, np.float32), noise) == [(5, BINS - 1)]


def test_what_several_rows_say_is_divided_by_the_noise_before_it_is_weighed() -> None:
    noise = np.array([1.0, 1.0, 0.01], np.float32)
    tokens, chances = np.tile(np.arange(3), (2, 1)), np.array([[0.98, 0.01, 0.01], [0.5, 0.5, 0.0]], np.float32)
    sure, torn = (DRAW.shares(tokens[:1], each[None], noise) for each in chances)
    assert sure == pytest.approx({0: 0.98 / 1.99, 2: 1.0 / 1.99})
    assert torn == pytest.approx({0: 0.5, 1: 0.5})
    together = DRAW.shares(tokens, chances, noise, np.array([[0.8], [0.2]], np.float32))
    assert together == pytest.approx({0: 0.8 * sure[0] + 0.1, 1: 0.1, 2: 0.8 * sure[2]})
    assert [token for token, _ in offer(together, 0)] == [0, 2, 1]


@pytest.mark.parametrize("orders", [(1,), (3, 2, 1), (3, 3, 1), (2, 2, 1, 1)])
def test_votes_of_longer_and_newer_rows_are_heard_more(orders: tuple[int, ...]) -> None:
    votes = votes_of(orders, [7] * len(orders))
    for order in set(orders):
        fading = [vote for vote, other in zip(votes, orders, strict=True) if other == order]
        assert fading == sorted(fading, reverse=True)
        assert all(fading[0] > vote for vote, other in zip(votes, orders, strict=True) if other < order)
    assert all(old < vote for old, vote in zip(votes_of(orders, [90] * len(orders)), votes, strict=True))


def said(*rows: list[float]) -> Successors:
    logits = np.array(rows, np.float32)
    order = np.argsort(-logits, axis=1).astype(np.int32)
    return Successors(order, np.take_along_axis(logits, order, axis=1))


def test_rows_are_read_under_the_noise_of_their_place() -> None:
    line, noise = lines(1)
    source = RecyclingSource(SuccessorTable(), Draw(line, temperature=0.5))
    logits = [float(token % 5) for token in range(VOCAB)]
    source.start([1, 2, 3], said(logits))
    source.learn(TokenTree(3), Path([0], [9]), None)
    chances = np.exp(np.array(logits) / 0.5)
    assert source.root() == ((2, 3, 9), 1)
    state = ((1, 2, 3), 4)
    candidates = source.propose(state)
    assert candidates[0][0] == (chances / noise[4]).argmax()
    assert len({token for token, _ in candidates}) == len(candidates)
    assert all(0 <= kind < len(source.priors) for _, kind in candidates)
    assert source.step(state, 8) == ((2, 3, 8), 5)
    assert source.propose(((7, 7, 7), 5)) == [], "nothing is known"


def test_shorter_contexts_and_older_rows_are_heard_too() -> None:
    source = RecyclingSource(SuccessorTable(), Draw(lambda index: None))
    for last, first in ((4, 7), (6, 9), (6, 10), (6, 11)):  # contexts (4, 5), then (6, 5) three times
        source.start([last, 5], said([8.0 * (token == first) for token in range(VOCAB)]))
    tokens = [token for token, _ in source.propose(((4, 4, 5), 1))]
    assert tokens[:3] == [7, 11, 10], "after (4, 5), then what was said last after 5, and before"
    assert 9 not in tokens[:3]


def test_without_a_line_the_likeliest_comes_first() -> None:
    """Accepted tokens that only the noise told are counted as plain numbers, which statistics can be written with."""
    source = RecyclingSource(SuccessorTable(), Draw(lambda index: None))
    source.start([1, 2, 3], said([0.0, 1.0, 5.0, *[0.0] * (VOCAB - 3)]))
    assert source.propose(((1, 2, 3), 0))[0][0] == 2
    source.learn(TokenTree.chain(3, [2, 7]), Path([0, 1, 2], [2, 7, 9]), None)
    assert source.by_noise == 1, "the second token's context was new"
    source.learn(TokenTree.chain(9, []), Path([0], [2]), None)
    assert source.by_noise == 1 and type(source.by_noise) is int
