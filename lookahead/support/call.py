"""Checks of one call: modes, prompts and caches that drafts cannot serve, each named with the way out."""

from typing import Any

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, cache_utils
from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache, StaticLayer

from jacobi import LookaheadError
from lookahead.models.families.decoders import forgets_padding
from lookahead.models.mask_rules import windows_of_the_cache
from lookahead.models.names import CACHE
from lookahead.models.traits import ModelTraits, boundary
from lookahead.runtime.cache.layers import EMPTY_LAYERS
from lookahead.runtime.cache.snapshots import holds_keys, holds_text, recurrent_layers, states_of

_UNMASKED = ("GPTNeoSelfAttention", "LEDDecoder")  # their passes over one token mask nothing in a static cache
_DYNAMIC = (cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer, cache_utils.DynamicIndexedLayer)
_TREE_LAYERS = (*_DYNAMIC, StaticLayer, *EMPTY_LAYERS)
_MIXED = (cache_utils.LinearAttentionAndFullAttentionLayer, cache_utils.LinearAttentionAndSlidingWindowAttentionLayer)
_LINEAR_LAYERS = (*_DYNAMIC, cache_utils.LinearAttentionLayer, *_MIXED, *EMPTY_LAYERS)


def check_mode(generation_config: GenerationConfig) -> None:
    """Refuse (with a LookaheadError) beams, prompt lookup and their like."""

    def refuse(culprit: str, way_out: str) -> None:
        raise LookaheadError(f"use_lookahead cannot be combined with {culprit}: {way_out}, or drop use_lookahead.")

    if (generation_config.num_beams or 1) > 1:
        refuse(f"num_beams={generation_config.num_beams}", "set num_beams=1")
    if getattr(generation_config, "prompt_lookup_num_tokens", None):
        count = generation_config.prompt_lookup_num_tokens
        refuse(f"prompt_lookup_num_tokens={count!r}", "drop prompt_lookup_num_tokens")
    if getattr(generation_config, "cache_implementation", None) == "paged":
        refuse("cache_implementation='paged'", "leave cache_implementation unset")
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(generation_config, name, None) and generation_config.return_dict_in_generate:
            refuse(f"{name}=True", f"drop {name} (scores, logits and the cache are returned as usual)")


def check_prompt(
    model: PreTrainedModel, traits: ModelTraits, input_ids: Tensor, model_kwargs: dict[str, Any], *, tree: bool = True
) -> None:
    """Refuse prompts that no text can follow. ``input_ids`` ``[batch, token]`` are the decoder's; nodes of a ``tree``
    need positions of this shape."""
    prefix = "decoder_" if traits.is_encoder_decoder else ""
    embeds = model_kwargs.get(f"{prefix}inputs_embeds")
    length = input_ids.shape[1] if embeds is None else embeds.shape[1]
    position_ids = model_kwargs.get(f"{prefix}position_ids")
    if tree and position_ids is not None and position_ids.ndim not in (2, 3 if traits.has_axes else 2):
        raise LookaheadError(
            f"position_ids of shape {tuple(position_ids.shape)} are not supported: expected [batch, token]. "
            "Drop use_lookahead for this model."
        )
    if length == 0 or input_ids.shape[0] == 0:
        raise LookaheadError(
            f"The prompt is empty: got input_ids of shape {tuple(input_ids.shape)}, expected at least one token. "
            "Start with the model's begin-of-text token."
        )
    if input_ids.numel():
        low, high = int(input_ids.min()), int(input_ids.max())
        if low < 0 or high >= traits.vocab_size:
            raise LookaheadError(
                f"Token id {low if low < 0 else high} is outside the vocabulary: expected 0 to "
                f"{traits.vocab_size - 1}. Was the prompt made by another model's tokenizer?"
            )
    mask = model_kwargs.get(f"{prefix}attention_mask")
    if mask is not None:
        _check_mask(model, traits, mask, length, f"{prefix}attention_mask")
    reach = length if position_ids is None else int(position_ids.max()) + 1
    if traits.depth_limit is not None and traits.depth_limit < reach:
        raise LookaheadError(
            f"The prompt reaches position {reach - 1}, and the model's position table ends at {traits.depth_limit} "
            "(config.max_position_embeddings). Shorten the prompt."
        )


