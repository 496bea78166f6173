"""What is read from a model's class and config, once a call."""

import dataclasses

import pytest
import torch
from helpers.encoder_decoders import seq2seq_model
from helpers.hybrids import hybrid
from helpers.models import VOCAB, tiny_model

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
    assert traits.cache_argument == "past_key_values"


def test_an_encoder_decoders_traits_are_its_decoders() -> None:
    traits = ModelTraits.of(seq2seq_model("bart"))
    assert traits.is_encoder_decoder and traits.counts_slots
    assert traits.depth_limit == traits.position_table == 64
    assert ModelTraits.of(seq2seq_model("t5")).position_table is None


def test_a_learned_table_ends_the_text() -> None:
    traits = ModelTraits.of(tiny_model("gpt2"))
    assert traits.depth_limit == traits.position_table is not None


def test_mamba_is_given_its_cache_by_another_name() -> None:
    assert ModelTraits.of(hybrid("mamba")).cache_argument == "cache_params"


def test_traits_do_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ModelTraits.of(tiny_model("llama")).name = "other"  # type: ignore[misc]
