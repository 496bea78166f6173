"""Traits of the part that writes, by class and config: all of a causal model, an encoder-decoder's decoder."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel

from lookahead.models.names import CACHE, CACHES, STATE

_PREPARE_AXES = "_prepare_position_ids_for_generation"


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """Facts of a model's class and config, read once a call."""

    name: str  # of the model's class
    config: Any  # of the layers that write
    is_encoder_decoder: bool
    device: torch.device  # where the model takes its tokens
    dtype: torch.dtype
    attention: str  # name of the implementation
    vocab_size: int  # tokens that the writing part can be fed
    position_table: int | None  # how many positions the config speaks of
    depth_limit: int | None  # the first position that does not exist, where a learned table ends; None with RoPE
    rope_limit: tuple[str, int] | None  # the kind of RoPE that changes with the text's length, and from which position
    index_limit: int | None  # how many tokens are attended to, where a model leaves out the rest
    cache_argument: str  # of forward, in this version of transformers
    takes_positions: bool  # forward takes position_ids
    counts_slots: bool  # the model counts cache slots by itself, for positions, biases, windows or scales
    has_axes: bool  # positions may have several axes, as of images
    is_stateful: bool  # the class says that it has recurrent states
    is_sharded: bool  # over processes, as tensor parallelism does
    own_loop: str | None  # the class whose _sample does not end in transformers' own, as speech models have it

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self:
        kind, config = type(model), decoder_config(model)
        text = model.config.get_text_config() if model.config.is_encoder_decoder else config
        names = ("max_decoder_position_embeddings", "max_target_positions", "max_position_embeddings")
        tables = (getattr(config, name, None) for name in names)
        table = next((table for table in tables if isinstance(table, int) and table > 0), None)
        arguments = parameters(kind.forward)
        # Slots are counted for biases (ALiBi), windows (GPT-Neo) or scales (Llama 4).
        windows = any("local" in str(kind) for kind in getattr(text, "attention_layers", None) or ())
        biases, scales = getattr(text, "alibi", False) is True, bool(getattr(text, "attn_temperature_tuning", False))
        takes_positions, caches = "position_ids" in arguments, arguments & CACHES
        return cls(
            name=kind.__name__,
            config=config,
            is_encoder_decoder=bool(model.config.is_encoder_decoder),
            device=_input_device(model),
            dtype=model.dtype,
            attention=str(config._attn_implementation),
            vocab_size=_vocab_size(model, config),
            position_table=table,
            depth_limit=None if any(_rope_settings(config)) else table,
            rope_limit=_rope_limit(text),
            index_limit=_index_limit(text),
            cache_argument=STATE if caches == {STATE} else CACHE,
            takes_positions=takes_positions,
            counts_slots=not takes_positions or windows or biases or scales,
            has_axes=getattr(kind, _PREPARE_AXES, None) is not getattr(GenerationMixin, _PREPARE_AXES),
            is_stateful=bool(getattr(model, "_is_stateful", False)),
            is_sharded=getattr(model, "_device_mesh", None) is not None or (getattr(model, "tp_size", None) or 1) > 1,
            own_loop=_own_loop(kind),
        )


def tensor_parallel_group(model: PreTrainedModel) -> Any:
    """The process group over which a model's weights are sharded; None if there is none."""
    mesh: Any = getattr(model, "_device_mesh", None)
    if not torch.distributed.is_available() or not torch.distributed.is_initialized() or not hasattr(mesh, "get_group"):
        return None
    names = mesh.mesh_dim_names or ()
    return mesh.get_group("tp") if "tp" in names and len(names) > 1 else mesh.get_group()


def boundary(traits: ModelTraits, past: int, last_positions: Sequence[int]) -> tuple[int, str] | None:
    """The first slot whose token needs a step of transformers' own, and why; None = no slot does.

    ``past`` slots hold the prompt, whose last token lies at ``last_positions`` in each sequence.
    ``dynamic`` RoPE makes new frequencies for every pass past its limit, ``longrope`` switches them once (and
    transformers then recomputes the whole text), indexed sparse attention begins to leave out tokens. From that token
    on, each pass has to be plain decoding's own: one token in every sequence.
    """
    slots: list[tuple[int, str]] = []
    if traits.rope_limit is not None:
        kind, limit = traits.rope_limit
        highest, why = max(last_positions), f"{kind} RoPE changes at position {limit}"
        if kind == "dynamic" or highest < limit:
            slots.append((past + max(0, limit - 1 - highest), why))
            if kind == "longrope" and past <= limit:
                slots.append((limit, why))  # Phi-3 recomputes where the slots, padding included, pass the limit
    if traits.index_limit is not None:
        slots.append((max(past, traits.index_limit), f"attention leaves out tokens past {traits.index_limit}"))
    return min(slots, default=None)


def decoder_config(model: PreTrainedModel) -> Any:
    """The config of the layers that write, under a causal model's names (``num_hidden_layers``, ``vocab_size``)."""
    config = model.config
    return config.get_text_config(decoder=True) if config.is_encoder_decoder else config.get_text_config()


@lru_cache
def parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _own_loop(kind: type) -> str | None:
    for parent in kind.__mro__:
        if parent is GenerationMixin:
            break
        own = vars(parent).get("_sample")
        code = None if own is None else getattr(inspect.unwrap(own), "__code__", None)
        if code is not None and "_sample" not in code.co_names:
            return parent.__name__
    return None


def _input_device(model: PreTrainedModel) -> torch.device:
    """Where tokens go. Offloaded weights are on no device, and accelerate's hooks fetch them when they are needed."""
    if model.device.type != "meta":
        return model.device
    hooks = (getattr(module, "_hf_hook", None) for module in model.modules())
    devices = (getattr(hook, "execution_device", None) for hook in hooks)
    return torch.device(next((device for device in devices if device is not None), "meta"))


def _vocab_size(model: PreTrainedModel, config: Any) -> int:
    if model.config.is_encoder_decoder:
        return int(config.vocab_size)
    embeddings = model.get_input_embeddings()
    if isinstance(getattr(embeddings, "weight", None), Tensor):
        return int(embeddings.weight.shape[0])
    # Models that add up codebooks have a table for each of them, and perhaps others inside.
    told = int(config.vocab_size)
    tables = [part.num_embeddings for part in embeddings.modules() if isinstance(part, nn.Embedding)]
    return min((size for size in tables if size >= told), default=told)


def _rope_settings(config: Any) -> Iterator[dict[str, Any]]:
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    yield from rope.values() if rope and all(isinstance(v, dict) for v in rope.values()) else [rope]


def _rope_limit(config: Any) -> tuple[str, int] | None:
    table = getattr(config, "max_position_embeddings", None)
    for rope in _rope_settings(config):
        kind = rope.get("rope_type", "default")
        if kind == "longrope":
            original = rope.get("original_max_position_embeddings")
            return kind, int(original or getattr(config, "original_max_position_embeddings", None) or table or 0)
        if kind == "dynamic":
            return kind, int(table or 0)
    return None


def _index_limit(config: Any) -> int | None:
    """Of indexed attention, and Doge's dynamic mask: up to so many tokens, the choice is "all of them"."""
    if "indexed_attention" in (getattr(config, "layer_types", None) or ()):
        return int(getattr(config, "index_topk", None) or getattr(config, "indexer_budget", None) or 0)
    kept = getattr(config, "keep_window_size", None)
    return kept if isinstance(kept, int) else None
