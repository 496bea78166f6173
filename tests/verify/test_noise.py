"""The noise of a sampled batch: plain decoding's draws, read at any pace and kept no longer than needed."""

import random

import pytest
import torch
from helpers.toy import examples
from helpers.verifying import sequences_of
from hypothesis import given
from hypothesis import strategies as st

from lookahead.verify import noise as room
from lookahead.verify.noise import Noise

VOCAB = 9


def plain(batch: int, indices: int, seed: int) -> tuple[list[list[int]], torch.Tensor]:
    """The tokens that ``multinomial`` draws, one batch an index, and the state it leaves."""
    torch.manual_seed(seed)
    probabilities = torch.linspace(1, 3, VOCAB).softmax(-1).repeat(batch, 1)
    tokens = [torch.multinomial(probabilities, 1).squeeze(1).tolist() for _ in range(indices)]
    return tokens, torch.get_rng_state()


@examples(60)
@given(st.integers(2, 5), st.integers(1, 12), st.integers(0, 99), st.randoms(use_true_random=False))
def test_any_pace_reads_plain_decodings_draws(batch: int, indices: int, seed: int, rng: random.Random) -> None:
    expected, state = plain(batch, indices, seed)
    torch.manual_seed(seed)
    sequences = sequences_of([[1]] * batch)
    noise = Noise(sequences)
    line = torch.linspace(1, 3, VOCAB).softmax(-1)
    while any(len(written) < indices for written in sequences.written):
        going = [row for row in range(batch) if len(sequences.written[row]) < indices]
        rows = rng.sample(going, rng.randint(1, len(going)))
        lines = noise.lines([(row, len(sequences.written[row])) for row in rows], line.repeat(len(rows), 1))
        for row, token in zip(rows, (line / lines).argmax(-1).tolist(), strict=True):
            sequences.written[row].append(token)
        noise.forget()
    assert sequences.written == [[tokens[row] for tokens in expected] for row in range(batch)]
    assert torch.equal(torch.get_rng_state(), state)


def test_noise_is_kept_until_the_slowest_has_read_it() -> None:
    """The example of the docstring; a finished sequence reads no more."""
    sequences = sequences_of([[1], [1]], end=[2])
    noise = Noise(sequences)
    like = torch.zeros(1, VOCAB)
    for row in (0, 0, 0, 1):
        noise.lines([(row, len(sequences.written[row]))], like)
        sequences.written[row].append(5)
    noise.forget()
    assert sorted(noise._kept) == [1, 2]
    sequences.finish(1)
    noise.forget()
    assert not noise._kept
    assert noise.limit() == 3 + room._MOST_LEAD


def test_the_lead_is_limited_by_count_and_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = sequences_of([[1], [1]])
    noise = Noise(sequences)
    assert noise.limit() == room._MOST_LEAD
    noise.lines([(0, 0)], torch.zeros(1, VOCAB))
    sequences.written[0].append(3)
    monkeypatch.setattr(room, "_MOST_BYTES", 5 * 2 * VOCAB * 4)
    assert noise.limit() == 5
    monkeypatch.setattr(room, "_MOST_BYTES", 1)
    assert noise.limit() == 1, "the slowest itself may always write"
