"""What is read from a model's class and config, once a call; and the record that is shipped, found by class."""

import dataclasses
from typing import Any

import pytest
import torch
import transformers
from helpers.encoder_decoders import seq2seq_model
from helpers.hybrids import hybrid
from helpers.models import VOCAB, fresh_model, tiny_model

from lookahead.models.conformance import recorded, recorded_routes, recorded_version
from lookahead.models.names import CACHE, STATE
from lookahead.models.traits import ModelTraits


def test_a_causal_models_traits() -> None:
    model = tiny_model("llama")
    traits = ModelTraits.of(model)
    assert traits.name == "LlamaForCausalLM" and traits.config is model.config
    assert not traits.is_encoder_decoder and traits.takes_positions and not traits.counts_slots
    assert (traits.device, traits.dtype) == (torch.device("cpu"), model.dtype)
    assert (traits.vocab_size, traits.attention) == (VOCAB, model.config._attn_implementation)
    assert traits.position_table == model.config.max_position_embeddings
    assert traits.depth_limit is None  # RoPE ends nowhere
    assert traits.rope_limit is None and traits.index_limit is None
    assert traits.cache_argument == CACHE
    with pytest.raises(dataclasses.FrozenInstanceError):
        traits.name = "other"  # type: ignore[misc]


def test_an_encoder_decoders_traits_are_its_decoders() -> None:
    traits = ModelTraits.of(seq2seq_model("bart"))
    assert traits.is_encoder_decoder and traits.counts_slots
    assert traits.depth_limit == traits.position_table == 64
    assert ModelTraits.of(seq2seq_model("t5")).position_table is None


def test_what_the_class_says() -> None:
    """Recurrent states, and the name of the cache."""
    assert ModelTraits.of(hybrid("mamba")).cache_argument == STATE
    assert ModelTraits.of(hybrid("mamba")).is_stateful and not ModelTraits.of(tiny_model("llama")).is_stateful


def test_classes() -> None:
    """A class that several families share answers with that of the config; subclasses are what they are made of."""
    assert recorded_routes(fresh_model("llama")) == {"tree"}
    assert recorded_routes(hybrid("zaya")) == {"chain"}
    assert recorded_routes(hybrid("mamba")) == {"plain"}
    (found,) = recorded(seq2seq_model("bart"))
    assert (found["kind"], found["architecture"]) == ("encoder-decoder", "BartForConditionalGeneration")
    assert recorded_version().startswith("5.")

    class Own(transformers.LlamaForCausalLM):
        pass

    model: Any = fresh_model("llama")
    model.__class__ = Own
    assert recorded_routes(model) == {"tree"}


@pytest.mark.parametrize("text", ["qwen3_5_text", "nothing_known"])
def test_text_configs(text: str) -> None:
    """A class that is in no mapping is looked up by its text model's type."""
    model: Any = fresh_model("llama")
    model.__class__ = type("Unknown", (transformers.PreTrainedModel,), {})
    model.config.model_type = text
    assert recorded_routes(model) == ({"tree"} if text == "qwen3_5_text" else set())
