"""Ties, low precision, inference mode and long texts."""

import pytest
import torch
from helpers.models import VOCAB, counting_model, fresh_model, prompts, same_as_plain, tiny_model

from lookahead import Lookahead

pytestmark = pytest.mark.usefixtures("augmented")


def test_ties_in_float64_are_ties_in_float32() -> None:
    """Plain generate chooses from float32 logits, where the first of two equal tokens wins."""
    model = fresh_model("llama")
    with torch.no_grad():
        head = model.lm_head.weight
        head[24:] = head[:24] * (1 + 1e-13)
    for batch in (1, 3):
        same_as_plain(model, prompts(batch), max_new_tokens=30)


def test_exact_ties() -> None:
    """Among equal logits the first token is written, in every row and at every node."""
    model = fresh_model("llama")
    with torch.no_grad():
        head = model.lm_head.weight
        head[24:] = head[:24]
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
