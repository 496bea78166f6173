"""How Medusa's heads are trained: the settings, and what they mean for each stage."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from jacobi import LookaheadError
from lookahead.training.settings import TrainingSettings

_PUBLISHED_SIZE = 4096  # hidden size of the models that the published rates were for


@dataclass(frozen=True, kw_only=True)
class MedusaSettings(TrainingSettings):
    """How heads are trained; defaults are the paper's where it gives them. With ``distil``, medusa-2 adds the KL
    divergence from the model's outputs."""

    whole: ClassVar[tuple[str, ...]] = (*TrainingSettings.whole, "num_heads", "lora_rank", "lora_alpha")
    positive: ClassVar[tuple[str, ...]] = (*TrainingSettings.positive, "backbone_learning_rate", "lambda_0")
    shares: ClassVar[tuple[str, ...]] = (*TrainingSettings.shares, "lora_dropout")

    method: Literal["medusa-1", "medusa-2"] = "medusa-1"  # the heads alone, or the model with them
    num_heads: int = 4  # K
    num_layers: int = 1  # residual blocks of a head
    own_output: bool = False  # give each head an output layer of its own
    backbone: Literal["lora", "full"] = "lora"  # (medusa-2) train an adapter on all linear layers, or all weights
    schedule: Literal["two-stage", "sine"] = "two-stage"  # (medusa-2) heads alone first, or their weight rises from 0
    backbone_learning_rate: float | None = None  # (medusa-2) peak, of the model; None is a quarter of the heads'
    lambda_0: float | None = None  # (medusa-2) weight of the heads' loss; None is 0.2, or 0.01 with distil
    lora_rank: int = 32  # (medusa-2) of the adapter, as are the next two
    lora_alpha: int = 16
    lora_dropout: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_layers < (0 if self.own_output else 1):
            raise LookaheadError(f"num_layers={self.num_layers}: expected at least 1, or 0 with own_output.")
        if self.distil and self.method == "medusa-2" and self.backbone == "full":
            raise LookaheadError(
                "distil=True with method='medusa-2' compares the model with itself without the adapter, and "
                "backbone='full' has none: use backbone='lora'."
            )

    @property
    def last(self) -> str:
        return f"the last of {self.num_heads} heads"

    @property
    def steps(self) -> int:
        return self.num_heads

    @property
    def stages(self) -> tuple[str, ...]:
        """``"heads"`` trains the heads alone, ``"both"`` the model with them."""
        if self.method == "medusa-1":
            return ("heads",)
        return ("heads", "both") if self.schedule == "two-stage" else ("both",)

    def heads_rate(self, stage: str, hidden_size: int) -> float:
        """The heads' peak: by default 2e-3 with the model; alone, 1e-3 (published) times sqrt(4096 / hidden_size)."""
        published = 1e-3 * math.sqrt(_PUBLISHED_SIZE / hidden_size) if stage == "heads" else 2e-3
        return self.learning_rate or published

    @property
    def backbone_rate(self) -> float:
        """The peak learning rate of the model."""
        return self.backbone_learning_rate or (self.learning_rate or 2e-3) / 4

    def heads_weight(self, done: float) -> float:
        """lambda_0 after a share ``done`` of the stage with both; with ``"sine"``, a quarter of a sine, from 0 up."""
        lambda_0 = self.lambda_0 or (0.01 if self.distil else 0.2)
        return lambda_0 * math.sin(math.pi / 2 * done) if self.schedule == "sine" else lambda_0
