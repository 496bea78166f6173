"""What is read from a model's class and config, once a call."""

import dataclasses
from typing import Any

import pytest
import torch
from helpers.encoder_decoders import seq2seq_model
from helpers.hybrids import hybrid
from helpers.models import VOCAB, tiny_model
from transformers import LlamaForCausalLM

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


def test_an_encoder_decoders_traits_are_its_decoders() -> None:
    traits = ModelTraits.of(seq2seq_model("bart"))
    assert traits.is_encoder_decoder and traits.counts_slots
    assert traits.depth_limit == traits.position_table == 64
    assert ModelTraits.of(seq2seq_model("t5")).position_table is None


def test_mamba_is_given_its_cache_by_another_name() -> None:
    assert ModelTraits.of(hybrid("mamba")).cache_argument == STATE


def test_what_the_class_says() -> None:
    """Recurrent states, and a loop of its own; a class around transformers' loop has none."""
    assert ModelTraits.of(hybrid("mamba")).is_stateful and not ModelTraits.of(tiny_model("llama")).is_stateful

    class Around(LlamaForCausalLM):
        def _sample(self, *args: Any, **kwargs: Any) -> Any:
            return super()._sample(*args, **kwargs)

    class Own(LlamaForCausalLM):
        def _sample(self, *args: Any, **kwargs: Any) -> Any:
            return args[0]

    config = tiny_model("llama").config
    assert [ModelTraits.of(kind(config)).own_loop for kind in (LlamaForCausalLM, Around, Own)] == [None, None, "Own"]


def test_traits_do_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ModelTraits.of(tiny_model("llama")).name = "other"  # type: ignore[misc]
