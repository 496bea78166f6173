"""Attention masks for a tree forward, in the form each model asks for.

What a node may see has two parts. The tree part (text so far, ancestors, itself) is the same for every model:
:func:`jacobi.tree.additive_mask`. The other part belongs to the model's layers: causal, sliding, chunked. transformers
states it as a function of two indices, made from the config; we take that function as it is and ask it about *logical*
positions (the sequence's length plus depth) instead of physical slots.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jacobi import TokenTree, additive_mask, ancestor_bits
from lookahead.models.mask_rules import MaskRule

_ALIGNED = 64  # columns; some kernels copy masks whose rows are not aligned, once a layer


def map_rules(rules: Any, build: Callable[[MaskRule], Tensor]) -> Any:
    """Build one mask for each rule, keeping the form; equal layer types share a mask."""
    if not isinstance(rules, dict):
        return build(rules)
    plain: Tensor | None = None
    masks = {}
    for kind, rule in rules.items():
        if rule.function is None:
            plain = build(rule) if plain is None else plain
            masks[kind] = plain
        else:
            masks[kind] = build(rule)
    return masks


class MaskBuffer:
    """One piece of memory for the masks of consecutive passes: a pass rewrites only the columns that have changed."""

    def __init__(self, batch: int, dtype: torch.dtype, device: torch.device) -> None:
        self._mask = torch.zeros((batch, 1, 0, 0), dtype=dtype, device=device)
        self._settled = 0  # columns that need not be written again

    def open(self, width: int, base: int, history: Tensor | None, settled: int) -> Tensor:
        """The mask ``[batch, 1, width, base + width]``, right up to column ``base``; the rest is as it was left. Below
        ``base`` it shows what ``history`` (bool ``[batch, base]``; None = everything) shows. Columns before
        ``settled``, the shortest sequence's length, will never change again."""
        batch, _, nodes, slots = self._mask.shape
        if width > nodes or base + width > slots:
            wanted = max(base + width + 256, min(2 * slots, base + width + 4096))
            shape = (batch, 1, max(width, nodes), -(-wanted // _ALIGNED) * _ALIGNED)
            self._mask = self._mask.new_zeros(shape)
            self._settled = 0
        start = min(self._settled, base)
        columns = self._mask[..., start:base].zero_()  # for wider passes too
        if history is not None:
            columns.masked_fill_(~history[:, None, None, start:], torch.finfo(columns.dtype).min)
        self._settled = min(settled, base)
        return self._mask[:, :, :width, : base + width]


def tree_masks(
    rules: Any,
    trees: Sequence[TokenTree],
    base: int,
    history: Tensor | None,
    coordinates: Callable[[Sequence[TokenTree]], tuple[Tensor, Tensor]],
    dtype: torch.dtype,
    device: torch.device,
    buffer: MaskBuffer | None = None,
    settled: int = 0,
) -> Any:
    """The additive masks ``[batch, 1, node, slot]`` of a pass, one for each kind of layer.

    Args:
        trees: one for each sequence; shorter ones are padded at the end with nodes that see only themselves.
        base: slot of node 0.
        history: bool ``[batch, base]``, the slots below ``base`` that hold a sequence's tokens; None = all of them.
        coordinates: gives the logical positions of nodes ``[batch, node]`` and of slots ``[batch, base + node]``; only
            called if a rule asks for more than causality.
        buffer: where the mask is made, to be overwritten by the next pass's; there padding nodes see the text too.
            None = in memory of its own.
        settled: with a buffer, slots of the shortest sequence.
    """
    batch, width = len(trees), max(map(len, trees))
    lowest = torch.finfo(dtype).min
    if buffer is not None:
        mask = buffer.open(width, base, history, settled)
    else:
        mask = torch.zeros((batch, 1, width, base + width), dtype=dtype, device=device)
        if history is not None:
            mask[:, 0, :, :base].masked_fill_(~history[:, None, :], lowest)
    for row, tree in enumerate(trees):
        count = len(tree)
        mask[row, 0, :count, base : base + count] = additive_mask(tree.parents, dtype, device)
        if count < width:
            mask[row, 0, :count, base + count :] = lowest
            mask[row, 0, count:, 0 if buffer is None else base :] = lowest
            mask[row, 0, count:, base + count :].fill_diagonal_(0.0)

    def build(rule: MaskRule) -> Tensor:
        if rule.function is None:
            return mask
        # Logical places know the padding already, so every row asks the rule as an unpadded row 0 would.
        first = torch.zeros((1, 1, 1, 1), dtype=torch.long, device=device)
        queries, keys = coordinates(trees)
        seen = rule.function(first, first, queries[:, None, :, None], keys[:, None, None, :])
        return mask.masked_fill(~seen, lowest)

    return map_rules(rules, build)


def ancestor_words(parents: Sequence[int], words: int) -> np.ndarray:
    """The ancestor closure of a parent array as bit sets, int64 ``[node, words]``: bit b of a node = it sees node b.
    That is :func:`jacobi.branch_mask` with 64 nodes to a number, so that little has to go to the device."""
    packed = b"".join(seen.to_bytes(8 * words, "little") for seen in ancestor_bits(parents))
    return np.frombuffer(packed, np.dtype("<i8")).reshape(len(parents), words)


@dataclass(frozen=True, slots=True)
class StaticPlaces:
    """What the masks of a pass with static shapes are made from: device tensors of fixed shapes.

    Attributes:
        ancestors: int64 ``[batch, node, words]``, as :func:`ancestor_words` packs them.
        slots: ``[node]``, where the nodes are written.
        depths: ``[batch, node]``.
        lengths: ``[batch]``, slots that each sequence has filled.
        padding: ``[batch]``, slots before each sequence's first token.
        shown: bool ``[batch, span]``; False where the prompt has padding or holes.
        columns: ``[span]``, and ``bits``: ``[64]``, both counting up from 0.
    """

    ancestors: Tensor
    slots: Tensor
    depths: Tensor
    lengths: Tensor
    padding: Tensor
    shown: Tensor
    columns: Tensor
    bits: Tensor


def static_masks(rules: Any, places: StaticPlaces, mask: Tensor) -> Any:
    """The masks of :func:`tree_masks` over a fixed span of slots, computed on the device without asking it anything.
    ``mask`` ``[batch, 1, node, span]`` is overwritten, and returned for layers that are only causal."""
    nodes = len(places.slots)
    lowest = torch.finfo(mask.dtype).min
    branches = ((places.ancestors[..., None] >> places.bits) & 1).flatten(2)[:, :, :nodes].bool()
    history = places.shown & (places.columns < places.lengths[:, None])
    visible = history[:, None, :].repeat(1, nodes, 1).index_copy_(2, places.slots, branches)
    mask.fill_(lowest).masked_fill_(visible[:, None], 0.0)

    def build(rule: MaskRule) -> Tensor:
        if rule.function is None:
            return mask
        first = torch.zeros((1, 1, 1, 1), dtype=torch.long, device=mask.device)
        start = places.lengths - places.padding
        queries = start[:, None] + places.depths
        keys = (places.columns - places.padding[:, None]).index_copy_(1, places.slots, queries)
        seen = rule.function(first, first, queries[:, None, :, None], keys[:, None, None, :])
        return mask.masked_fill(~seen, lowest)

    return map_rules(rules, build)
