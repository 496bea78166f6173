"""Settings of the training of ReDrafter's heads."""

import math
from dataclasses import dataclass
from typing import Literal

from lookahead.training.settings import NATURAL, PUBLISHED_SIZE, WHOLE, TrainingSettings, setting

_RATE = 1e-3  # published, and for 4,096 channels


@dataclass(frozen=True, kw_only=True)
class ReDrafterSettings(TrainingSettings):
    """How a head is trained; defaults are Apple's where they give them."""

    num_layers: int = setting(2, "Residual blocks before the output layer.", "--layers", range=NATURAL)
    exit_size: int | None = setting(None, "Channels of these. Default: twice the model's hidden size.", range=WHOLE)
    rnn: bool = setting(True, "A recurrent network's state, or a sum of embeddings.")
    unroll: int = setting(5, "Tokens that it learns to draft one after the other.", range=WHOLE)
    targets: Literal["tokens", "model"] = setting(
        "tokens", "Learn the tokens that came, or the model's own distribution there."
    )

    @property
    def steps(self) -> int:
        return self.unroll

    def rate(self, hidden_size: int) -> float:
        """The peak: the published one, and times the square root for smaller models."""
        return self.learning_rate or _RATE * math.sqrt(PUBLISHED_SIZE / hidden_size)
