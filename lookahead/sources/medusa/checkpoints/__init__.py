"""Checkpoints: Medusa heads in every published format, read and written as plain tensors, without their module."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class HeadsConfig:
    hidden_size: int
    vocab_size: int | None
    num_heads: int
    num_layers: int
    own_output: bool
    base_model: str | None


@dataclass(frozen=True)
class HeadTensors:
    """Heads without their module: what a checkpoint gives and takes."""

    config: HeadsConfig
    state: dict[str, Tensor]  # as MedusaHeads.state_dict() gives it; all of one dtype
    token_map: Tensor | None = None  # the tokens that own output layers score, int64 [scored]; None = all
