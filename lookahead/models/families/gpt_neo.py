"""GPT-Neo's local attention: windows that are cut out of a table by cache slots."""

from typing import Any

import torch
from torch import Tensor

from lookahead.models.families.overrides import current_positions
from lookahead.models.families.positions import SlotPositions


class WindowTable:
    """The table of what a query may see: sliced by slots outside of a pass, made from positions inside."""

    def __init__(self, module: Any, table: Tensor) -> None:
        self._table = table
        self._window: int | None = module.config.window_size if module.attention_type == "local" else None

    def __getitem__(self, index: Any) -> Tensor:
        positions: SlotPositions | None = current_positions()
        if positions is None:
            return self._table[index]
        if self._window is None:
            return torch.ones((1, 1, 1, 1), dtype=torch.bool, device=positions.slots.device)
        return (positions.nodes[:, None, :, None] - positions.slots[:, None, None, :]) < self._window
