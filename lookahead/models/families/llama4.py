"""Llama 4's layers without RoPE: queries are scaled by how far the text has come, counted in cache slots."""

from typing import Any

import torch
from torch import Tensor

from lookahead.models.families.overrides import current_positions
from lookahead.models.families.positions import SlotPositions


class ScaleFactor:
    """``attn_scale``: a number outside of a pass; inside, what it is multiplied with is made from positions."""

    def __init__(self, module: Any, factor: float) -> None:
        self._module = module
        self._factor = factor

    def __rmul__(self, logarithms: Tensor) -> Any:
        positions: SlotPositions | None = current_positions()
        if positions is None:
            return logarithms * self._factor
        # The slots that plain decoding would use, padding included.
        numbers = positions.nodes - positions.slots[:, :1]
        steps = torch.floor((numbers.to(logarithms.device).float() + 1.0) / self._module.floor_scale)
        return _QueryScales(torch.log1p(steps) * self._factor)


class _QueryScales:
    """A scale for each node of each sequence, where the layer expects one sequence's."""

    def __init__(self, scales: Tensor) -> None:
        self._scales = scales  # [batch, node]

    def __add__(self, other: float) -> "_QueryScales":
        return _QueryScales(self._scales + other)

    def view(self, *_: Any) -> "_QueryScales":
        return self

    def expand(self, *_: Any) -> Tensor:
        return self._scales[:, :, None, None]
