"""ALiBi: a bias on every key that grows with the key's position (Press et al., "Train Short, Test Long", section 3).

transformers' builders count cache slots. For a pass of ours each is asked for the biases of a plain text, of which
every slot reads the line of its own logical position. So slopes, offsets and roundings stay the model's::

    slot         0  1  2  3  4        a root (2) with two children (3, 4)
    position     0  1  2  3  3
    bias of      0  1  2  3  3        and not 0 1 2 3 4
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lookahead.models.families.overrides import current_positions
from lookahead.models.families.positions import SlotPositions


class _BiasOfEachSequence:
    """ALiBi biases with a line for each sequence, where MPT's attention expects one for all: it only adds them."""

    def __init__(self, bias: Tensor) -> None:
        self._bias = bias  # [batch, head, 1, slot]

    @property
    def shape(self) -> torch.Size:
        return self._bias.shape[1:]

    def size(self, axis: int) -> int:
        return self.shape[axis]

    def __getitem__(self, _: Any) -> "_BiasOfEachSequence":
        return self  # already as long as the keys

    def __radd__(self, scores: Tensor) -> Tensor:
        return scores + self._bias


def by_tokens(_: Any, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """For builders that count the tokens of an attention mask (BLOOM, Falcon)."""

    def build_alibi_tensor(attention_mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
        positions: SlotPositions | None = current_positions()
        if positions is None:
            return original(attention_mask, num_heads, dtype)
        text = torch.ones((1, positions.high + 1), dtype=positions.mask_dtype, device=positions.tokens.device)
        lines = original(text, num_heads, dtype).reshape(num_heads, -1)
        return lines[:, positions.tokens].transpose(0, 1).reshape(-1, 1, positions.tokens.shape[1])

    return build_alibi_tensor


def by_slots(_: Any, original: Callable[..., Tensor]) -> Callable[..., Any]:
    """For builders that are told a number of slots (MPT)."""

    def build_mpt_alibi_tensor(num_heads: int, sequence_length: int, *args: Any, **kwargs: Any) -> Any:
        positions: SlotPositions | None = current_positions()
        if positions is None:
            return original(num_heads, sequence_length, *args, **kwargs)
        lines = original(num_heads, positions.high + 1, *args, **kwargs).reshape(num_heads, -1)
        return _BiasOfEachSequence(lines[:, positions.slots.clamp(min=0)].transpose(0, 1)[:, :, None])

    return build_mpt_alibi_tensor
