"""What is built in C does what torch and its twins in Python do with numbers that no one expects: NaN of either sign,
infinities, zeros of either sign, numbers below the normal ones, ties, and nothing but -inf."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from helpers.marks import built
from helpers.native import SPECIAL, either, line_of
from helpers.toy import examples
from hypothesis import given
from hypothesis import strategies as st
from transformers import LogitsProcessorList, MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper
from transformers.generation.logits_process import TopPLogitsWarper

from jacobi import Successors, TokenTree
from lookahead import _native
from lookahead.runtime.scores import score
from lookahead.sources import SuccessorTable
from lookahead.sources.perturbed import Draw
from lookahead.sources.recycling import RecyclingSource
from lookahead.verify.noise import draw
from lookahead.verify.shortlist import SURE, Shortlist

pytestmark = built
WIDTHS = (1, 2, 63, 64, 65, 255, 256, 257, 319, 320, 511, 512, 575, 576, 1000)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("vocab", [511, 50_257, 151_936])
def test_a_nan_anywhere_is_what_plain_decoding_writes(vocab: int, dtype: torch.dtype) -> None:
    """Its index, and the first of several, whatever is higher: in the last part of a vocabulary, too, that fills no row
    of 256 columns."""
    for at in (0, 255, 256, vocab // 256 * 256 - 1, vocab // 256 * 256, vocab // 256 * 256 + 70, vocab - 1):
        logits = torch.zeros(1, 1, vocab, dtype=dtype)
        logits[0, 0, at:] = -torch.nan
        logits[0, 0, at + 1 :] = torch.randn(vocab - at - 1)
        logits[0, 0, 1 - at % 2] = torch.inf if at > 1 else 0.0
        for best in (0, 6, 64):
            found = score(logits, best)
            assert found.greedy == [[int(logits.float().argmax())]] == [[at]]
            assert found.broken == {(0, 0)}


@examples(400)
@given(st.integers(0, 1 << 30))
def test_the_best_of_lines_are_torchs(seed: int) -> None:
    """Of equal ones the first."""
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    lines = torch.from_numpy(np.stack([line_of(rng, numbers, vocab) for vocab in [rng.choice(WIDTHS)] * 3]))
    if rng.random() < 0.5:
        lines = lines.bfloat16()
    count = rng.randrange(1, min(lines.shape[1], 300) + 1)
    found = score(lines[None], count)
    assert found.greedy == [lines.argmax(-1).tolist()]
    whole = lines.float().numpy()
    assert found.broken == {(0, row) for row in range(3) if np.isnan(whole[row]).any()}
    if found.successors is None or count == 1:
        return
    for row, line in enumerate(whole):
        if not np.isnan(line).any():
            best = np.argsort(-line, kind="stable")[:count]
            assert found.successors[0].tokens[row].tolist() == best.tolist()
            assert np.array_equal(found.successors[0].logits[row], line[best])


def warpers(rng: random.Random) -> LogitsProcessorList:
    made = [TemperatureLogitsWarper(rng.choice([1e-38, 0.3, 1.3, 1e30]))] if rng.random() < 0.6 else []
    made += [TopKLogitsWarper(rng.choice([1, 3, 50]))] if rng.random() < 0.5 else []
    made += [TopPLogitsWarper(rng.choice([0.0, 0.5, 0.95]))] if rng.random() < 0.5 else []
    made += [MinPLogitsWarper(rng.choice([0.02, 1.0]))] if rng.random() < 0.4 else []
    return LogitsProcessorList(made)


@examples(600)
@given(st.integers(0, 1 << 30))
def test_what_is_sure_is_drawn(seed: int) -> None:
    """By logits and noise of any kind: where torch finds no probabilities, or a draw would be open, nothing is sure."""
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    vocab = rng.choice(WIDTHS)
    logits = torch.from_numpy(line_of(rng, numbers, vocab))[None]
    if rng.random() < 0.5:
        logits = logits.bfloat16()
    noise = torch.empty(1, vocab).exponential_(generator=torch.Generator().manual_seed(seed))
    for _ in range(rng.choice([0, 0, 1, 3])):
        noise[0, rng.randrange(vocab)] = rng.choice([0.0, 1e-45, 1e-30, 3e38])
    processors = warpers(rng)
    shortlist = Shortlist.of(processors)
    assert shortlist is not None
    chances = processors(torch.zeros(1, 1, dtype=torch.long), logits.float()).softmax(-1)
    said = None
    if rng.random() < 0.5:
        best = score(logits[None], rng.choice([4, 20, 64])).successors
        said = best and best[0]
    ((token, sure),) = shortlist.path(logits, 0, TokenTree(0), [noise.numpy().data], 0, said)
    assert 0 <= token < vocab
    if sure == SURE:
        assert chances.isfinite().all()
        assert token == int((chances / noise).argmax())


def test_noise_of_0_is_torchs() -> None:
    """A generator may give nothing but zeros: then the noise is 0, and not -0, by which a chance would become -inf."""
    generator = torch.Generator().manual_seed(1)
    state = generator.get_state()
    state[24 : 24 + 8 * 624] = 0
    generator.set_state(state)
    (line,) = draw(1, 1, 100, generator)
    generator.set_state(state)
    expected = torch.empty(1, 100).exponential_(generator=generator)
    assert line.noise.equal(expected) and line.noise.signbit().equal(expected.signbit())
    assert (expected == 0.0).any()


def rows_of(rng: random.Random, numbers: np.random.Generator, count: int, width: int) -> np.ndarray:
    """Logits as passes find them, best first and NaN before all, also near the boundaries of levels."""
    found = np.stack([line_of(rng, numbers, width) for _ in range(count)])
    near = np.float32(rng.choice([0.25, 1.5, 6.0]))
    found[0] = np.float32(rng.choice([3.3, 77.7, 1e4])) - near * np.arange(width, dtype=np.float32)
    found = -np.sort(-found, axis=1)
    found[np.isnan(found).any(1), 0] = np.nan
    return found


@examples(300)
@given(st.integers(0, 1 << 30))
def test_candidates_of_any_logits_are_the_same(seed: int) -> None:
    """All but those whose share lies where a bin begins."""
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    noise, lines = numbers.exponential(size=100).astype(np.float32), numbers.normal(size=(100, 4)).astype(np.float32)
    if rng.random() < 0.5:
        noise[rng.randrange(100)] = rng.choice([0.0, 1e-45, 3e38])
    embed = rng.choice([None, lambda tokens: np.stack([lines[token] for token in tokens])])
    settings: dict[str, Any] = {"temperature": rng.choice([1e-3, 0.5, 1.0, 1e3]), "top_p": rng.choice([1.0, 0.7])}
    settings |= {"min_p": rng.choice([0.0, 0.1]), "top_k": rng.choice([0, 3])}
    draw = Draw(lambda index: None if index == 5 else noise, **settings)
    source = RecyclingSource(SuccessorTable(rng.choice([8, 64, 1 << 14]), 100), draw, embed)
    usual = rng.random() < 0.5
    for _ in range(3):
        logits = rows_of(rng, numbers, 8, 16)
        if usual:
            logits = -np.sort(-numbers.normal(size=(8, 16)).astype(np.float32) * 3.0, axis=1)
            logits[:, rng.randrange(4, 16) :] = -np.inf
        tokens = np.stack([numbers.permutation(100)[:16] for _ in range(8)]).astype(np.int32)
        with np.errstate(all="ignore"):
            source.start([rng.randrange(3) for _ in range(8)], Successors(tokens, logits))
    source.root()
    for index in range(10):
        state = (tuple(rng.randrange(4) for _ in range(3)), index)
        with np.errstate(all="ignore"):
            in_c, python = (dict(found) for found in either(lambda state=state: source.propose(state)))
        assert len(in_c.items() ^ python.items()) <= 2, (in_c, python)


def test_specials_are_special() -> None:
    assert np.isnan(SPECIAL).sum() == 2 and np.isinf(SPECIAL).sum() == 2 and (SPECIAL == 0.0).sum() == 2
    assert _native.speedups.__name__ == "lookahead._speedups"
