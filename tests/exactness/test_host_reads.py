"""A device that works by itself is waited for once a pass; what was chosen ahead on it is plain decoding's choice."""

from contextlib import suppress
from typing import Any

import pytest
import torch
from helpers.calls import Drawing
from helpers.devices import Reads, working_alone
from helpers.models import counting_model, prompts, run, same_as_plain, tiny_model

from lookahead import Lookahead

pytestmark = pytest.mark.usefixtures("augmented")

CHOICES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 0},
    "warped": {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "suppressed": {"suppress_tokens": [3, 4]},
    "penalized": {"repetition_penalty": 1.2},
    "penalized and sampled": {"do_sample": True, "temperature": 0.8, "repetition_penalty": 1.2},
}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("choice", CHOICES)
def test_a_pass_is_waited_for_once(choice: str, batch: int) -> None:
    """But for the prompt's, which transformers itself reads around."""
    model = counting_model(sharpness=6.0)
    with Reads([0]):
        run(model, prompts(batch), use_lookahead=True, max_new_tokens=2)  # runs the self-test, which reads a lot
    with working_alone(guarded=True) as reads, Reads(reads):
        settings = {"do_sample": False} | CHOICES[choice] | {"max_new_tokens": 24}
        output, _ = run(model, prompts(batch), lookahead_strategy=Lookahead(nodes=12), **settings)
    assert output.shape[1] == 36
    assert len(reads) > 3
    assert set(reads[1:]) == {1}


SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5, "top_k": 8, "top_p": 0.9},
    {"eos_token_id": [5, 6, 30], "temperature": 0.7},
    {"output_scores": True, "output_logits": True, "eos_token_id": 5},
    {"num_return_sequences": 2, "temperature": 0.6},
    {"repetition_penalty": 1.2},
    {"repetition_penalty": 1.2, "do_sample": False, "output_scores": True, "output_logits": True},
    {"no_repeat_ngram_size": 3, "eos_token_id": [5, 30]},
    {"min_new_tokens": 20, "eos_token_id": [5, 6, 30], "bad_words_ids": [[7, 8]]},
    {"exponential_decay_length_penalty": (5, 1.3), "eos_token_id": 5, "num_return_sequences": 2},
    {"do_sample": False, "suppress_tokens": [3, 4], "output_scores": True},
    {"max_time": 1000.0, "min_p": 0.05},
]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_choices_made_ahead_are_plain_decodings(settings: dict[str, Any], batch: int) -> None:
    """Text, scores, cache and generator state."""
    for model in (counting_model(sharpness=6.0), tiny_model("llama")):
        run(model, prompts(batch), use_lookahead=True, max_new_tokens=2)
        for seed in range(2):
            with working_alone():
                same_as_plain(
                    model,
                    prompts(batch),
                    Lookahead(nodes=12),
                    **{"do_sample": True, "max_new_tokens": 30, "seed": seed} | settings,
                )


def test_a_processor_that_draws_is_asked_before_each_draw() -> None:
    model = counting_model(sharpness=6.0)
    run(model, prompts(1), use_lookahead=True, max_new_tokens=2)
    for batch in (1, 3):
        with working_alone():
            same_as_plain(
                model,
                prompts(batch),
                Lookahead(nodes=12),
                do_sample=True,
                max_new_tokens=20,
                logits_processor_new=lambda: [Drawing()],
            )


class Streamer:
    """Puts tokens into a list; draws random numbers and may break off while it does."""

    def __init__(self, draws: bool, most: int = 1 << 30) -> None:
        self.tokens: list[int] = []
        self.draws, self.most = draws, most

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()
        if self.draws:
            torch.rand(3)
        if len(self.tokens) > self.most:
            raise KeyboardInterrupt

    def end(self) -> None:
        pass


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("most", [1 << 30, 20])
def test_whoever_looks_at_the_generator_sees_what_is_written(draws: bool, most: int) -> None:
    """A streamer that draws, and one that breaks off, whether tokens are chosen ahead or one by one. When it draws
    depends on how far each pass gets, so it is tried with drafts that do not see the noise."""
    strategy = Lookahead(nodes=12, seed=0, sources=("suffix", "pool") if draws else None)

    def told(streamer: Streamer) -> tuple[list[int], list[int]]:
        torch.manual_seed(3)
        inputs = prompts(1)
        settings = {"do_sample": True, "max_new_tokens": 40, "lookahead_strategy": strategy}
        with suppress(KeyboardInterrupt):
            model.generate(**inputs, **settings, streamer=streamer)
        return streamer.tokens, torch.rand(2).tolist()

    model = counting_model(sharpness=6.0)
    expected = told(Streamer(draws, most))
    with working_alone():
        assert told(Streamer(draws, most)) == expected
