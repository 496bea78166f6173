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
from lookahead.runtime.attention_trials import IN_ORDER, tried
from lookahead.runtime.machine import found_once
from lookahead.runtime.ordered_attention import obstacle


def how_singly(model: PreTrainedModel, traits: ModelTraits) -> int:
    """How all layers compute each node with the bits of plain decoding: SINGLY, or PACKED; IN_ORDER if they do not."""
    config, heads = traits.config, getattr(traits.config, "num_attention_heads", 1)
    # Of a single head torch lets threads share the work, which then add in another order.
    if obstacle() is not None or traits.dtype != torch.bfloat16 or heads == 1:
        return IN_ORDER
    sizes = filter(None, (getattr(config, name, None) for name in ("head_dim", "global_head_dim")))
    how = min(map(how_of, set(sizes) or {config.hidden_size // heads}))
    rules = mask_rules(model, traits) if how else None
    windowed = shortest_window(traits, rules) is not None
    return IN_ORDER if windowed and held_window(model, traits, rules, None) is None else how


def how_of(channels: int) -> int:
    """The same of heads of so many ``channels``."""
    return int(found_once("singly", [channels, transformers.__version__], partial(tried, channels)))
