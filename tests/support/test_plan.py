"""How one call is planned: a tree, a linear draft, or transformers' own loop, and why."""

from typing import Any

import torch
from helpers.hybrids import hybrid
from helpers.models import fresh_model, prompts, tiny_model
from helpers.refusals import refuses
from transformers import DynamicCache

from lookahead.models.names import CACHE
from lookahead.models.traits import ModelTraits
from lookahead.support.route import Routed, plan


def planned(model: Any, cache: Any = None, new_tokens: int = 8, **kwargs: Any) -> Routed:
    """The plan of a call with two sequences."""
    inputs = prompts(2)
    kwargs = {"attention_mask": inputs["attention_mask"]} | kwargs
    return plan(model, ModelTraits.of(model), inputs["input_ids"], kwargs, cache, new_tokens)


def test_a_call_may_stand_against_it() -> None:
    """RoPE that changes within the text, where no cache keeps what was computed."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = fresh_model("llama", max_position_embeddings=16, rope_parameters=rope)
    assert planned(model, use_cache=False, new_tokens=1).route == "tree"
    found = planned(model, use_cache=False)
    assert found.route == "plain"
    assert found.reason is not None and "dynamic RoPE changes at position 16, within this text" in found.reason


def test_a_cache_of_other_sequences_is_refused() -> None:
    """Whatever the route."""
    for model in (tiny_model("llama"), hybrid("qwen3_next")):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(input_ids=prompts(1)["input_ids"], **{CACHE: cache})
        refuses(f"{CACHE} holds 1 rows: expected 2", planned, model, cache)
