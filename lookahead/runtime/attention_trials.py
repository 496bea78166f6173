"""Trials of attention whose sums are ordered as plain decoding's of a single token, by transformers' own call for each
node of a tree behind texts of many lengths."""

from types import SimpleNamespace
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

# How sums are ordered: as a text, or a node's as plain decoding has them, whose kernel may be given the heads of a key
# head together wherever it has a mask, as in some layers with windows, or has one in all of a pass.
IN_ORDER, SINGLY, PACKED, MASKED = range(4)

_HEADS, _GROUP = 16, 8  # of queries, and of those that share a key head
_PATHS = ((0,), (0, 1), (0, 2), (0, 2, 3), (0, 2, 3, 4), (0, 1, 5), (0, 1, 5, 6), (0, 2, 3, 7))  # of a tree's nodes
_TEXTS = (0, 5, 40, 200, 333, 509, 1100)  # slots before them: few, parts of steps, some blocks
_TRIED = 400_000  # numbers, at least: one wrong rounding shows in 1 of 100,000


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
