"""transformers' Trainer, where more of it is needed than its documented methods."""

import os
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Trainer, TrainingArguments

from jacobi import LookaheadError
from lookahead.models.compat import PRIVATES, SUPPORTED, TRAINER, private_error

_WEIGHTS = "trainable.safetensors"


class OwnCheckpoints(Trainer):
    """A trainer whose checkpoints hold the weights that are trained, and no others."""

    def _trainable(self) -> dict[str, Tensor]:
        return {name: weight.detach() for name, weight in self.model.named_parameters() if weight.requires_grad}

    def write_weights(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        save_file({name: weight.contiguous() for name, weight in self._trainable().items()}, part)
        os.replace(part, file)

    def read_weights(self, file: Path) -> None:
        stored, ours = load_file(file), self._trainable()
        if {name: w.shape for name, w in stored.items()} != {name: w.shape for name, w in ours.items()}:
            raise LookaheadError(f"{file} holds other weights than are trained: expected those of the same settings.")
        for name, weight in ours.items():
            weight.copy_(stored[name])

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if self.args.should_save:
            self.write_weights(Path(output_dir or self.args.output_dir) / _WEIGHTS)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self.read_weights(Path(resume_from_checkpoint) / _WEIGHTS)


def check_trainer() -> None:
    """Raise a LookaheadError if transformers' Trainer does not save and load as :class:`OwnCheckpoints` expects."""
    for private in PRIVATES:
        if private.home == TRAINER and (error := private_error(private)) is not None:
            raise LookaheadError(
                f"This transformers has {error}: training expects {SUPPORTED['transformers']}. Install one."
            )


def use_one_gpu(args: TrainingArguments) -> None:
    """Let one process train on one GPU; for several GPUs, torchrun starts a process each."""
    args._n_gpu = min(1, args.n_gpu)  # what the documented property n_gpu gives
