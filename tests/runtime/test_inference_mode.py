"""What passes show and return are plain tensors: none is of inference mode."""

import pytest
import torch
from helpers.models import fresh_model, prompts, same_as_plain
from torch import Tensor
from transformers import DynamicCache

from lookahead import Lookahead
from lookahead.models.names import CACHE

pytestmark = pytest.mark.usefixtures("augmented")


def test_what_is_returned_can_be_used() -> None:
    """Scores and a cache that grew in the middle of a pass are plain tensors; plain decoding goes on from the cache."""
    model = fresh_model("llama", max_position_embeddings=4096)
    cache = DynamicCache(config=model.config)
    settings = {"max_new_tokens": 200, "output_scores": True, "output_logits": True}
    output = same_as_plain(model, prompts(1), Lookahead(window_size=3, seed=0), **settings)
    for tensor in (*output.scores, *output.logits):
        tensor.add_(1.0)
    inputs = prompts(1)
    ids = model.generate(**inputs, max_new_tokens=30, **{CACHE: cache}, use_lookahead=True)
    for layer in cache.layers:
        assert not layer.keys.is_inference()
        assert not layer.values.is_inference()
    mask = torch.ones_like(ids)
    longer = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=5, **{CACHE: cache})
    assert longer.tolist() == model.generate(**inputs, max_new_tokens=35).tolist()


def test_dynamic_rope_past_its_limit() -> None:
    """Frequencies that change with the text's length are buffers made in a pass; plain passes follow it in the call."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    for _ in range(2):  # the same text from the same state of the model
        model = fresh_model("llama", max_position_embeddings=20, rope_parameters=rope)
        same_as_plain(model, prompts(1), max_new_tokens=30)


def test_hooks_get_plain_tensors() -> None:
    """Whoever watches a layer can go on with what was seen."""
    model = fresh_model("llama")
    seen: list[Tensor] = []
    handle = model.model.norm.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    try:
        model.generate(**prompts(1), max_new_tokens=20, use_lookahead=True)
    finally:
        handle.remove()
    assert len(seen) > 1
    assert not any(tensor.is_inference() for tensor in seen)
