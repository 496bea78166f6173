"""Settings of the training of EAGLE heads."""

from dataclasses import dataclass

from jacobi import LookaheadError
from lookahead.training.settings import POSITIVE, WHOLE, TrainingSettings, setting


@dataclass(frozen=True, kw_only=True)
class EagleSettings(TrainingSettings):
    """How an EAGLE-3 head is trained; defaults are the papers' where they give them."""

    published = 5e-5, 1.0

    num_layers: int = setting(1, "Decoder layers of the head.", "--layers", range=WHOLE)
    feed_forward: int | None = setting(None, "Channels of its feed-forward network. Default: the model's.", range=WHOLE)
    draft_vocab: int | None = setting(None, "Score so many tokens, the most frequent. Default: all.", range=WHOLE)
    own_output: bool = setting(True, "Give it an output layer of its own.")
    feature_layers: tuple[int, ...] = setting(
        (), "States that it reads, as 2,12,21: what these layers read. Default: the published ones."
    )
    unroll: int = setting(7, "Steps of training-time test.", range=WHOLE)
    decay: float = setting(0.8, "Weight of a step's loss, relative to the step before it.", range=POSITIVE)

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(not isinstance(index, int) or index < 0 for index in self.feature_layers):
            raise LookaheadError(f"feature_layers={self.feature_layers}: expected layer numbers from 0 on.")

    @property
    def steps(self) -> int:
        """How often the head is fed its own outputs, and once the model's features."""
        return self.unroll
