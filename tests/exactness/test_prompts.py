"""Prompts of every kind: short, padded, chunked, embedded; and calls for one token."""

from typing import Any

import pytest
import torch
from helpers.marks import BATCH_AND_SAMPLE
from helpers.models import VOCAB, fresh_model, prompts, run, same_as_plain, tiny_model
from transformers import DynamicCache

from lookahead import Jacobi, Lookahead, LookaheadOutput
from lookahead.models.names import CACHE

pytestmark = pytest.mark.usefixtures("augmented")


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_short_prompts_and_texts(name: str) -> None:
    """One token of prompt, one token of text, and both; or none, where transformers starts with ``bos_token_id``."""
    model = tiny_model(name)
    for length, new_tokens in ((1, 1), (1, 2), (1, 25), (2, 25), (12, 1), (12, 2), (12, 3)):
        for sample in (False, True):
            same_as_plain(model, prompts(1, length), max_new_tokens=new_tokens, do_sample=sample)
    ids = {"input_ids": torch.tensor([[5], [6], [7]])}
    same_as_plain(model, ids, max_new_tokens=20)
    same_as_plain(model, {}, max_new_tokens=20, bos_token_id=3)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "llama4"])
def test_one_padded_row(name: str) -> None:
    """Left padding is not only for batches."""
    inputs = prompts(1)
    inputs["attention_mask"][0, :5] = 0
    same_as_plain(tiny_model(name), inputs, max_new_tokens=24, output_scores=True)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "qwen2_mixed", "gemma3"])
def test_a_hole_in_the_mask(name: str, batch: int) -> None:
    """Rows glued together from earlier, padded texts are masked in the middle."""
    inputs = prompts(batch)
    inputs["attention_mask"][0, 8:10] = 0
    same_as_plain(tiny_model(name), inputs, max_new_tokens=20)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "qwen2_mixed"])
def test_positions_given(name: str) -> None:
    """A caller's own ``position_ids``: the text goes on from the last one."""
    for batch in (1, 3):
        positions = torch.arange(10, 22).expand(batch, -1) + torch.arange(batch)[:, None]
        inputs = prompts(batch, ragged=False) | {"position_ids": positions.contiguous()}
        same_as_plain(tiny_model(name), inputs, max_new_tokens=20)


@pytest.mark.parametrize("chunk", [1, 5, 12, 50])
def test_prefill_in_chunks(chunk: int) -> None:
    """The prompt's pass may come in pieces."""
    for name in ("llama", "mistral", "gpt2"):
        same_as_plain(tiny_model(name), prompts(3), max_new_tokens=15, prefill_chunk_size=chunk)


@pytest.mark.parametrize(("batch", "sample"), BATCH_AND_SAMPLE)
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_inputs_embeds(name: str, sample: bool, batch: int) -> None:
    """Embeddings for a prompt: the output holds the new tokens only."""
    model, inputs = tiny_model(name), prompts(batch)
    ids = inputs.pop("input_ids")
    inputs["inputs_embeds"] = model.get_input_embeddings()(ids).detach()
    output = same_as_plain(model, inputs, max_new_tokens=20, do_sample=sample, output_scores=True)
    assert output.sequences.shape == (batch, 20)
    same_as_plain(model, inputs | {"input_ids": ids}, max_new_tokens=20, do_sample=sample)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.float32])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_mask_types(name: str, dtype: torch.dtype) -> None:
    """transformers takes masks of any type, and tokens of two."""
    for batch in (1, 3):
        inputs = prompts(batch)
        inputs["attention_mask"][0, :2] = 0
        inputs["attention_mask"] = inputs["attention_mask"].to(dtype)
        same_as_plain(tiny_model(name), inputs, max_new_tokens=12)
        if dtype is torch.int32:
            inputs["input_ids"] = inputs["input_ids"].to(dtype)
            same_as_plain(tiny_model(name), inputs, max_new_tokens=12)


@pytest.mark.parametrize("pad", [-1, VOCAB])
@pytest.mark.parametrize("strategy", [None, Jacobi(initial_guess="pad"), Jacobi(mode="hybrid")])
def test_a_pad_token_outside_the_vocabulary(strategy: Any, pad: int) -> None:
    """Nothing reads it as long as no row has to be padded."""
    same_as_plain(tiny_model("llama"), prompts(1), strategy, max_new_tokens=20, pad_token_id=pad, eos_token_id=-1)
    same_as_plain(
        tiny_model("llama"), prompts(2, ragged=False), strategy, max_new_tokens=20, pad_token_id=pad, eos_token_id=-1
    )


def test_segments() -> None:
    """GPT-2 adds an embedding for ``token_type_ids``, for type 0 too."""
    for batch in (1, 3):
        inputs = prompts(batch)
        inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
        same_as_plain(tiny_model("gpt2"), inputs, max_new_tokens=20)


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
    """Into the user's cache, too."""
    model, inputs, caches = tiny_model("llama"), prompts(batch), [DynamicCache(), DynamicCache()]
    output = same_as_plain(model, inputs, max_new_tokens=1, output_scores=True, output_logits=True)
    assert isinstance(output, LookaheadOutput)
    assert output.stats is not None and output.stats.steps == 1
    for cache, asked in zip(caches, (False, True), strict=True):
        text, _ = run(model, inputs, max_new_tokens=1, **{CACHE: cache}, use_lookahead=asked)
        assert torch.equal(text, output.sequences)
    assert caches[0].get_seq_length() == caches[1].get_seq_length()
