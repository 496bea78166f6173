"""Calls for one token are plain decoding's single pass."""

from typing import Any

import pytest
import torch
from helpers.models import fresh_model, prompts, run, same_as_plain, tiny_model

from lookahead import Lookahead, LookaheadOutput
from lookahead.models.names import CACHE

pytestmark = pytest.mark.usefixtures("augmented")


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("sample", [False, True])
def test_one_token_takes_one_pass(batch: int, sample: bool, passes: Any) -> None:
    settings = {"max_new_tokens": 1, "do_sample": sample}
    model, inputs = fresh_model("llama"), prompts(batch)
    plain, state = run(model, inputs, **settings)
    seen = passes(model)
    run(model, inputs, use_lookahead=True, **settings)  # with a hook on it, the model is tested once
    seen.clear()
    output, after = run(model, inputs, use_lookahead=True, **settings)
    assert torch.equal(output, plain) and torch.equal(state, after)
    assert len(seen) == 1
    output, _ = run(model, inputs, custom_generate=Lookahead(), **settings)
    assert torch.equal(output, plain)


@pytest.mark.parametrize("batch", [1, 3])
def test_one_token_with_all_that_is_asked_for(batch: int) -> None:
    output = same_as_plain(
        tiny_model("llama"), prompts(batch), max_new_tokens=1, output_scores=True, output_logits=True
    )
    assert isinstance(output, LookaheadOutput)
    assert output.stats is not None and output.stats.steps == 1


def test_one_token_into_the_users_cache() -> None:
    from transformers import DynamicCache

    caches = [DynamicCache(), DynamicCache()]
    model, inputs = tiny_model("llama"), prompts(1)
    plain, _ = run(model, inputs, max_new_tokens=1, **{CACHE: caches[0]})
    output, _ = run(model, inputs, max_new_tokens=1, **{CACHE: caches[1]}, use_lookahead=True)
    assert torch.equal(output, plain)
    assert caches[0].get_seq_length() == caches[1].get_seq_length()
