"""Heads as plain data: what a checkpoint gives and takes."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class HeadsConfig:
    """The sizes of heads, as :class:`lookahead.medusa.MedusaHeads` takes them."""

    hidden_size: int
    vocab_size: int | None
    num_heads: int
    num_layers: int
    own_output: bool
    base_model: str | None


@dataclass(frozen=True)
class HeadTensors:
    """Heads without their module."""

    config: HeadsConfig
    state: dict[str, Tensor]  # as MedusaHeads.state_dict() gives it
    token_map: Tensor | None = None  # the tokens that own output layers score, int64 [scored]; None = all

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensors, which share it."""
        return next(iter(self.state.values())).dtype
