"""Models that count cache slots by themselves: ALiBi's biases, GPT-Neo's windows, Llama 4's scales.

ALiBi puts a bias on every key that grows with the key's position (Press et al., "Train Short, Test Long", section 3),
and transformers' builders count cache slots. For a pass of ours each is asked for the biases of a plain text, of which
each slot reads the line of its own logical position (:class:`.PassPositions`): slopes and roundings stay the model's.
"""

from typing import Any

import torch
from torch import Tensor

from lookahead.models.families.overrides import PassPositions, current_positions, in_passes


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


@in_passes
def alibi_by_tokens(_: Any, original: Any, positions: PassPositions, mask: Tensor, heads: int, dtype: Any) -> Tensor:
    """For builders that count the tokens of an attention mask (BLOOM, Falcon)."""
    text = torch.ones((1, positions.high + 1), dtype=positions.mask_dtype, device=positions.counted.device)
    lines: Tensor = original(text, heads, dtype).reshape(heads, -1)
    return lines[:, positions.counted].transpose(0, 1).reshape(-1, 1, positions.counted.shape[1])


@in_passes
def alibi_by_slots(
    _: Any, original: Any, positions: PassPositions, heads: int, slots: int, *args: Any, **kw: Any
) -> Any:
    """For builders that are told a number of slots (MPT)."""
    lines = original(heads, positions.high + 1, *args, **kw).reshape(heads, -1)
    return _BiasOfEachSequence(lines[:, positions.slots].transpose(0, 1)[:, :, None])


class WindowTable:
    """GPT-Neo's table of what a query may see: sliced by slots outside of a pass, made from positions inside."""

    def __init__(self, module: Any, table: Tensor) -> None:
        self._table = table
        self._window: int | None = module.config.window_size if module.attention_type == "local" else None

    def __getitem__(self, index: Any) -> Tensor:
        positions: PassPositions | None = current_positions()
        if positions is None:
            return self._table[index]
        if self._window is None:
            return torch.ones((1, 1, 1, 1), dtype=torch.bool, device=positions.slots.device)
        return (positions.nodes[:, None, :, None] - positions.slots[:, None, None, :]) < self._window


class ScaleFactor:
    """``attn_scale`` of Llama 4's layers without RoPE: a number; in a pass what it multiplies comes from positions."""

    def __init__(self, module: Any, factor: float) -> None:
        self._module = module
        self._factor = factor

    def __rmul__(self, logarithms: Tensor) -> Any:
        positions: PassPositions | None = current_positions()
        if positions is None:
            return logarithms * self._factor
        steps = torch.floor((positions.nodes.to(logarithms.device).float() + 1.0) / self._module.floor_scale)
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
