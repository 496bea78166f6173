"""Trials of attention that computes many nodes at once, each with the bits that plain decoding gives a single token.

`_c/singly.c` adds as torch's kernel for a single token does, where MKL multiplies bfloat16 for it. In which order a
processor's MKL adds, and when transformers gives it the query heads of a key head together, is nowhere said. So it is
tried, once a machine, by transformers' own call for each node of a tree behind texts of many lengths.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from lookahead.models.mask_rules import held_window, mask_rules, shortest_window
from lookahead.models.traits import ModelTraits
from lookahead.runtime.machine import found_once
from lookahead.runtime.ordered_attention import obstacle

# How sums are ordered: as a text, or a node's as plain decoding has them, whose kernel may be given the heads of a key
# head together wherever it has a mask, as in some layers with windows, or has one in all of a pass.
IN_ORDER, SINGLY, PACKED, MASKED = range(4)

_HEADS, _GROUP = 16, 8  # of queries, and of those that share a key head
_PATHS = ((0,), (0, 1), (0, 2), (0, 2, 3), (0, 2, 3, 4), (0, 1, 5), (0, 1, 5, 6), (0, 2, 3, 7))  # of a tree's nodes
_TEXTS = (0, 5, 40, 200, 333, 509, 1100)  # slots before them: few, parts of steps, some blocks
_TRIED = 400_000  # numbers, at least: one wrong rounding shows in 1 of 100,000


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


@torch.no_grad()
def tried(channels: int) -> int:
    """The same, by trial."""
    source, kinds = torch.Generator().manual_seed(0), {SINGLY, PACKED}
    for text in _TEXTS * -(-_TRIED // (len(_TEXTS) * _HEADS * len(_PATHS) * channels)):
        for padding in sorted({0, text // 3}):
            kinds = {kind for kind in kinds if _has_plains_bits(kind, channels, text, padding, source)}
    return max(kinds, default=IN_ORDER)


def _has_plains_bits(kind: int, channels: int, text: int, padding: int, source: torch.Generator) -> bool:
    """Whether all nodes of a tree behind a text have them."""
    count, layer = len(_PATHS), SimpleNamespace(num_key_value_groups=_GROUP, is_causal=True)
    heads = (_HEADS, count), (_HEADS // _GROUP, text + count), (_HEADS // _GROUP, text + count)
    query, key, value = (torch.randn(1, *each, channels, generator=source).bfloat16() for each in heads)
    mask = torch.zeros(1, 1, count, text + count)
    mask[..., :padding] = mask[..., text:] = torch.finfo(torch.bfloat16).min
    for node, path in enumerate(_PATHS):
        mask[..., node, [text + each for each in path]] = 0.0
    how = MASKED if kind == PACKED and padding else kind
    places = torch.tensor([[padding, text, text, how, 0, *(len(path) - 1 for path in _PATHS)]], dtype=torch.int32)
    found = torch.ops.lookahead.attended(query, key, value, mask.bfloat16(), places, channels**-0.5, 0)
    for node, path in enumerate(_PATHS):
        slots = [*range(text), *(text + each for each in path)]
        shown = torch.arange(len(slots))[None, None, None] >= padding if padding else None
        states: Any = query[:, :, node : node + 1], key[:, :, slots], value[:, :, slots]
        plain = sdpa_attention_forward(layer, *states, shown, scaling=channels**-0.5)[0]
        if found.ndim < 4 or not torch.equal(found[:, :, node], plain[:, 0]):
            return False
    return True
