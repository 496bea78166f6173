"""The part of a model that writes: all of a causal model, the decoder of an encoder-decoder model."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


def is_seq2seq(model: PreTrainedModel) -> bool:
    """Whether the model is an encoder-decoder model."""
    return bool(model.config.is_encoder_decoder)


def decoder_config(model: PreTrainedModel) -> Any:
    """The config of the layers that write, under a causal model's names (``num_hidden_layers``, ``vocab_size``)."""
    config = model.config
    return config.get_text_config(decoder=True) if is_seq2seq(model) else config.get_text_config()


def input_device(model: PreTrainedModel) -> torch.device:
    """Where a model takes its tokens; its weights may be elsewhere, and come when they are needed."""
    if model.device.type != "meta":
        return model.device
    hooks = (getattr(module, "_hf_hook", None) for module in model.modules())  # accelerate's
    places = (getattr(hook, "execution_device", None) for hook in hooks)
    return torch.device(next((place for place in places if place is not None), "cpu"))


def vocabulary(model: PreTrainedModel) -> int:
    """How many tokens the writing part can be fed."""
    if is_seq2seq(model):
        return int(decoder_config(model).vocab_size)
    embeddings = model.get_input_embeddings()
    if isinstance(getattr(embeddings, "weight", None), Tensor):
        return int(embeddings.weight.shape[0])
    # Where tokens of speech stand beside each other, there is a table for each, or one inside; and there are others.
    told = int(decoder_config(model).vocab_size)
    tables = [part.num_embeddings for part in embeddings.modules() if isinstance(part, nn.Embedding)]
    return min((size for size in tables if size >= told), default=told)


def position_table(model: PreTrainedModel) -> int | None:
    """How many positions the writing part knows; None = it has no table of them."""
    names = ("max_decoder_position_embeddings", "max_target_positions", "max_position_embeddings")
    config = decoder_config(model)
    for name in names:
        table = getattr(config, name, None)
        if isinstance(table, int) and table > 0:
            return table
    return None
