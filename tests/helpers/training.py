"""Small models, texts and heads to train."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from helpers import medusa
from helpers.models import VOCAB, fresh_model
from torch import Tensor, nn
from transformers import TrainerCallback

from lookahead.heads.medusa.settings import MedusaSettings
from lookahead.medusa import MedusaHeads
from lookahead.training.data import Example, collate

SETTINGS = MedusaSettings(num_heads=2, block_size=12, batch_size=2, epochs=1.0, min_steps=0)
LORA = dataclasses.replace(SETTINGS, method="medusa-2", schedule="sine", lora_rank=2, lora_dropout=0.3)


def small_model(**changes: Any) -> Any:
    return fresh_model("llama", num_hidden_layers=1, **changes).float()


def texts(count: int = 8, length: int = 12, seed: int = 0) -> list[Example]:
    """Random tokens, a few of them without loss."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCAB, (count, length), generator=generator).tolist()
    flags = (torch.rand(count, length, generator=generator) < 0.8).tolist()
    return [Example.of(row, loss) for row, loss in zip(ids, flags, strict=True)]


def batch(examples: Sequence[Example] | None = None) -> dict[str, Tensor]:
    short = Example.of([3, 4, 5])
    return collate([*texts(2), short] if examples is None else examples, pad=0)


def drawn(model: Any, **settings: Any) -> MedusaHeads:
    """Heads with random weights."""
    return medusa.drawn(MedusaHeads.for_model(model, 2, 2, **settings))


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def changed(before: dict[str, Tensor], after: nn.Module) -> set[str]:
    """The weights that are not what they were, bit for bit."""
    return {name for name, value in after.state_dict().items() if not torch.equal(value, before[name])}


class StopAt(TrainerCallback):
    """As if the process were ended after the checkpoint of one step of one stage."""

    def __init__(self, stage: str, step: int) -> None:
        self.stage = stage
        self.step = step

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if Path(args.output_dir).name == self.stage and state.global_step == self.step:
            raise KeyboardInterrupt
