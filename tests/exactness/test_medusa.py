"""Medusa: the text is plain decoding's, with every setting of ``generate``."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.automatic import FLAT
from helpers.marks import few
from helpers.medusa import COMBINED, SMALL, counting, fitted, random_heads
from helpers.models import prompts, run, same_as_plain, tiny_model
from helpers.streaming import Puts

from lookahead.medusa import Medusa, MedusaHeads

pytestmark = pytest.mark.usefixtures("augmented")
KINDS: dict[str, Callable[[MedusaHeads], Medusa]] = {
    "published": lambda heads: Medusa(heads),
    "paths": lambda heads: Medusa(heads, SMALL),
    "dense": lambda heads: Medusa(heads, [3, 2, 1]),
    "static": lambda heads: Medusa(heads, SMALL, static=True),
    "combined": lambda heads: Medusa(heads, sources=COMBINED, tuning=FLAT, seed=0),
    "fixed size": lambda heads: Medusa(heads, sources=("recycling", "heads", "pool"), nodes=20, seed=0),
    "heads alone": lambda heads: Medusa(heads, sources=("heads",), tuning=FLAT, seed=0),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("batch", "settings"), [(1, {"do_sample": True, "temperature": 0.5, "top_k": 8}), (3, {})])
def test_plain_decodings_text(batch: int, settings: dict[str, Any], kind: str) -> None:
    """Heads that are wrong, untrained, fitted and right; alone and in a left-padded batch."""
    llama = tiny_model("llama")
    for model, heads in (
        (llama, random_heads(llama)),
        (llama, MedusaHeads.for_model(llama, 3)),
        (llama, random_heads(llama, own_output=True)),
        counting(3, sharpness=6.0),
    ):
        output = same_as_plain(model, prompts(batch), KINDS[kind](heads), max_new_tokens=24, **settings)
        assert output.stats.emitted == 24 * batch


@pytest.mark.parametrize("seed", few(range(8), 0, 1, 2))
def test_seeds(seed: int) -> None:
    """Fitted heads, so that much is accepted; sampled texts are those of plain decoding, seed for seed."""
    model = tiny_model("gpt2")
    heads = fitted(model)
    for kind in ("published", "combined"):
        output = same_as_plain(
            model, prompts(2, seed=seed), KINDS[kind](heads), max_new_tokens=24, do_sample=True, top_k=3, seed=seed
        )
        assert output.stats.accepted > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_in_another_dtype(dtype: torch.dtype) -> None:
    model = tiny_model("llama")
    heads = random_heads(model).to(dtype)
    same_as_plain(model, prompts(2), Medusa(heads, SMALL), max_new_tokens=20)


def test_rejection() -> None:
    """The papers' scheme goes with exact acceptance: greedy text is plain decoding's, sampled text has its odds."""
    model, heads = counting(3, sharpness=5.0)
    strategy = Medusa(heads, verification="rejection")
    same_as_plain(model, prompts(2), strategy, max_new_tokens=20)
    output, _ = run(model, prompts(2), lookahead_strategy=strategy, do_sample=True, max_new_tokens=20)
    assert output.shape == (2, 32)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("acceptance", ["typical", "nucleus"])
def test_streaming(batch: int, acceptance: str) -> None:
    """Every token once, in order, one pass at a time."""
    model, heads = counting(3, sharpness=5.0)
    streamer = Puts()
    settings = {"do_sample": True, "top_k": 0, "max_new_tokens": 25, "eos_token_id": 40}
    text, _ = run(
        model, prompts(batch), lookahead_strategy=Medusa(heads, acceptance=acceptance), streamer=streamer, **settings
    )
    assert streamer.puts[0].tolist() == prompts(batch)["input_ids"].tolist()
    assert torch.stack(streamer.puts[1:], dim=1).tolist() == text[:, 12:].tolist()
    assert streamer.ends == 1


def test_a_chunked_prompt() -> None:
    model, heads = counting(3)
    output = same_as_plain(model, prompts(1), Medusa(heads), max_new_tokens=21, prefill_chunk_size=5)
    assert output.stats.steps == 6
