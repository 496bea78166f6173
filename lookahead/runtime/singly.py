"""Attention that computes many nodes at once, each with the bits that plain decoding gives a single token.

`_c/singly.c` adds as torch's kernel for a single token does, where MKL multiplies bfloat16 for it. In which order a
processor's MKL adds, and when transformers gives it the query heads of a key head together, is nowhere said. So it is
tried, once a machine (`attention_trials`).
"""

from functools import partial

import torch
import transformers
from transformers import PreTrainedModel

from lookahead.models.mask_rules import held_window, mask_rules, shortest_window
from lookahead.models.traits import ModelTraits
from lookahead.runtime.attention_trials import IN_FOURS, IN_ORDER, tried
from lookahead.runtime.machine import found_once
from lookahead.runtime.ordered_attention import obstacle

_BLOCK, _SHARED = 512, 16  # slots; of which a thread has so many, or more, and adds as if it had all


def how_singly(model: PreTrainedModel, traits: ModelTraits, alone: bool = False) -> int:
    """How all layers compute each node with the bits of plain decoding: SINGLY or PACKED, maybe in fours; IN_ORDER if
    they do not. ``alone``: of a single text, which has padding."""
    config, heads = traits.config, getattr(traits.config, "num_attention_heads", 1)
    # Of a single head torch lets threads share the work, which then add in another order.
    if obstacle() is not None or traits.dtype != torch.bfloat16 or heads == 1:
        return IN_ORDER
    layers = [layer for layer in model.modules() if isinstance(getattr(layer, "head_dim", None), int)]
    kinds = {(layer.head_dim, getattr(layer, "num_key_value_groups", 1)) for layer in layers}
    how = min(how_of(*kind) for kind in kinds or {(config.hidden_size // heads, 1)})
    rules = mask_rules(model, traits) if how else None
    window = shortest_window(traits, rules)
    shared = how >= IN_FOURS and any(group == heads for _, group in kinds) and _is_shared(window, alone)
    unheld = window is not None and held_window(model, traits, rules, None) is None
    return IN_ORDER if shared or unheld else how


def _is_shared(window: int | None, alone: bool) -> bool:
    """Whether threads share the slots of a key head, all of whose query heads come together, and add otherwise."""
    parts = _SHARED * torch.get_num_threads()
    return alone or (window is not None and bool(window % parts or _BLOCK % parts))


def how_of(channels: int, group: int) -> int:
    """The same of heads of so many ``channels``, of which a ``group`` shares a key head."""
    return int(found_once("singly", [channels, group, transformers.__version__], partial(tried, channels, group)))
