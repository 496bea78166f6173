"""How ReDrafter's heads are trained: the settings."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from jacobi import LookaheadError
from lookahead.training.settings import TrainingSettings

_PUBLISHED_SIZE, _PUBLISHED_RATE = 4096, 1e-3  # hidden size of the model that the published rate was for


@dataclass(frozen=True, kw_only=True)
class ReDrafterSettings(TrainingSettings):
    """How a head is trained; defaults are Apple's where they give them."""

    whole: ClassVar[tuple[str, ...]] = (*TrainingSettings.whole, "unroll")

    num_layers: int = 2  # residual blocks before the output layer
    exit_size: int | None = None  # channels of these; None is twice the model's hidden size
    rnn: bool = True  # a recurrent network's state, or a sum of embeddings
    unroll: int = 5  # tokens that it learns to draft one after the other
    targets: Literal["tokens", "model"] = "tokens"  # the tokens that came, or the model's own distribution there

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_layers < 0:
            raise LookaheadError(f"num_layers={self.num_layers}: expected 0 or more.")
        if self.exit_size is not None and self.exit_size < 1:
            raise LookaheadError(f"exit_size={self.exit_size}: expected an integer from 1 on.")

    @property
    def steps(self) -> int:
        return self.unroll

    def rate(self, hidden_size: int) -> float:
        """The peak: the published 1e-3 for 4,096 channels, and times the square root for smaller models."""
        return self.learning_rate or _PUBLISHED_RATE * math.sqrt(_PUBLISHED_SIZE / hidden_size)
