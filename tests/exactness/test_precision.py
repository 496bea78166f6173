"""Scores that a call returns, ties, low precision, inference mode, long texts and scaled positions."""

from typing import Any

import pytest
import torch
from helpers.calls import LengthIs
from helpers.marks import BATCH_AND_SAMPLE
from helpers.models import MODELS, VOCAB, counting_model, fresh_model, prompts, run, same_as_plain, tiny_model

from lookahead import Jacobi, Lookahead
from lookahead.models.names import CACHE

pytestmark = pytest.mark.usefixtures("augmented")


@pytest.mark.parametrize(("batch", "sample"), BATCH_AND_SAMPLE)
@pytest.mark.parametrize("name", MODELS)
def test_scores_logits_and_cache(name: str, batch: int, sample: bool) -> None:
    """One [batch, vocab] for each index; the cache holds all but the last token, in plain decoding's layers."""
    output = same_as_plain(
        tiny_model(name), prompts(batch), max_new_tokens=20, do_sample=sample, output_scores=True, output_logits=True
    )
    assert len(output.scores) == len(output.logits) == 20
    assert output.scores[0].shape == (batch, VOCAB)
    assert output[CACHE].get_seq_length() == 12 + 20 - 1


@pytest.mark.parametrize("kind", ["output_scores", "output_logits"])
def test_one_kind_of_scores(kind: str) -> None:
    """Only what is asked for is returned."""
    output = same_as_plain(tiny_model("llama"), prompts(3), max_new_tokens=9, repetition_penalty=1.3, **{kind: True})
    assert (output.scores is None) == (kind == "output_logits")
    assert (output.logits is None) == (kind == "output_scores")


@pytest.mark.parametrize("apart", [0.0, 1e-13])
def test_ties(apart: float) -> None:
    """Among equal logits the first token is written, in every row and at every node; plain generate chooses from
    float32 logits, where what float64 tells apart is equal."""
    model = fresh_model("llama")
    with torch.no_grad():
        head = model.lm_head.weight
        head[24:] = head[:24] * (1 + apart)
    for batch in (1, 3):
        output = same_as_plain(model, prompts(batch), max_new_tokens=30)
        assert output.sequences[:, 12:].max() < 24


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_runs(dtype: torch.dtype) -> None:
    """Near-ties may flip in half precision, so only clear-cut texts are compared."""
    model = counting_model().to(dtype)
    for batch in (1, 3):
        same_as_plain(model, prompts(batch), max_new_tokens=30)
        same_as_plain(model, prompts(batch), max_new_tokens=30, do_sample=True)
    for name in ("llama", "mistral", "gpt2", "gemma2", "gpt_oss"):
        model = fresh_model(name).to(dtype)
        for sample in (False, True):
            output = model.generate(**prompts(3), max_new_tokens=20, do_sample=sample, use_lookahead=True)
            assert output.shape == (3, 32)


def test_inference_mode() -> None:
    """Masks that were first built under inference_mode can be used outside of it, and the other way round."""
    model = fresh_model("mistral", vocab_size=VOCAB)
    strategy = Lookahead(window_size=6, ngram_size=6, seed=3)
    with torch.inference_mode():
        same_as_plain(model, prompts(3), strategy, max_new_tokens=20)
    same_as_plain(model, prompts(3), strategy, max_new_tokens=20)
    model.requires_grad_(True)
    with torch.enable_grad():
        output = same_as_plain(model, prompts(1), strategy, max_new_tokens=20, output_scores=True)
    assert not output.scores[0].requires_grad
    with torch.inference_mode():
        same_as_plain(model, prompts(3), strategy, max_new_tokens=20)


@pytest.mark.slow
def test_a_long_text() -> None:
    """Buffers grow on the way: a text far longer than the prompt, one long prompt, and both windows sliding."""
    for name in ("llama", "mistral"):
        same_as_plain(tiny_model(name), prompts(2, 5), Lookahead(window_size=7, seed=0), max_new_tokens=230)
    same_as_plain(tiny_model("mistral"), prompts(2, 200), Lookahead(window_size=7, seed=0), max_new_tokens=20)


@pytest.mark.parametrize("strategy", [None, Lookahead(window_size=40, ngram_size=8), Jacobi(block_size=30)])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("new_tokens", [50, 51, 52, 53])
def test_the_last_position(new_tokens: int, batch: int, strategy: Any) -> None:
    """A table of 64 learned positions is used to its end: 12 + 52 fit, and the last token needs no position."""
    same_as_plain(tiny_model("gpt2"), prompts(batch, ragged=False), strategy, max_new_tokens=new_tokens)
    same_as_plain(
        tiny_model("gpt2"), prompts(batch), strategy, max_new_tokens=new_tokens, eos_token_id=18, output_scores=True
    )


@pytest.mark.parametrize("batch", [1, 3])
def test_a_text_that_ends_before_the_table(batch: int) -> None:
    """More tokens are allowed than there are positions, but an end token comes first: no draft looks beyond."""
    model = tiny_model("gpt2")
    for at in (40, 46, 50, 51):
        text = run(model, prompts(batch, ragged=False), max_new_tokens=52)[0]
        ends = sorted({int(row[12 + at]) for row in text})
        same_as_plain(model, prompts(batch, ragged=False), max_new_tokens=300, eos_token_id=ends)

    for strategy in (None, Jacobi(block_size=30), Jacobi(mode="jacobi", block_size=None)):
        same_as_plain(
            model, prompts(batch, ragged=False), strategy, max_new_tokens=300, stopping_criteria=[LengthIs(64)]
        )


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_padding_needs_no_positions(name: str) -> None:
    """Rows of 70 slots of which 58 hold tokens fit in a table of 64."""
    model = fresh_model(name, **({} if name == "gpt2" else {"max_position_embeddings": 64}))
    inputs = prompts(2, 70, ragged=False)
    inputs["attention_mask"][:, :12] = 0
    for new_tokens in (6, 7):
        same_as_plain(model, inputs, max_new_tokens=new_tokens)


def test_a_prompt_that_fills_the_table() -> None:
    """One token can still be written."""
    same_as_plain(tiny_model("gpt2"), prompts(1, 64), max_new_tokens=1)
    same_as_plain(tiny_model("gpt2"), prompts(1, 63), max_new_tokens=2)


@pytest.mark.parametrize(("new_tokens", "batch"), [(15, 1), (40, 1), (40, 3)])
@pytest.mark.parametrize("kind", ["dynamic", "yarn", "linear", "llama3"])
def test_scaled_positions(kind: str, batch: int, new_tokens: int) -> None:
    """RoPE variants on both sides of a table of 32; ``dynamic`` changes its frequencies there."""
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    if kind in ("yarn", "llama3"):
        rope["original_max_position_embeddings"] = 16
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model = fresh_model("llama", rope_parameters=rope, max_position_embeddings=32)
    for strategy in (None, Jacobi(), Lookahead(window_size=2, ngram_size=7)):
        same_as_plain(model, prompts(batch), strategy, max_new_tokens=new_tokens)
