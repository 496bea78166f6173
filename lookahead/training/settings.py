"""Settings of a training that all drafters share. Each says what it is, to readers and on the command line."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, get_args, get_origin

from jacobi import LookaheadError

_PUBLISHED_SIZE = 4096  # hidden size of the models that the published learning rates were for


Range = tuple[str, Callable[[Any], bool]]  # of values that are not None: in words, and whether one is in it

WHOLE: Range = "an integer from 1 on", lambda value: isinstance(value, int) and value >= 1
NATURAL: Range = "0 or more", lambda value: 0 <= value < math.inf
POSITIVE: Range = "a number above 0", lambda value: 0.0 < value < math.inf
SHARE: Range = "at least 0 and below 1", lambda value: 0.0 <= value < 1.0


def setting(default: Any, help: str = "", *names: str, range: Range | None = None) -> Any:
    """A field of settings that says what it is, and so is an option of the command line: of the field's name, unless
    others are given. A value out of its ``range`` is refused."""
    return field(default=default, metadata={"help": help, "names": names, "range": range})


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """How a drafter is trained. A LookaheadError says what does not fit.

    Attributes:
        published: a learning rate, for 4,096 channels, and by which power of their share it grows for fewer.
    """

    published: ClassVar[tuple[float, float]]

    distil: bool = setting(
        False, "Learn from the model's own answers to the prompts.", "--self-distill/--no-self-distill"
    )
    answer_tokens: int = setting(256, "(self-distill) Most tokens of an answer.", range=WHOLE)
    temperature: float | None = setting(None, "(self-distill) Sample. Default: greedy.", range=POSITIVE)
    learning_rate: float | None = setting(
        None, "Of the head. Default: as published, by the model's size.", "--lr", range=POSITIVE
    )
    epochs: float = setting(2.0, "Passes over the data, in each stage.", range=POSITIVE)
    min_steps: int = setting(1000, "More passes where those would be fewer steps than this.", range=NATURAL)
    # Of the whole training, None is no limit; learning rates then follow the clock.
    max_minutes: float | None = setting(None, range=POSITIVE)
    batch_size: int = setting(2, "Examples in a step, on each device.", range=WHOLE)
    accumulate: int = setting(1, "Batches in a step.", range=WHOLE)
    block_size: int = setting(512, "Most tokens of an example.", range=WHOLE)
    warmup: float = setting(0.03, range=SHARE)  # of the steps, in which learning rates rise
    precision: Literal["none", "bf16", "fp16"] = setting("none", "Automatic mixed precision.", "--mixed-precision")
    seed: int = setting(0, "Of the order of the data, and of fresh weights.")
    save_steps: int = setting(200, "Steps between two checkpoints.", range=WHOLE)
    report_to: str = setting("none", "A logger, for example tensorboard or wandb.")

    def __post_init__(self) -> None:
        for each in fields(self):
            value, known, range = getattr(self, each.name), get_args(each.type), each.metadata.get("range")
            if get_origin(each.type) is Literal and value not in known:
                raise LookaheadError(f"{each.name}={value!r}: expected one of {', '.join(known)}.")
            if range is not None and value is not None and not range[1](value):
                raise LookaheadError(f"{each.name}={value!r}: expected {range[0]}.")
        if self.block_size < self.least:
            told = f"expected at least {self.least}, so that {self.last} has a token to predict."
            raise LookaheadError(f"block_size={self.block_size}: {told}")

    def rate(self, hidden_size: int) -> float:
        """The peak of the head's learning rate: as published, by the model's size."""
        rate, power = self.published
        return self.learning_rate or rate * (_PUBLISHED_SIZE / hidden_size) ** power

    @property
    def steps(self) -> int:
        """How many tokens are learnt to be predicted, one after the other."""
        return 1

    @property
    def least(self) -> int:
        """Tokens that an example needs, so that everything that is trained has one to predict."""
        return self.steps + 2

    @property
    def last(self) -> str:
        """What predicts the last of them, for messages."""
        return f"step {self.steps - 1}"
