"""Settings of the training of ReDrafter's heads."""

from dataclasses import dataclass
from typing import Literal

from lookahead.training.settings import NATURAL, WHOLE, TrainingSettings, setting


@dataclass(frozen=True, kw_only=True)
class ReDrafterSettings(TrainingSettings):
    """How a head is trained; defaults are Apple's where they give them."""

    published = 1e-3, 0.5

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
