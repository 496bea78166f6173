"""Settings of Medusa's training."""

import math
from dataclasses import dataclass
from typing import Literal

from jacobi import LookaheadError
from lookahead.training.settings import POSITIVE, SHARE, WHOLE, TrainingSettings, setting


@dataclass(frozen=True, kw_only=True)
class MedusaSettings(TrainingSettings):
    """How heads are trained, by default as the paper says. With ``distil``, medusa-2 adds the KL divergence."""

    published = 1e-3, 0.5

    method: Literal["medusa-1", "medusa-2"] = setting("medusa-1", "Train the heads alone, or the model with them.")
    num_heads: int = setting(4, "K; head k predicts k + 1 tokens ahead.", "--heads", range=WHOLE)
    num_layers: int = setting(1, "Residual blocks of each head.", "--layers")
    own_output: bool = setting(False, "Give each head an output layer of its own.")
    backbone: Literal["lora", "full"] = setting("lora", "(medusa-2) Train an adapter, or all weights.")
    schedule: Literal["two-stage", "sine"] = setting(
        "two-stage", "(medusa-2) Heads alone first, then both; or both, the heads' weight rising from 0."
    )
    backbone_learning_rate: float | None = setting(
        None, "(medusa-2) Of the model. Default: a quarter of the heads'.", "--backbone-lr", range=POSITIVE
    )
    lambda_0: float | None = setting(
        None, "(medusa-2) Weight of the heads' loss. Default: 0.2; 0.01 with distil.", "--lambda-0", range=POSITIVE
    )
    lora_rank: int = setting(32, "(medusa-2) Rank of the adapter.", range=WHOLE)
    lora_alpha: int = setting(16, "(medusa-2) Alpha of the adapter.", range=WHOLE)
    lora_dropout: float = setting(0.05, "(medusa-2) Dropout of the adapter.", range=SHARE)

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
        return self.rate(hidden_size) if stage == "heads" else self.learning_rate or 2e-3

    @property
    def backbone_rate(self) -> float:
        """The peak learning rate of the model."""
        return self.backbone_learning_rate or (self.learning_rate or 2e-3) / 4

    def heads_weight(self, done: float) -> float:
        """lambda_0 after a share ``done`` of the stage with both; with ``"sine"``, a quarter of a sine, from 0 up."""
        lambda_0 = self.lambda_0 or (0.01 if self.distil else 0.2)
        return lambda_0 * math.sin(math.pi / 2 * done) if self.schedule == "sine" else lambda_0
