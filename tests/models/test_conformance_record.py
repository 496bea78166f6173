"""The record that is shipped: found by class, or by the kind of text config inside."""

from typing import Any

import pytest
import transformers
from helpers.encoder_decoders import seq2seq_model
from helpers.hybrids import hybrid
from helpers.models import fresh_model

from lookahead.models.conformance import recorded, recorded_routes, recorded_version


def test_classes() -> None:
    """A class that several families share answers with the family of the config."""
    assert recorded_routes(fresh_model("llama")) == {"tree"}
    assert recorded_routes(hybrid("qwen3_next")) == {"chain"}
    assert recorded_routes(hybrid("mamba")) == {"plain"}
    (found,) = recorded(seq2seq_model("bart"))
    assert (found["kind"], found["architecture"]) == ("encoder-decoder", "BartForConditionalGeneration")
    assert recorded_version().startswith("5.")


def test_subclasses() -> None:
    """They are what they are made of."""

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
    assert recorded_routes(model) == ({"chain"} if text == "qwen3_5_text" else set())
