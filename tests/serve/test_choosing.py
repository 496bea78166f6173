"""How tokens are chosen: penalties, biases and seeds, against formulas written out here."""

import socket
from typing import Any

import pytest
import torch
from helpers.serving import NAME, PROMPT, bundled, client, plain, served
from openai import OpenAI
from transformers import LogitsProcessor

from lookahead.serve import Limits

pytestmark = pytest.mark.usefixtures("augmented")


def text(openai: OpenAI, **settings: Any) -> str:
    given: Any = {"model": NAME, "prompt": PROMPT, "max_tokens": 60} | settings
    return str(openai.completions.create(**given).choices[0].text)


class Slow(LogitsProcessor):
    """OpenAI's penalties, token by token."""

    def __init__(self, frequency: float, presence: float) -> None:
        self.frequency, self.presence = frequency, presence
        self.start = len(bundled()[1](PROMPT)["input_ids"])

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores, new = scores.clone(), input_ids[0, self.start :].tolist()
        for token in set(new):
            scores[0, token] -= self.frequency * new.count(token) + self.presence
        return scores


@pytest.mark.parametrize("seed", [None, 4, 5])
@pytest.mark.parametrize(("frequency", "presence"), [(1.5, 0.0), (0.0, 1.5), (-1.0, 0.5)])
def test_penalties(openai: OpenAI, seed: int | None, frequency: float, presence: float) -> None:
    given: Any = {"do_sample": False} if seed is None else {"do_sample": True, "temperature": 0.9}
    processor = Slow(frequency, presence)
    expected = plain(PROMPT, seed, max_new_tokens=60, logits_processor=[processor], **given)
    asked: Any = {"temperature": 0} if seed is None else {"temperature": 0.9, "seed": seed}
    assert text(openai, frequency_penalty=frequency, presence_penalty=presence, **asked) == expected


def test_biases(openai: OpenAI) -> None:
    first = bundled()[1](plain(PROMPT, max_new_tokens=1, do_sample=False))["input_ids"][0]
    expected = plain(PROMPT, 3, max_new_tokens=60, do_sample=True, sequence_bias={(first,): -100.0, (5,): 1.5})
    assert text(openai, temperature=1, seed=3, logit_bias={str(first): -100, "5": 1.5}) == expected


@pytest.mark.parametrize("seed", [-1, -(2**63), 0, 2**63 - 1])
def test_seeds_are_those_of_torch(openai: OpenAI, seed: int) -> None:
    assert text(openai, temperature=1, seed=seed) == plain(PROMPT, seed, max_new_tokens=60, do_sample=True)


def test_a_temperature_draws_and_no_seed_is_another_text_each_time(openai: OpenAI) -> None:
    assert len({text(openai, temperature=1.5, logit_bias={"0": -100}) for _ in range(3)}) == 3
    assert text(openai) == plain(PROMPT, max_new_tokens=60, do_sample=False)
    assert text(openai, top_p=0.9, seed=6) == plain(PROMPT, 6, max_new_tokens=60, do_sample=True, top_p=0.9)


def test_a_body_that_never_ends_is_given_up() -> None:
    with served(limits=Limits(1024, timeout=0.5)) as address:
        port = int(address.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=20) as slow:
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            answer = slow.recv(65536)
        assert answer.startswith(b"HTTP/1.1 408 ")
        with socket.create_connection(("127.0.0.1", port), timeout=20) as gone:
            gone.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        with client(address) as openai:
            assert len(text(openai, max_tokens=4, temperature=0)) > 0
