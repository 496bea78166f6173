"""What a pass tells modules that count positions by themselves: where its nodes and slots lie."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SlotPositions:
    """Logical positions for modules that count cache slots.

    ::

        slot       0  1  2  3  4  5      0 is padding, 1-2 the text, 3-5 a root with two children
        slots     -1  0  1  2  3  3      siblings lie in different slots at the same position

    Attributes:
        nodes: ``[batch, node]``, counted in slots from the sequence's first token.
        slots: ``[batch, slot]``, the same for all slots that the pass reads, the nodes' own last.
        tokens: ``[batch, slot]``, counted in tokens that are not masked.
        high: at least the largest position.
        mask_dtype: of the mask that the prompt was given.
    """

    nodes: Tensor
    slots: Tensor
    tokens: Tensor
    high: int
    mask_dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class DecoderPositions:
    """Logical positions for decoders that number tokens from the cache's length on.

    Attributes:
        tokens: ``[batch, node]`` token ids.
        nodes: ``[batch, node]`` positions.
        slots: ``[batch, slot]`` positions of all slots that the pass reads, the nodes' own last.
        low: the smallest position of a node.
        high: the largest.
    """

    tokens: Tensor
    nodes: Tensor
    slots: Tensor
    low: int
    high: int
