"""Calls with settings drawn at random write what plain decoding writes."""

import random
from contextlib import nullcontext
from typing import Any

import pytest
from helpers.calls import Drawing, RowEnds, allowed_tokens
from helpers.devices import working_alone
from helpers.marks import few
from helpers.models import MODELS, VOCAB, counting_model, prompts, same_as_plain, tiny_model
from transformers import LogitsProcessorList, StoppingCriteriaList

from lookahead import Jacobi, Lookahead

augmented = pytest.mark.usefixtures("augmented")


def check_a_random_call(seed: int) -> None:
    """Model, batch, prompt, settings, rules and strategy drawn at random, nothing kept apart."""
    rng = random.Random(seed)
    name = rng.choice([*MODELS, *["counting"] * 6])
    model = counting_model(sharpness=6.5) if name == "counting" else tiny_model(name)
    batch, length = rng.choice([1, 1, 2, 3, 5]), rng.randint(1, 20)
    settings: dict[str, Any] = {"max_new_tokens": rng.randint(1, 44), "seed": rng.randrange(1000)}

    def sometimes(chance: float, **more: Any) -> bool:
        taken = rng.random() < chance
        settings.update(more if taken else {})
        return taken

    if sometimes(0.5, do_sample=True):
        sometimes(0.5, temperature=rng.choice([0.3, 0.7, 1.5]))
        sometimes(0.3, num_return_sequences=rng.choice([2, 3]))
        sometimes(0.2, top_k=5, top_p=0.9)
        sometimes(0.2, min_p=0.05)
        sometimes(0.1, typical_p=0.8)
        sometimes(0.1, logits_processor_new=lambda: LogitsProcessorList([Drawing()]))
    if sometimes(0.5, eos_token_id=rng.sample(range(VOCAB), rng.choice([1, 3, 8]))):
        sometimes(0.3, min_new_tokens=min(rng.randint(1, 10), settings["max_new_tokens"]))
        sometimes(0.2, pad_token_id=rng.randrange(VOCAB))
    sometimes(0.3, output_scores=True)
    sometimes(0.3, output_logits=True)
    sometimes(0.2, repetition_penalty=1.3)
    sometimes(0.15, no_repeat_ngram_size=rng.choice([2, 3]))
    sometimes(0.1, encoder_repetition_penalty=1.4)
    sometimes(0.1, prefix_allowed_tokens_fn=allowed_tokens)
    sometimes(0.1, use_cache=False)
    lengths = [length + rng.randint(1, 30) for _ in range(batch * settings.get("num_return_sequences", 1))]
    stopped = sometimes(0.15, stopping_criteria_new=lambda: StoppingCriteriaList([RowEnds(lengths)]))
    strategy: Any = Lookahead(
        window_size=rng.choice([1, 2, 3, 5, 7, 15, 30]),
        ngram_size=rng.choice([2, 3, 4, 5, 8]),
        verification_set_size=rng.choice([0, 1, 3, 7, 20]),
        pool_from_prompt=rng.random() < 0.5,
        pool_from_output=rng.random() < 0.5,
        always_forward_one=rng.random() < 0.5,
        seed=seed,
    )
    if rng.random() < 0.3:
        mode: Any = rng.choice(["jacobi", "gauss-seidel", "hybrid", "sliding"])
        guess = rng.choice(["text", "tail", "pad", (1, 2, 3)])
        strategy = Jacobi(mode=mode, block_size=rng.choice([1, 3, 8, 20]), initial_guess=guess, seed=seed)
    elif rng.random() < 0.5:
        strategy = Lookahead(nodes=rng.choice([None, 2, 8, 24]), remember=rng.random() < 0.5, seed=seed)
    inputs = prompts(batch, length, seed, ragged=rng.random() < 0.7)
    with working_alone() if rng.random() < 0.3 else nullcontext():
        output = same_as_plain(model, inputs, strategy, **settings)
    if not stopped:
        ends = set(settings.get("eos_token_id", ()))
        new = output.sequences[:, length:].tolist()
        assert output.stats.emitted == sum(
            next((i + 1 for i, token in enumerate(row) if token in ends), len(row)) for row in new
        )


@augmented
@pytest.mark.parametrize("seed", few(range(60), *range(40)))
def test_a_random_call(seed: int) -> None:
    """A few of them always."""
    check_a_random_call(seed)


@augmented
@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_many_random_calls(block: int) -> None:
    """More of them when there is time."""
    for seed in range(1000 + 100 * block, 1100 + 100 * block):
        check_a_random_call(seed)
