"""Trials of attention whose sums are ordered as plain decoding's of a single token, by transformers' own call for each
node of a tree behind texts of many lengths."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

# How sums are ordered: as a text, or a node's as plain decoding has them, whose kernel may be given the heads of a key
# head together wherever it has a mask, as in some layers with windows, or has one in all of a pass (then both bits are
# set); in fours where MKL adds so.
IN_ORDER, SINGLY, PACKED, MASKED, IN_FOURS = range(5)

_HEADS = 16  # of queries, at least
_PATHS = ((0,), (0, 1), (0, 2), (0, 2, 3), (0, 2, 3, 4), (0, 1, 5), (0, 1, 5, 6), (0, 2, 3, 7))  # of a tree's nodes
_TEXTS = (0, 5, 40, 200, 203, 333, 509, 1100)  # slots before them: few, parts of steps, some blocks
_CANCELLING = (1.0, 2.0**10)  # scales of scores with which only roundings are left of sums: of values, then of scores
_TRIED = 400_000  # usual numbers, at least: one wrong rounding shows in 1 of 100,000


@torch.no_grad()
def tried(channels: int, group: int) -> int:
    """How sums of heads of ``channels`` are ordered, a ``group`` of which shares a key head; IN_ORDER = as no other."""
    source = torch.Generator().manual_seed(0)
    kinds = {order + kind for kind in (SINGLY, PACKED) for order in (0, IN_FOURS)}
    rounds = -(-_TRIED // (len(_TEXTS) * _HEADS * len(_PATHS) * channels))
    kinds = _kept(kinds, channels, group, None, source)
    # Where MKL adds in pairs and in tiles, no trial of roundings alone has been run yet.
    for scale in _CANCELLING if max(kinds, default=0) >= IN_FOURS else [None] * rounds:
        kinds = _kept(kinds, channels, group, scale, source)
    return max(kinds, default=IN_ORDER)


def _kept(kinds: set[int], channels: int, group: int, scale: float | None, source: torch.Generator) -> set[int]:
    """Those of ``kinds`` in which trees behind all texts have plain decoding's bits."""
    for text in _TEXTS:
        for padding in sorted({0, text // 3}) if kinds else ():
            given = _states(channels, group, text, padding, scale, source)
            kinds = {kind for kind in kinds if _has_plains_bits(kind, given, padding, scale or channels**-0.5)}
    return kinds


def _states(
    channels: int, group: int, text: int, padding: int, scale: float | None, source: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a tree behind a text. With a ``scale``, either values of the text or the products of
    a score cancel each other: what is left are the roundings of sums, so that each of them shows."""
    key_heads, slots = max(2, -(-_HEADS // group)), text + len(_PATHS)

    def random(heads: int, lines: int) -> Tensor:
        spread = 1.0 if scale is None else torch.randint(-6, 7, (1, heads, lines, channels), generator=source).exp2()
        return (torch.randn(1, heads, lines, channels, generator=source) * spread).bfloat16()

    query, key, value = random(group * key_heads, len(_PATHS)), random(key_heads, slots), random(key_heads, slots)
    if scale == 1.0:
        half = (text - padding) // 2
        value[:, :, padding + half : text] = 0.0
        value[:, :, padding + half : padding + 2 * half] = -value[:, :, padding : padding + half].flip(2)
        value[:, :, text:] *= 2.0**-16
        query.zero_()
    elif scale is not None:
        half = channels // 2
        query[..., half : 2 * half], key[..., half : 2 * half] = query[..., :half].flip(3), -key[..., :half].flip(3)
    return query, key, value


def _has_plains_bits(kind: int, given: tuple[Tensor, Tensor, Tensor], padding: int, scale: float) -> bool:
    """Whether all nodes of a tree behind a text have plain decoding's bits."""
    (query, key, value), count = given, len(_PATHS)
    text = key.shape[2] - count
    layer = SimpleNamespace(num_key_value_groups=query.shape[1] // key.shape[1], is_causal=True)
    mask = torch.zeros(1, 1, count, text + count)
    mask[..., :padding] = mask[..., text:] = torch.finfo(torch.bfloat16).min
    for node, path in enumerate(_PATHS):
        mask[..., node, [text + each for each in path]] = 0.0
    how = kind | SINGLY if padding else kind
    places = torch.tensor([[padding, text, text, how, 0, 0, 1, *(len(path) - 1 for path in _PATHS)]], dtype=torch.int32)
    found = torch.ops.lookahead.attended(query, key, value, mask.bfloat16(), places, scale, 0)
    for node, path in enumerate(_PATHS):
        seen = [*range(text), *(text + each for each in path)]
        shown = torch.arange(len(seen))[None, None, None] >= padding if padding else None
        states: Any = query[:, :, node : node + 1], key[:, :, seen], value[:, :, seen]
        plain = sdpa_attention_forward(layer, *states, shown, scaling=scale)[0]
        if found.ndim < 4 or not torch.equal(found[:, :, node], plain[:, 0]):
            return False
    return True
