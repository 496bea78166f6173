"""A device that works by itself is waited for once a pass; what was chosen ahead on it is plain decoding's choice."""

from typing import Any

import pytest
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
    model = counting_model(sharpness=6.0).float()  # whose logits are chosen from without a copy
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
        with working_alone():
            same_as_plain(
                model, prompts(batch), Lookahead(nodes=12), **{"do_sample": True, "max_new_tokens": 30} | settings
            )


def test_a_processor_that_draws_is_asked_before_each_draw() -> None:
    model = counting_model(sharpness=6.0)
    run(model, prompts(1), use_lookahead=True, max_new_tokens=2)
    for batch in (1, 3):
        with working_alone():
            settings = {"do_sample": True, "max_new_tokens": 20, "logits_processor_new": lambda: [Drawing()]}
            same_as_plain(model, prompts(batch), Lookahead(nodes=12), **settings)
