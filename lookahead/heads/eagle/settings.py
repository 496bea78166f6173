"""Settings of the training of EAGLE heads."""

from dataclasses import dataclass
from typing import Literal

from jacobi import LookaheadError
from lookahead.training.settings import NATURAL, POSITIVE, WHOLE, TrainingSettings, setting


@dataclass(frozen=True, kw_only=True)
class EagleSettings(TrainingSettings):
    """How a head is trained; defaults are the papers' where they give them."""

    published = 5e-5, 1.0

    version: Literal["eagle-3", "eagle-1"] = setting(
        "eagle-3", "eagle-3 with training-time test; or eagle-1, whose heads serve EAGLE-2, too."
    )
    num_layers: int = setting(1, "Decoder layers of the head.", "--layers", range=WHOLE)
    feed_forward: int | None = setting(None, "Channels of its feed-forward network. Default: the model's.", range=WHOLE)
    draft_vocab: int | None = setting(None, "(eagle-3) Score so many tokens, the most frequent. Default: all.")
    own_output: bool = setting(True, "(eagle-3) Give it an output layer of its own.")
    feature_layers: tuple[int, ...] = setting(
        (), "(eagle-3) States that it reads, as 2,12,21: what these layers read. Default: the published ones."
    )
    unroll: int = setting(7, "(eagle-3) Steps of training-time test.", range=WHOLE)
    decay: float = setting(0.8, "(eagle-3) Weight of a step's loss, relative to the step before it.", range=POSITIVE)
    noise: float = setting(0.2, "(eagle-1) Width of the uniform noise on features of 512 tokens.", range=NATURAL)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draft_vocab is not None and (not self.own_output or self.draft_vocab < 1):
            told = "expected 1 or more, and own_output=True; the model's output layer scores all tokens."
            raise LookaheadError(f"draft_vocab={self.draft_vocab}: {told}")
        if any(not isinstance(index, int) or index < 0 for index in self.feature_layers):
            raise LookaheadError(f"feature_layers={self.feature_layers}: expected layer numbers from 0 on.")

    @property
    def steps(self) -> int:
        """How often the head is fed its own outputs, and once the model's features."""
        return self.unroll if self.version == "eagle-3" else 1
