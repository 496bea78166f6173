"""The noise of a sampled batch: plain decoding's draws, read at any pace and kept no longer than needed."""

import random
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from helpers.toy import examples
from helpers.verifying import sequences_of
from hypothesis import given
from hypothesis import strategies as st

from jacobi import Step
from lookahead.verify import noise as room
from lookahead.verify.noise import Noise

VOCAB = 9


def plain(batch: int, indices: int, seed: int) -> tuple[list[list[int]], torch.Tensor]:
    """The tokens that ``multinomial`` draws, one batch an index, and the state it leaves."""
    torch.manual_seed(seed)
    probabilities = torch.linspace(1, 3, VOCAB).softmax(-1).repeat(batch, 1)
    tokens = [torch.multinomial(probabilities, 1).squeeze(1).tolist() for _ in range(indices)]
    return tokens, torch.get_rng_state()


@pytest.mark.usefixtures("either_way")
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
        lines = noise.at([(row, len(sequences.written[row])) for row in rows], VOCAB).all()
        for row, token in zip(rows, (line / lines).argmax(-1).tolist(), strict=True):
            sequences.written[row].append(token)
        noise.forget()
    assert sequences.written == [[tokens[row] for tokens in expected] for row in range(batch)]
    assert torch.equal(torch.get_rng_state(), state)


def test_noise_is_kept_until_the_slowest_has_read_it() -> None:
    """The example of the docstring; a finished sequence reads no more."""
    sequences = sequences_of([[1], [1]], end=[2])
    noise = Noise(sequences)
    for row in (0, 0, 0, 1):
        noise.at([(row, len(sequences.written[row]))], VOCAB)
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
    noise.at([(0, 0)], VOCAB)
    sequences.written[0].append(3)
    monkeypatch.setattr(room, "_MOST_BYTES", 5 * 2 * VOCAB * 4)
    assert noise.limit() == 5
    monkeypatch.setattr(room, "_MOST_BYTES", 1)
    assert noise.limit() == 1, "the slowest itself may always write"


def drawn(noise: Noise, sequences: Any, batch: int) -> list[int]:
    line = torch.linspace(1, 3, VOCAB).softmax(-1)
    at = [(row, len(sequences.written[row])) for row in range(batch)]
    tokens: list[int] = (line / noise.at(at, VOCAB).all()).argmax(-1).tolist()
    for row, token in enumerate(tokens):
        sequences.written[row].append(token)
    noise.forget()
    noise.settle()
    return tokens


@pytest.mark.parametrize("batch", [1, 3])
def test_drafts_read_lines_ahead_and_nobody_notices(batch: int) -> None:
    """A line read ahead is the one that is drawn, the generator stays where plain decoding has it, and numbers that
    somebody draws in between are plain decoding's."""
    torch.manual_seed(5)
    expected = []
    likely = torch.linspace(1, 3, VOCAB).softmax(-1).repeat(batch, 1)
    for index in range(6):
        expected.append(torch.multinomial(likely, 1).squeeze(1).tolist())
        if index == 3:
            expected.append(torch.rand(2).tolist())
    torch.manual_seed(5)
    sequences = sequences_of([[1]] * batch)
    noise, found = Noise(sequences), []
    assert noise.line(0, 0) is None, "how wide a line is comes with the first scores"
    for index in range(6):
        found.append(drawn(noise, sequences, batch))
        before = torch.get_rng_state()
        ahead = {(row, at): noise.line(row, at) for row in range(batch) for at in (index + 3, index + 1)}
        assert torch.equal(torch.get_rng_state(), before)
        for (row, at), line in ahead.items():
            assert line is not None and line.shape == (VOCAB,)
            assert (line == noise.line(row, at)).all()
        if index == 3:
            found.append(torch.rand(2).tolist())
        if index < 5 and index != 3:
            best = [(likely[0].numpy() / ahead[row, index + 1]).argmax() for row in range(batch)]
            assert best == expected[index + 1 + (index > 3)]
    assert found == expected