def _check_mask(model: PreTrainedModel, traits: ModelTraits, mask: Tensor, length: int, name: str) -> None:
    if mask.shape[-1] < length:
        raise LookaheadError(
            f"{name} of shape {tuple(mask.shape)} does not cover the {length} tokens of the prompt: "
            "expected one column for each token."
        )
    if forgets_padding(model) and not bool(mask.all()):
        raise LookaheadError(
            f"{traits.name} forgets decoder_attention_mask after the prompt, and rows then see their padding: "
            "give decoder prompts of one length, or drop use_lookahead."
        )
    if mask.ndim == 2 and bool((mask[:, -1] == 0).any()):
        row = int((mask[:, -1] == 0).nonzero()[0])
        raise LookaheadError(
            f"Row {row} is padded on the right: new tokens follow the last column, so a batch must be padded on the "
            "left. Set tokenizer.padding_side = 'left'."
        )


def tree_obstacle(
    model: PreTrainedModel, traits: ModelTraits, input_ids: Tensor, model_kwargs: dict[str, Any], cache: Any, room: int
) -> str | None:
    """Why a call falls back to transformers' own loop, although its model could follow trees; None = it does not.
    ``cache`` is what ``generate`` prepared or the user gave; at most ``room`` tokens follow ``input_ids``."""
    static = isinstance(getattr(cache, "self_attention_cache", cache), StaticCache)
    if static and any(type(module).__name__ in _UNMASKED for module in model.modules()):
        return f"{traits.name} looks at slots of a static cache that hold no text"
    uncached = model_kwargs.get("use_cache") is False
    if uncached and traits.rope_limit is not None and not traits.is_encoder_decoder:
        change = change_within(traits, input_ids, model_kwargs, room)
        if change is not None:
            return f"{change}, and without a cache each pass recomputes all of it"
    if cache is not None and holds_text(cache) and windows_of_the_cache(model, traits):
        return f"{traits.name} leaves its windows to the cache, and a cache is continued that has dropped tokens"
    if _sees_images(traits, model_kwargs, cache):
        return f"{traits.name} keeps what its cross-attention layers know of images in the cache of the text"
    return None  # where a tree's model changes, its passes change too


def change_within(traits: ModelTraits, input_ids: Tensor, model_kwargs: dict[str, Any], room: int) -> str | None:
    """Why a causal model's passes change within ``room`` more tokens; None = they do not."""
    positions, mask = model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")
    embeds = model_kwargs.get("inputs_embeds")
    length = max(part.shape[1] for part in (input_ids, embeds, mask) if part is not None)
    last = length - 1 if positions is None else int(positions.max())
    change = boundary(traits, length, [last])
    return None if change is None or change[0] >= length + room else f"{change[1]}, within this text"


def _sees_images(traits: ModelTraits, model_kwargs: dict[str, Any], cache: Any) -> bool:
    """True if layers of cross-attention (Mllama's) have anything to attend to in a call."""
    crossing = getattr(traits.config, "cross_attention_layers", None)
    if not crossing or traits.is_encoder_decoder:
        return False
    held = [] if cache is None else [layer for index, layer in enumerate(cache.layers) if index in crossing]
    return any(model_kwargs.get(name) is not None for name in ("pixel_values", "cross_attention_states")) or any(
        layer.is_initialized and int(layer.get_seq_length()) > 0 for layer in held
    )


def check_cache_of_trees(traits: ModelTraits, cache: Any, batch: int, slots: int) -> None:
    """Refuse a cache that is another model's, cannot keep chosen slots, or has fewer than ``slots`` of them."""
    if cache is None:
        return
    if traits.is_encoder_decoder:
        if not isinstance(cache, EncoderDecoderCache):
            raise LookaheadError(
                f"{traits.name} needs a cache for its cross-attention too: got a {type(cache).__name__}, "
                f"expected an EncoderDecoderCache. Leave {CACHE} unset, or pass one."
            )
        if getattr(cache.self_attention_cache, "offloading", False):
            raise LookaheadError(
                "An offloaded cache is not supported for encoder-decoder models with lookahead: leave "
                "cache_implementation unset, or decode without use_lookahead."
            )
        check_cache(cache.self_attention_cache, None, batch, None, None, slots)
        return
    config = traits.config
    heads = _field(config, "num_key_value_heads") or _field(config, "num_attention_heads")
    channels, hidden = _field(config, "head_dim"), _field(config, "hidden_size")
    if channels is None and hidden and _field(config, "num_attention_heads"):
        channels = hidden // config.num_attention_heads
    other = _field(config, "kv_lora_rank") or _field(config, "multi_query") is not None
    if other or not isinstance(heads, int) or not isinstance(channels, int):
        heads = channels = None  # latent or multi-query attention: the cached shape follows other fields
    shared, layers = _field(config, "num_kv_shared_layers") or 0, config.num_hidden_layers
    check_cache(cache, layers, batch, heads, channels, slots, shared)


