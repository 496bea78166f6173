"""Settings of the training of block drafters."""

from dataclasses import dataclass
from typing import Literal

from lookahead.training.settings import POSITIVE, WHOLE, TrainingSettings, setting


@dataclass(frozen=True, kw_only=True)
class BlockSettings(TrainingSettings):
    """How a drafter is trained; defaults are DeepSpec's where they suit small models."""

    published = 6e-4, 0.5

    num_layers: int = setting(2, "Layers of the drafter.", "--layers", range=WHOLE)
    feed_forward: int | None = setting(None, "Channels of its feed-forward network. Default: the model's.", range=WHOLE)
    places: int = setting(8, "Tokens that a block drafts.", range=WHOLE)
    markov: Literal["vanilla", "gated", "rnn", "none"] = setting("vanilla", "How scores hear of the token before.")
    rank: int = setting(64, "Channels of that.", range=WHOLE)
    draft_vocab: int | None = setting(None, "Score so many tokens, the most frequent. Default: all.", range=WHOLE)
    feature_layers: tuple[int, ...] = setting((), "States that it reads, as 6,15,27. Default: three.")
    mask_token: int | None = setting(None, "The token of places to be filled. Default: one that no text has.")
    anchors: int = setting(32, "Blocks of a text that are learnt from in a step.", range=WHOLE)
    fade: float = setting(4.0, "Places until a place's loss weighs 1/e.", range=POSITIVE)

    @property
    def steps(self) -> int:
        return self.places