def test_no_line_is_read_where_none_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = sequences_of([[1], [1]])
    noise = Noise(sequences)
    for _ in range(3):
        drawn(noise, sequences, 2)
    assert noise.line(0, 1) is None, "read by all"
    assert noise.line(0, 3) is not None
    assert noise.line(0, 3 + room._MOST_LEAD) is None
    monkeypatch.setattr(room, "on_host", lambda device: False)
    assert noise.line(0, 3) is None, "nothing has been brought from the device"


def test_a_device_brings_lines_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = sequences_of([[1], [1]])
    noise = Noise(sequences)
    drawn(noise, sequences, 2)
    host = {index: noise.line(1, index) for index in range(2, 9)}
    monkeypatch.setattr(room, "on_host", lambda device: False)
    brought = noise.bring(2)
    assert brought.dtype == torch.int32
    assert brought.shape == (2 * 2 + room._MOST_AHEAD - 1, 2, VOCAB), "from the token after the next one on"
    noise.told(brought.numpy())
    noise.told(brought.numpy())
    assert all((noise.line(1, index) == host[index]).all() for index in range(2, 9))
    assert noise.bring(2).numel() == 0, "all are there"
    monkeypatch.setattr(room, "_BYTES_AT_ONCE", 2 * VOCAB * 4)
    assert len(noise.bring(9)) == 1
    noise.settle()
    torch.rand(1)
    drawn(noise, sequences, 2)
    assert noise.line(1, 3) is None, "drawn again since somebody else has drawn"


def test_the_generator_stands_behind_any_token_that_is_not_yet_told() -> None:
    """Also where lines were drawn further ahead; states of tokens that all have and were told are not kept."""
    states = []
    torch.manual_seed(4)
    for _ in range(6):
        torch.empty(2, VOCAB).exponential_()
        states.append(torch.get_rng_state())
    torch.manual_seed(4)
    sequences = sequences_of([[1], [1]])
    noise = Noise(sequences)
    noise.keeps_states = True
    for _ in range(5):
        drawn(noise, sequences, 2)
    assert noise.line(0, 8) is not None
    for index in (1, 4, 0, 3):
        noise.stand(index)
        assert torch.equal(torch.get_rng_state(), states[index])
    noise.begin()
    assert min(noise._states) == 4
    noise.stand(4)
    drawn(noise, sequences, 2)
    assert torch.equal(torch.get_rng_state(), states[5])


def test_lines_are_drawn_again_behind_a_streamer_that_draws() -> None:
    sequences = sequences_of([[1]])
    noise = Noise(sequences)
    drawn(noise, sequences, 1)
    before = noise.line(0, 1)
    assert before is not None and noise.line(0, 3) is not None
    assert not noise.renew(), "nobody has drawn"
    torch.rand(1)
    state = torch.get_rng_state()
    assert noise.renew()
    assert torch.equal(torch.get_rng_state(), state)
    after = noise.line(0, 1)
    assert after is not None and (after != before).any()
    assert torch.equal(torch.get_rng_state(), state)
    assert noise.line(0, 2) is None, "the streamer may draw again before"
    expected = torch.empty(1, VOCAB).exponential_()
    assert after.tolist() == expected[0].tolist()


def test_passes_are_told_without_what_drawing_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain decoding draws as much for as many tokens, so drafts that draw ahead are not slower for it."""
    times = count(0.0, 0.5)
    monkeypatch.setattr(room, "perf_counter", lambda: next(times))
    sequences = sequences_of([[1]])
    noise = Noise(sequences)
    drawn(noise, sequences, 1)
    step = Step([], [], 2000.0, 7.0, 800.0, 1.0)
    assert noise.without(step) == replace(step, verify_ms=300.0)
    assert noise.line(0, 1) is not None
    assert noise.line(0, 1) is not None
    assert noise.line(0, 2) is not None
    told = noise.without(step)
    assert told.draft_ms < 1000.0
    assert (told.forward_ms, told.verify_ms, told.keep_ms) == (7.0, 800.0, 1.0)
    assert noise.without(step) == step, "of one pass only"
