"""Position tables that end, and scaled positions."""

from typing import Any

import pytest
import torch
from helpers.models import fresh_model, prompts, run, same_as_plain, tiny_model
from torch import Tensor

from lookahead import Jacobi, Lookahead

pytestmark = pytest.mark.usefixtures("augmented")


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

    def end_all(input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 64)

    for strategy in (None, Jacobi(block_size=30), Jacobi(mode="jacobi", block_size=None)):
        same_as_plain(model, prompts(batch, ragged=False), strategy, max_new_tokens=300, stopping_criteria=[end_all])


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
