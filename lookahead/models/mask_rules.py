"""The visibility rules of a model's layers: causal, sliding, chunked, as transformers states them."""

import copy
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, create_masks_for_generate

from lookahead.models.names import CACHE
from lookahead.models.traits import ModelTraits

_RECORDER = "lookahead_mask_rule"  # in transformers' registry only while rules are being read
_recording = threading.Lock()
SLIDING = "sliding_attention"  # transformers' names of kinds of layers
UNMASKED = frozenset(["linear_attention", "conv"])  # that are told of padding alone, which is none among nodes


# One kind of layer's visibility as a function of batch, head, query and key, in logical positions; None = causal.
MaskRule = Callable[..., Any] | None


def _record(*args: Any, mask_function: Callable[..., Any] = causal_mask_function, **kwargs: Any) -> MaskRule:
    return None if mask_function is causal_mask_function else mask_function


def mask_rules(model: PreTrainedModel, traits: ModelTraits) -> Any:
    """The visibility rules of a model's layers, in the form its ``forward`` takes masks: one, or a dict by layer type.
    transformers' ``create_masks_for_generate`` makes them, with a mask function that returns the rule."""
    config = copy.copy(traits.config)
    config._attn_implementation_internal = _RECORDER
    create = getattr(model, "create_masks_for_generate", create_masks_for_generate)
    empty = torch.empty((1, 1, 0), device=traits.device, dtype=traits.dtype)
    nothing = dict.fromkeys(("attention_mask", CACHE, "position_ids"))
    with _recording:
        AttentionMaskInterface.register(_RECORDER, _record)
        try:
            return create(config=config, inputs_embeds=empty, **nothing)
        finally:
            AttentionMaskInterface._global_mapping.pop(_RECORDER, None)


def shortest_window(traits: ModelTraits, rules: Any) -> int | None:
    """Number of last tokens that every layer sees, whatever its rule; None = all of them."""
    every = list(rules.values()) if isinstance(rules, dict) else [rules]
    if not any(every):
        return None
    sizes = [getattr(traits.config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return min((size for size in sizes if isinstance(size, int)), default=0)


def held_window(model: PreTrainedModel, traits: ModelTraits, rules: Any, cache: Any) -> int | None:
    """Number of last slots that sliding-window layers have to hold, as those of plain decoding's ``cache`` do (None =
    the usual one). None = all slots: the layers, the cache or the rule are others."""
    kinds = rules if isinstance(rules, dict) else {SLIDING: rules}
    own = {kind: rule for kind, rule in kinds.items() if rule is not None}
    size = getattr(traits.config, "sliding_window", None)
    if list(own) != [SLIDING] or not isinstance(size, int):
        return None
    if traits.counts_slots or traits.is_encoder_decoder or not _masks_windows(model):
        return None
    usual = DynamicCache(config=traits.config).layers
    windows = {layer.sliding_window for layer in usual if isinstance(layer, DynamicSlidingWindowLayer)}
    other = cache is not None and (list(map(type, cache.layers)) != list(map(type, usual)) or cache.get_seq_length())
    if other or windows != {size}:
        return None
    zero, keys = torch.zeros((), dtype=torch.long), torch.arange(2 * size + 1)
    seen = own[SLIDING](zero, zero, zero + 2 * size, keys)
    return size if torch.equal(seen, keys > size) else None


def windows_of_the_cache(model: PreTrainedModel, traits: ModelTraits) -> bool:
    """True if a model leaves its windows to the cache, which drops tokens, and masks none itself (Moshi)."""
    return shortest_window(traits, mask_rules(model, traits)) is not None and not _masks_windows(model)


def _masks_windows(model: PreTrainedModel) -> bool:
    """True if some module of a model makes masks of windows."""
    makers = ("create_sliding_window_causal_mask", "create_chunked_causal_mask", "create_masks_for_generate")
    homes = {type(module).__module__ for module in model.modules()}
    return any(hasattr(sys.modules[home], maker) for home in homes for maker in makers)
