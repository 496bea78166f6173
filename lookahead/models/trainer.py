"""transformers' Trainer, where more of it is needed than its documented methods."""

from pathlib import Path
from typing import Any

from transformers import Trainer, TrainingArguments

from jacobi import LookaheadError
from lookahead.models.compat import PRIVATES, SUPPORTED, TRAINER, private_error

_WEIGHTS = "trainable.safetensors"


class OwnCheckpoints(Trainer):
    """A trainer that lets its subclass say which weights a checkpoint holds."""

    def write_weights(self, file: Path) -> None:
        """Write what :meth:`read_weights` reads."""
        raise NotImplementedError

    def read_weights(self, file: Path) -> None:
        """Put the weights of a file in place."""
        raise NotImplementedError

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
