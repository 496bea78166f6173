"""Attention masks for a tree forward, in the form each model asks for.

What a node may see has two parts. The tree part (text so far, ancestors, itself) is the same for every model:
:func:`jacobi.branch_mask`, as attention adds it, 0 where visible and else the lowest finite number. The other part
belongs to the model's layers: causal, sliding, chunked. transformers states it as a function of two indices; we ask
that about *logical* positions (the sequence's length plus depth) instead of physical slots.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jacobi import TokenTree, ancestor_bits
from lookahead.models.mask_rules import UNMASKED, MaskRule

ALIGNED = 64  # columns: some kernels copy masks whose rows are not aligned, once a layer


def map_rules(rules: Any, build: Callable[[MaskRule], Tensor]) -> Any:
    """Build one mask for each rule, keeping the form; equal layer types share a mask, and recurrent ones have none."""
    if not isinstance(rules, dict):
        return build(rules)
    plain = build(None) if None in rules.values() else None
    masks = {kind: plain if rule is None else build(rule) for kind, rule in rules.items()}
    return masks | dict.fromkeys(UNMASKED & rules.keys())


class MaskBuffer:
    """One piece of memory for the masks of consecutive passes, each of which rewrites only columns that have changed.
    NumPy writes it on the host, because its calls cost a fraction of torch's; other devices are sent those columns."""

    def __init__(self, batch: int, dtype: torch.dtype, device: torch.device) -> None:
        self.first = 0  # slot at which the masks of sliding windows begin
        self._batch, self._dtype, self._device = batch, dtype, device
        self._whole_numbers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]  # bfloat16, for NumPy
        lowest = torch.tensor([torch.finfo(dtype).min], dtype=dtype, device="cpu")
        self._hidden = lowest.view(self._whole_numbers).numpy()[0]
        self._allocate(0, 0)

    def _allocate(self, nodes: int, slots: int) -> None:
        with torch.inference_mode(False):  # a later pass may write into it outside of that mode
            self._host = torch.zeros((self._batch, 1, nodes, slots), dtype=self._dtype, device="cpu")
            self._mask = self._host.to(self._device)
        self._bits: np.ndarray = self._host[:, 0].view(self._whole_numbers).numpy()
        self._settled = 0  # columns that need not be written again

    def write(self, trees: Sequence[TokenTree], base: int, history: np.ndarray | None, settled: int) -> Tensor:
        """The mask ``[batch, 1, width, base + width]`` of ``trees``. Below ``base`` it shows what ``history`` (bool
        ``[batch, base]``; None = everything) shows. Columns before ``settled``, the shortest length, stay as is."""
        width, (_, nodes, slots) = max(map(len, trees)), self._bits.shape
        stop = base + width
        if width > nodes or stop > slots:
            wanted = max(stop + 256, min(2 * slots, stop + 4096))
            self._allocate(max(width, nodes), -(-wanted // ALIGNED) * ALIGNED)
        start = min(self._settled, base)
        self._settled = min(settled, base)
        columns = self._bits[:, :, start:base]  # for wider passes too
        columns[...] = 0 if history is None else ~history[:, None, start:] * self._hidden
        for square, tree in zip(self._bits[:, :width, base:stop], trees, strict=True):
            for node, parent in enumerate(tree.parents + [-1] * (width - len(tree))):
                square[node] = square[parent] if parent >= 0 else self._hidden  # a node sees what its parent sees
                square[node, node] = 0
        if self._mask is not self._host:
            self._mask[..., start:stop] = self._host[..., start:stop]
        return self._mask.as_strided((self._batch, 1, width, stop), self._mask.stride())


def tree_masks(
    rules: Any,
    trees: Sequence[TokenTree],
    base: int,
    history: np.ndarray | None,
    coordinates: Callable[[Sequence[TokenTree]], tuple[Tensor, Tensor]],
    buffer: MaskBuffer,
    settled: int = 0,
    window: int | None = None,
) -> Any:
    """The additive masks ``[batch, 1, node, slot]`` of a pass, one for each kind of layer.

    Args:
        trees: one for each sequence; shorter ones are padded at the end with nodes that see the text and themselves.
        base, history, settled: see :meth:`MaskBuffer.write`.
        coordinates: gives the logical positions of nodes ``[batch, node]`` and of slots ``[batch, base + node]``; only
            called if a rule asks for more than causality.
        window: texts of up to so many tokens are seen whole, whatever the rules; None = it is not known.
    """
    mask = buffer.write(trees, base, history, settled)
    device, lowest = mask.device, torch.finfo(mask.dtype).min

    def build(rule: MaskRule) -> Tensor:
        if rule is None:
            return mask
        if window is not None and mask.shape[-1] <= window:
            return mask.view_as(mask)  # a tracer tells masks apart by the object
        # Logical places know the padding already, so every row asks the rule as an unpadded row 0 would.
        zero = torch.zeros((1, 1, 1, 1), dtype=torch.long, device=device)
        queries, keys = coordinates(trees)
        seen = rule(zero, zero, queries[:, None, :, None], keys[:, None, None, buffer.first :])
        return mask[..., buffer.first :].masked_fill(~seen, lowest)

    return map_rules(rules, build)


def ancestor_words(parents: Sequence[int], words: int) -> np.ndarray:
    """The ancestor closure of a parent array as bit sets, int64 ``[node, words]``: bit b of a node = it sees node b.
    That is :func:`jacobi.branch_mask` with 64 nodes to a number, so that little has to go to the device."""
    packed = b"".join(seen.to_bytes(8 * words, "little") for seen in ancestor_bits(parents))
    return np.frombuffer(packed, np.dtype("<i8")).reshape(len(parents), words)
