"""Refusals of caches: those that drafts cannot run on, and those that belong to another model or batch."""

from typing import Any

from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache, StaticLayer

from jacobi import LookaheadError
from lookahead.models.names import CACHE
from lookahead.models.traits import ModelTraits
from lookahead.runtime.cache.layers import EMPTY_LAYERS, layer_kinds
from lookahead.runtime.cache.snapshots import holds_keys, recurrent_layers, states_of

_INDEXED = layer_kinds("DynamicIndexedLayer")  # they keep small keys of their own to choose by
_TREE_LAYERS = (*layer_kinds("DynamicLayer", "DynamicSlidingWindowLayer", "StaticLayer"), *_INDEXED, *EMPTY_LAYERS)
_MIXED = layer_kinds("LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer")
_LINEAR = layer_kinds("DynamicLayer", "DynamicSlidingWindowLayer", "LinearAttentionLayer")
_LINEAR_LAYERS = (*_LINEAR, *_MIXED, *_INDEXED, *EMPTY_LAYERS)


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
            raise LookaheadError(
                f"The static cache has {layer.max_cache_len} slots: this call may need {slots}. Make it larger, or "
                "lower max_new_tokens."
            )
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
