"""What a model's class and config say of the part that writes: all of a causal model, an encoder-decoder's decoder."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel

_PREPARE_AXES = "_prepare_position_ids_for_generation"


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """What a model's class and config say, read once a call.

    Attributes:
        name: of the model's class, for messages.
        config: of the layers that write (:func:`decoder_config`).
        is_encoder_decoder: whether an encoder reads the prompt.
        device: where the model takes its tokens.
        dtype: of its hidden states.
        attention: name of the attention implementation.
        vocab_size: how many tokens the writing part can be fed.
        position_table: how many positions the config speaks of; None = it does not.
        depth_limit: the first position that does not exist, where a learned table ends; None with RoPE.
        rope_limit: the kind of RoPE that changes with the text's length, and the first position where it does.
        index_limit: how many tokens are attended to, where a model leaves out the rest.
        cache_argument: name of the argument that takes the cache, ``past_key_values`` or ``cache_params``.
        takes_positions: whether ``forward`` takes ``position_ids``.
        counts_slots: whether the model counts cache slots by itself, for positions, biases, windows or scales.
        has_axes: whether positions may have several axes, as of images.
        is_stateful: whether the class says that it has recurrent states.
        own_loop: the class whose ``_sample`` does not end in transformers' own, as speech models have it.
    """

    name: str
    config: Any
    is_encoder_decoder: bool
    device: torch.device
    dtype: torch.dtype
    attention: str
    vocab_size: int
    position_table: int | None
    depth_limit: int | None
    rope_limit: tuple[str, int] | None
    index_limit: int | None
    cache_argument: str
    takes_positions: bool
    counts_slots: bool
    has_axes: bool
    is_stateful: bool
    own_loop: str | None

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self:
        """Read ``model``."""
        config, forward = decoder_config(model), type(model).forward
        table = position_table(model)
        return cls(
            name=type(model).__name__,
            config=config,
            is_encoder_decoder=is_seq2seq(model),
            device=input_device(model),
            dtype=model.dtype,
            attention=str(config._attn_implementation),
            vocab_size=vocabulary(model),
            position_table=table,
            depth_limit=None if any(rope_settings(config)) else table,
            rope_limit=position_limit(model),
            index_limit=index_limit(model),
            cache_argument=_cache_argument(forward),
            takes_positions=takes_positions(forward),
            counts_slots=counts_slots(model),
            has_axes=getattr(type(model), _PREPARE_AXES, None) is not getattr(GenerationMixin, _PREPARE_AXES),
            is_stateful=bool(getattr(model, "_is_stateful", False)),
            own_loop=_own_loop(type(model)),
        )


def _own_loop(kind: type) -> str | None:
    for parent in kind.__mro__:
        if parent is GenerationMixin:
            break
        own = vars(parent).get("_sample")
        code = None if own is None else getattr(inspect.unwrap(own), "__code__", None)
        if code is not None and "_sample" not in code.co_names:
            return parent.__name__
    return None


@lru_cache
def _cache_argument(forward: Callable[..., Any]) -> str:
    known = inspect.signature(forward).parameters
    return "cache_params" if "cache_params" in known and "past_key_values" not in known else "past_key_values"


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


def rope_settings(config: Any) -> Iterator[dict[str, Any]]:
    """A config's RoPE settings: one set, or one for each kind of layer."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    yield from rope.values() if rope and all(isinstance(v, dict) for v in rope.values()) else [rope]


def position_limit(model: PreTrainedModel) -> tuple[str, int] | None:
    """The first position at which RoPE changes with the text's length, and the kind of RoPE; None = it does not."""
    config = model.config.get_text_config()
    table = getattr(config, "max_position_embeddings", None)
    for rope in rope_settings(config):
        kind = rope.get("rope_type", "default")
        if kind not in ("dynamic", "longrope"):
            continue
        original = None
        if kind == "longrope":
            original = rope.get("original_max_position_embeddings")
            original = original or getattr(config, "original_max_position_embeddings", None)
        return kind, int(original or table or 0)
    return None


def index_limit(model: PreTrainedModel) -> int | None:
    """How many tokens are attended to where a model leaves out the rest (indexed attention, Doge's dynamic mask).

    Up to that many, the choice is "all of them". Past it, ties are broken by the tokens' slots.

    Returns:
        None where all tokens are attended to.
    """
    config = model.config.get_text_config()
    if "indexed_attention" in (getattr(config, "layer_types", None) or ()):
        return int(getattr(config, "index_topk", None) or getattr(config, "indexer_budget", None) or 0)
    kept = getattr(config, "keep_window_size", None)
    return kept if isinstance(kept, int) else None
