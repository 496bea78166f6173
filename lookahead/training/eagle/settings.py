"""How EAGLE heads are trained: the settings."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from jacobi import LookaheadError
from lookahead.training.settings import TrainingSettings

_PUBLISHED_SIZE, _PUBLISHED_RATE = 4096, 5e-5  # hidden size of the models that the published rate was for


@dataclass(frozen=True, kw_only=True)
class EagleSettings(TrainingSettings):
    """How a head is trained; defaults are the papers' where they give them."""

    whole: ClassVar[tuple[str, ...]] = (*TrainingSettings.whole, "num_layers", "unroll")
    positive: ClassVar[tuple[str, ...]] = (*TrainingSettings.positive, "decay")

    version: Literal["eagle-3", "eagle-1"] = "eagle-3"  # the latter's heads serve EAGLE-2 as well
    num_layers: int = 1
    feed_forward: int | None = None  # channels of the head's feed-forward network; None is the model's
    draft_vocab: int | None = None  # (eagle-3) tokens that it scores, the most frequent ones; None is all of them
    own_output: bool = True  # (eagle-3) give it an output layer of its own; False needs draft_vocab=None
    feature_layers: tuple[int, ...] = ()  # (eagle-3) see EagleHead; empty is the usual ones
    unroll: int = 7  # (eagle-3) steps of training-time test
    decay: float = 0.8  # (eagle-3) weight of a step's loss, relative to the step before it
    noise: float = 0.2  # (eagle-1) width of the uniform noise on features of 512 tokens

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draft_vocab is not None and (not self.own_output or self.draft_vocab < 1):
            raise LookaheadError(
                f"draft_vocab={self.draft_vocab}: expected 1 or more, and own_output=True; the model's output layer "
                "scores all tokens."
            )
        if self.feed_forward is not None and self.feed_forward < 1:
            raise LookaheadError(f"feed_forward={self.feed_forward}: expected an integer from 1 on.")
        if not 0.0 <= self.noise < math.inf:
            raise LookaheadError(f"noise={self.noise}: expected 0 or more.")
        if any(not isinstance(index, int) or index < 0 for index in self.feature_layers):
            raise LookaheadError(f"feature_layers={self.feature_layers}: expected layer numbers from 0 on.")

    @property
    def steps(self) -> int:
        """How often the head is fed its own outputs, and once the model's features."""
        return self.unroll if self.version == "eagle-3" else 1

    def rate(self, hidden_size: int) -> float:
        """The peak: the published 5e-5 for 4,096 channels, and in inverse proportion for others."""
        return self.learning_rate or _PUBLISHED_RATE * _PUBLISHED_SIZE / hidden_size
