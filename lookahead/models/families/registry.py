"""Which models count cache slots by themselves, and what has to be given places for them in a pass."""

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from transformers import PreTrainedModel

from lookahead.models.families.decoders import decoder_builders
from lookahead.models.families.overrides import Builder, bias_builders


@lru_cache
def takes_positions(forward: Callable[..., Any]) -> bool:
    """Whether a model's ``forward`` is told the positions of its tokens."""
    return "position_ids" in inspect.signature(forward).parameters


def counts_slots(model: PreTrainedModel) -> bool:
    """Whether a model counts cache slots by itself, for its positions, its biases, its windows or its scales."""
    config = model.config.get_text_config()
    local = any("local" in str(kind) for kind in getattr(config, "attention_layers", None) or ())
    biased = local or getattr(config, "alibi", False) is True or bool(getattr(config, "attn_temperature_tuning", False))
    return biased or not takes_positions(type(model).forward)


def place_builders(model: PreTrainedModel) -> list[Builder]:
    """What has to be given places for a pass over this model, because it counts cache slots by itself."""
    return (bias_builders(model) or decoder_builders(model)) if counts_slots(model) else []
