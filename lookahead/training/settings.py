"""How Medusa's heads are trained: the settings, and what they mean for each stage."""

import math
from dataclasses import dataclass, fields
from typing import Literal, get_args, get_origin

from jacobi import LookaheadError

_PUBLISHED_SIZE = 4096  # hidden size of the models that the published rates were for


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """How heads are trained; defaults are the paper's where it gives them. A LookaheadError says what does not fit."""

    method: Literal["medusa-1", "medusa-2"] = "medusa-1"  # the heads alone, or the model with them
    num_heads: int = 4  # K
    num_layers: int = 1  # residual blocks of a head
    own_output: bool = False  # give each head an output layer of its own
    backbone: Literal["lora", "full"] = "lora"  # (medusa-2) train an adapter on all linear layers, or all weights
    schedule: Literal["two-stage", "sine"] = "two-stage"  # (medusa-2) heads alone first, or their weight rises from 0
    distil: bool = False  # learn from the model's own answers; medusa-2 then adds the KL divergence from its outputs
    answer_tokens: int = 256  # (distil) most tokens of an answer
    temperature: float | None = None  # (distil) of sampled answers; None is greedy
    learning_rate: float | None = None  # peak, of the heads; None is what heads_rate says
    backbone_learning_rate: float | None = None  # (medusa-2) peak, of the model; None is a quarter of the heads'
    lambda_0: float | None = None  # (medusa-2) weight of the heads' loss; None is 0.2, or 0.01 with distil
    epochs: float = 2.0  # passes over the data in each stage; more, if that is needed for min_steps
    min_steps: int = 1000  # of a stage
    max_minutes: float | None = None  # of the whole training, None is no limit; learning rates then follow the clock
    batch_size: int = 2  # examples of a step on each device
    accumulate: int = 1  # batches whose gradients add up to one step
    block_size: int = 512  # most tokens of an example
    warmup: float = 0.03  # share of the steps in which learning rates rise
    precision: Literal["none", "bf16", "fp16"] = "none"  # mixed precision; none computes in the dtypes of the weights
    seed: int = 0  # of the order of the examples and of an adapter's first weights
    save_steps: int = 200  # steps between two checkpoints
    report_to: str = "none"  # a logger that transformers knows, for example "tensorboard"
    lora_rank: int = 32  # (medusa-2) of the adapter, as are the next two
    lora_alpha: int = 16
    lora_dropout: float = 0.05

    def __post_init__(self) -> None:
        for field in fields(self):
            value, known = getattr(self, field.name), get_args(field.type)
            if get_origin(field.type) is Literal and value not in known:
                raise LookaheadError(f"{field.name}={value!r}: expected one of {', '.join(known)}.")
        for name in ("num_heads", "batch_size", "accumulate", "save_steps", "lora_rank", "lora_alpha", "answer_tokens"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise LookaheadError(f"{name}={getattr(self, name)!r}: expected an integer from 1 on.")
        if self.min_steps < 0:
            raise LookaheadError(f"min_steps={self.min_steps}: expected 0 or more.")
        if self.num_layers < (0 if self.own_output else 1):
            raise LookaheadError(f"num_layers={self.num_layers}: expected at least 1, or 0 with own_output.")
        if self.block_size < self.least:
            raise LookaheadError(
                f"block_size={self.block_size}: expected at least {self.least}, so that the last of {self.num_heads} "
                "heads has a token to predict."
            )
        for name in ("learning_rate", "backbone_learning_rate", "lambda_0", "epochs", "max_minutes", "temperature"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value < math.inf:
                raise LookaheadError(f"{name}={value!r}: expected a number above 0.")
        for name in ("warmup", "lora_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise LookaheadError(f"{name}={getattr(self, name)!r}: expected at least 0 and below 1.")
        if self.distil and self.method == "medusa-2" and self.backbone == "full":
            raise LookaheadError(
                "distil=True with method='medusa-2' compares the model with itself without the adapter, and "
                "backbone='full' has none: use backbone='lora'."
            )

    @property
    def least(self) -> int:
        """Tokens that an example needs, so that every head has one to predict."""
        return self.num_heads + 2

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