def _field(config: Any, name: str) -> Any:
    """A config's field; None if there is none, or if it differs from layer to layer."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # newer versions refuse to read such a field
        return None


def check_cache(
    cache: Any, n_layers: int | None, batch: int, heads: int | None, channels: int | None, slots: int, n_shared: int = 0
) -> None:
    """Refuse, by name, a cache that a tree cannot run on or that belongs to another model. ``n_layers``, key/value
    ``heads`` and ``channels`` of a head are the model's, None if its config does not tell; ``n_shared`` of the layers
    use another's keys, and older caches leave them out. Up to ``slots`` tokens will be held."""
    if type(cache) not in (DynamicCache, StaticCache):
        raise LookaheadError(
            f"A {type(cache).__name__} cannot keep chosen slots of a tree: expected a DynamicCache. Leave "
            f"{CACHE} and cache_implementation unset, or decode without use_lookahead."
        )
    for index, layer in enumerate(cache.layers):
        if type(layer) not in _TREE_LAYERS:
            kind = type(layer).__name__
            why = "a recurrent state cannot follow a tree" if "Linear" in kind else "it cannot keep chosen slots"
            raise LookaheadError(
                f"Layer {index} of the cache is a {kind}, and {why}: expected attention layers only. "
                "Decode this model without use_lookahead."
            )
    for layer in cache.layers:
        if isinstance(layer, StaticLayer) and layer.max_cache_len < slots:
            told = f"The static cache has {layer.max_cache_len} slots: this call may need {slots}."
            raise LookaheadError(f"{told} Make it larger, or lower max_new_tokens.")
    holding = [layer for layer in cache.layers if not isinstance(layer, EMPTY_LAYERS)]
    filled = [layer for layer in holding if layer.is_initialized and int(layer.get_seq_length()) > 0]
    if not filled:
        return
    got_batch, got_heads, _, got_channels = filled[0].keys.shape
    _check_owner(cache, n_layers, n_shared, got_batch, batch)
    for what, got, expected in (("key/value heads", got_heads, heads), ("channels a head", got_channels, channels)):
        if expected is not None and got != expected:
            raise LookaheadError(
                f"{CACHE} is the cache of another model: it has {got} {what}, this model {expected}. "
                "Pass a cache that this model filled."
            )


def check_cache_of_linear(traits: ModelTraits, cache: Any, batch: int) -> None:
    """Refuse, by name, a cache that a linear draft cannot be taken back from, or that belongs to another model."""
    if cache is None:
        return
    if type(cache) is not DynamicCache or cache.offloading:
        kind = "An offloaded cache" if getattr(cache, "offloading", False) else f"A {type(cache).__name__}"
        raise LookaheadError(
            f"{kind} cannot take rejected tokens back from this model's layers: expected a DynamicCache. Leave "
            f"{CACHE} and cache_implementation unset, or decode without use_lookahead."
        )
    for index, layer in enumerate(cache.layers):
        if type(layer) not in _LINEAR_LAYERS:
            raise LookaheadError(
                f"Layer {index} of the cache is a {type(layer).__name__}, from which rejected tokens cannot be taken "
                "back. Decode this model without use_lookahead."
            )
    shapes = [state.shape for layer in recurrent_layers(cache) for state in states_of(layer).values()]
    shapes += [layer.keys.shape for layer in cache.layers if holds_keys(layer)]
    if shapes:
        _check_owner(cache, traits.config.num_hidden_layers, 0, shapes[0][0], batch)


def _check_owner(cache: Any, n_layers: int | None, n_shared: int, got_batch: int, batch: int) -> None:
    if n_layers is not None and len(cache.layers) not in (n_layers, n_layers - n_shared):
        raise LookaheadError(
            f"{CACHE} is the cache of another model: it has {len(cache.layers)} layers, this model {n_layers}. "
            "Pass a cache that this model filled."
        )
    if got_batch != batch:
        raise LookaheadError(f"{CACHE} holds {got_batch} rows: expected {batch}, one for each input row.")
