"""How drafters are trained: the settings that all of them share."""

import math
from dataclasses import dataclass, fields
from typing import ClassVar, Literal, get_args, get_origin

from jacobi import LookaheadError


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """How a drafter is trained. A LookaheadError says what does not fit.

    A subclass names its own numbers in ``whole`` (integers from 1 on), ``positive`` and ``shares`` (from 0, below 1).
    """

    whole: ClassVar[tuple[str, ...]] = ("batch_size", "accumulate", "save_steps", "answer_tokens")
    positive: ClassVar[tuple[str, ...]] = ("learning_rate", "epochs", "max_minutes", "temperature")
    shares: ClassVar[tuple[str, ...]] = ("warmup",)

    distil: bool = False  # learn from the model's own answers
    answer_tokens: int = 256  # (distil) most tokens of an answer
    temperature: float | None = None  # (distil) of sampled answers; None is greedy
    learning_rate: float | None = None  # peak, of the drafter; None is what suits the model
    epochs: float = 2.0  # passes over the data in each stage; more, if that is needed for min_steps
    min_steps: int = 1000  # of a stage
    max_minutes: float | None = None  # of the whole training, None is no limit; learning rates then follow the clock
    batch_size: int = 2  # examples of a step on each device
    accumulate: int = 1  # batches whose gradients add up to one step
    block_size: int = 512  # most tokens of an example
    warmup: float = 0.03  # share of the steps in which learning rates rise
    precision: Literal["none", "bf16", "fp16"] = "none"  # mixed precision; none computes in the dtypes of the weights
    seed: int = 0  # of the order of the examples and of fresh weights
    save_steps: int = 200  # steps between two checkpoints
    report_to: str = "none"  # a logger that transformers knows, for example "tensorboard"

    def __post_init__(self) -> None:
        for field in fields(self):
            value, known = getattr(self, field.name), get_args(field.type)
            if get_origin(field.type) is Literal and value not in known:
                raise LookaheadError(f"{field.name}={value!r}: expected one of {', '.join(known)}.")
        for name in self.whole:
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise LookaheadError(f"{name}={getattr(self, name)!r}: expected an integer from 1 on.")
        if self.min_steps < 0:
            raise LookaheadError(f"min_steps={self.min_steps}: expected 0 or more.")
        if self.block_size < self.least:
            raise LookaheadError(
                f"block_size={self.block_size}: expected at least {self.least}, so that {self.last} has a token to "
                "predict."
            )
        for name in self.positive:
            value = getattr(self, name)
            if value is not None and not 0.0 < value < math.inf:
                raise LookaheadError(f"{name}={value!r}: expected a number above 0.")
        for name in self.shares:
            if not 0.0 <= getattr(self, name) < 1.0:
                raise LookaheadError(f"{name}={getattr(self, name)!r}: expected at least 0 and below 1.")

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
