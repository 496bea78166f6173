"""From logits to argmaxes and best next tokens: always torch's argmax, whatever the size, dtype or ties."""

import warnings

import numpy as np
import pytest
import torch
from helpers.toy import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lookahead.runtime.scores import score

pytestmark = pytest.mark.usefixtures("either_way")
F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
DTYPES = [F32, F64, BF16, F16]
LARGE = 4096 + 37
# batch, nodes, vocabulary
SHAPES = [
    (1, 1, 2),
    (1, 1, 300),
    (2, 1, LARGE),
    (2, 3, 5),
    (1, 7, 300),
    (3, 4, 1000),
    (1, 9, LARGE),
    (1, 70, LARGE),
    (2, 33, LARGE),
    (1, 263, 1000),
]


def logits_of(shape: tuple[int, int, int], dtype: torch.dtype, kind: str, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(shape, generator=generator, dtype=F32)
    if kind == "ties":
        drawn = torch.randint(-2, 3, shape, generator=generator).float()
    elif kind == "constant":
        drawn = torch.full(shape, 1.5)
    elif kind == "wide":
        drawn = drawn * 4
    elif kind == "masked":  # all but a few tokens are excluded
        drawn = torch.where(torch.rand(shape, generator=generator) < 0.7, torch.tensor(-torch.inf), drawn)
    return drawn.to(dtype)


def check(logits: Tensor, best: int) -> None:
    """Everything that :func:`score` promises, against torch."""
    batch, nodes, vocab = logits.shape
    scores = score(logits, best)
    assert scores.logits is logits
    plain = logits.float()  # as ``generate`` compares them
    nan = plain.isnan().any(-1)
    assert scores.broken == {(row, node) for row, node in nan.nonzero().tolist()}
    assert np.array(scores.greedy).shape == (batch, nodes)
    wrong = (torch.tensor(scores.greedy) != plain.argmax(-1)) & ~nan
    assert not wrong.any(), wrong.nonzero().tolist()
    assert all(0 <= token < vocab for row in scores.greedy for token in row)
    if best == 0:
        assert scores.successors is None
        return
    count = min(best, vocab)
    assert scores.successors is not None and len(scores.successors) == batch
    highest = plain.topk(count, -1).values
    for row, found in enumerate(scores.successors):
        assert found.tokens.shape == found.logits.shape == (nodes, count)
        for node, (tokens, logits) in enumerate(zip(found.tokens.tolist(), found.logits.tolist(), strict=True)):
            if nan[row, node]:
                continue
            known = max(1, min(count, int((plain[row, node] > -torch.inf).sum())))
            assert tokens[0] == scores.greedy[row][node]
            assert all(0 <= token < vocab for token in tokens)
            assert len(set(tokens[:known])) == known, "each token at most once"
            assert logits == highest[row, node].tolist(), "the highest, best first"
            assert logits[:known] == plain[row, node, tokens[:known]].tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["random", "wide", "ties", "constant"])
def test_argmax_and_best_tokens(shape: tuple[int, int, int], dtype: torch.dtype, kind: str) -> None:
    logits = logits_of(shape, dtype, kind)
    for best in (0, 1, 2, 3, 4, 5, 6, 32) if dtype is F32 else (0, 2, 4, 6, 32):
        check(logits, best)


@examples(60)
@given(st.integers(1, 2), st.integers(1, 3), st.integers(1, 40), st.integers(0, 6), st.integers(0, 10**6))
def test_small_ones(batch: int, nodes: int, vocab: int, best: int, seed: int) -> None:
    if vocab == 1:
        best = 0
    check(logits_of((batch, nodes, vocab), F32, "ties", seed), best)


def test_a_vocabulary_of_one() -> None:
    scores = score(torch.zeros(1, 2, 1), 4)
    assert scores.greedy == [[0, 0]]


@pytest.mark.parametrize("nodes", [3, 70])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("best", [0, 4])
def test_nan_lines_are_marked(nodes: int, dtype: torch.dtype, best: int) -> None:
    """One NaN, all NaN, NaN in the last place, NaN beside infinities."""
    logits = logits_of((2, nodes, LARGE), dtype, "random")
    logits[0, 1] = torch.nan
    logits[1, 0, 5] = torch.nan
    logits[1, 1, LARGE - 1] = torch.nan
    logits[0, 2, 17] = torch.inf
    logits[0, 2, 3000] = torch.nan
    scores = score(logits, best)
    assert scores.broken == {(0, 1), (1, 0), (1, 1), (0, 2)}
    check(logits, best)


@pytest.mark.parametrize("shape", [(2, 3, 300), (2, 40, LARGE)], ids=str)
@pytest.mark.parametrize("best", [0, 4])
def test_excluded_tokens(shape: tuple[int, int, int], best: int) -> None:
    """Minus infinity at most tokens: a distance beyond the last level."""
    check(logits_of(shape, F32, "masked"), best)


@pytest.mark.parametrize("shape", [(1, 3, 300), (1, 70, LARGE)], ids=str)
@pytest.mark.parametrize("finite", [1, 2, 3])
def test_fewer_tokens_than_asked_for(shape: tuple[int, int, int], finite: int) -> None:
    """A line that leaves less tokens than successors are wanted."""
    logits = torch.full(shape, -torch.inf)
    for node in range(shape[1]):
        for place in range(finite):
            logits[0, node, (node * 31 + place * 137) % shape[2]] = float(place)
    check(logits, 4)


@pytest.mark.parametrize("shape", [(1, 3, 300), (1, 70, LARGE)], ids=str)
@pytest.mark.parametrize("fill", [-torch.inf, torch.inf])
@pytest.mark.parametrize("best", [0, 4])
def test_lines_of_infinities(shape: tuple[int, int, int], fill: float, best: int) -> None:
    """The argmax is the first token, and nothing warns."""
    logits = logits_of(shape, F32, "random")
    logits[0, 1] = fill
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scores = score(logits, best)
    assert scores.greedy == logits.argmax(-1).tolist()
    assert not scores.broken


def test_logits_that_need_a_gradient_or_are_not_contiguous() -> None:
    check(logits_of((2, 40, LARGE), F32, "random").requires_grad_(), 4)
    check(logits_of((2, 3, 300), F32, "random").requires_grad_(), 0)
    wide = logits_of((2, 40, 2 * LARGE), F32, "random")
    check(wide[:, :, ::2], 4)
    check(wide[:, :, :LARGE], 4)
    check(wide[:, ::2, :LARGE], 2)


def test_logits_are_left_as_they_are() -> None:
    for dtype in DTYPES:
        logits = logits_of((1, 70, LARGE), dtype, "random")
        before = logits.clone()
        score(logits, 4)
        score(logits, 0)
        assert torch.equal(logits, before)


def test_near_ties_of_doubles_go_to_the_lower_id() -> None:
    """As in plain decoding, which compares in float32."""
    logits = torch.zeros(1, 1, 9, dtype=F64)
    logits[0, 0, 3], logits[0, 0, 6] = 1.0, 1.0 + 1e-12
    assert score(logits).greedy == score(logits, 4).greedy == [[3]]
    large = torch.zeros(1, 70, LARGE, dtype=F64)
    large[0, :, 3000], large[0, :, 4100] = 1.0, 1.0 + 1e-12
    assert set(score(large).greedy[0]) == set(score(large, 4).greedy[0]) == {3000}
