"""How Medusa's heads are trained: the settings, and what they mean for each stage."""

import math
from dataclasses import dataclass
from typing import Literal

from jacobi import LookaheadError
from lookahead.training.losses import sine

_PUBLISHED_SIZE = 4096  # hidden size of the models that the published rates were for


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """How heads are trained; defaults are the paper's where it gives them.

    Attributes:
        method: ``"medusa-1"`` trains the heads alone, ``"medusa-2"`` the model with them.
        num_heads: K.
        num_layers: residual blocks of a head.
        own_output: give each head an output layer of its own.
        backbone: (medusa-2) ``"lora"`` trains an adapter on all linear layers, ``"full"`` all weights.
        schedule: (medusa-2) ``"two-stage"`` trains the heads alone first; ``"sine"`` raises the weight of their loss
            from 0.
        distil: learn from the model's own answers; medusa-2 then holds the model to its outputs without the adapter,
            by their KL divergence.
        answer_tokens: (distil) most tokens of an answer.
        temperature: (distil) of sampled answers; None is greedy.
        learning_rate: peak, of the heads. None is 2e-3 together with the model; alone, the published 1e-3 at hidden
            size 4096, times ``sqrt(4096 / hidden_size)``.
        backbone_learning_rate: (medusa-2) peak, of the model. None is a quarter of the heads'.
        lambda_0: (medusa-2) weight of the heads' loss. None is 0.2, or 0.01 with ``distil``.
        epochs: passes over the data in each stage; more, if that is needed for ``min_steps``.
        min_steps: least steps of a stage.
        max_minutes: limit of the whole training; None is none. Learning rates then follow the clock, so that they have
            come down when the time is over.
        batch_size: examples of a step on each device.
        accumulate: batches whose gradients add up to one step.
        block_size: most tokens of an example.
        warmup: share of the steps in which learning rates rise.
        precision: ``"bf16"`` or ``"fp16"`` is mixed precision; ``"none"`` computes in the dtypes of the weights.
        seed: of the order of the examples and of an adapter's first weights.
        save_steps: steps between two checkpoints.
        report_to: a logger that transformers knows, for example ``"tensorboard"``; ``"none"``.
        lora_rank, lora_alpha, lora_dropout: (medusa-2) of the adapter.

    Raises:
        LookaheadError: a setting is out of range, or does not go with another.
    """

    method: Literal["medusa-1", "medusa-2"] = "medusa-1"
    num_heads: int = 4
    num_layers: int = 1
    own_output: bool = False
    backbone: Literal["lora", "full"] = "lora"
    schedule: Literal["two-stage", "sine"] = "two-stage"
    distil: bool = False
    answer_tokens: int = 256
    temperature: float | None = None
    learning_rate: float | None = None
    backbone_learning_rate: float | None = None
    lambda_0: float | None = None
    epochs: float = 2.0
    min_steps: int = 1000
    max_minutes: float | None = None
    batch_size: int = 2
    accumulate: int = 1
    block_size: int = 512
    warmup: float = 0.03
    precision: Literal["none", "bf16", "fp16"] = "none"
    seed: int = 0
    save_steps: int = 200
    report_to: str = "none"
    lora_rank: int = 32
    lora_alpha: int = 16
    lora_dropout: float = 0.05

    def __post_init__(self) -> None:
        for name, known in (
            ("method", ("medusa-1", "medusa-2")),
            ("backbone", ("lora", "full")),
            ("schedule", ("two-stage", "sine")),
            ("precision", ("none", "bf16", "fp16")),
        ):
            if getattr(self, name) not in known:
                raise LookaheadError(f"{name}={getattr(self, name)!r}: expected one of {', '.join(known)}.")
        for name in ("num_heads", "batch_size", "accumulate", "save_steps", "lora_rank", "lora_alpha", "answer_tokens"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise LookaheadError(f"{name}={getattr(self, name)!r}: expected an integer from 1 on.")
        if self.min_steps < 0:
            raise LookaheadError(f"min_steps={self.min_steps}: expected 0 or more.")
        if self.num_layers < (0 if self.own_output else 1):
            raise LookaheadError(f"num_layers={self.num_layers}: expected at least 1, or 0 with own_output.")
        if self.block_size < self.least:
            raise LookaheadError(
                f"block_size={self.block_size}: expected at least {self.least}, so that the last of "
                f"{self.num_heads} heads has a token to predict."
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
        """The peak learning rate of the heads."""
        published = 1e-3 * math.sqrt(_PUBLISHED_SIZE / hidden_size) if stage == "heads" else 2e-3
        return self.learning_rate or published

    @property
    def backbone_rate(self) -> float:
        """The peak learning rate of the model."""
        return self.backbone_learning_rate or (self.learning_rate or 2e-3) / 4

    def heads_weight(self, done: float) -> float:
        """lambda_0, the weight of the heads' loss after a share ``done`` of the stage with both."""
        lambda_0 = self.lambda_0 or (0.01 if self.distil else 0.2)
        return sine(lambda_0, done) if self.schedule == "sine" else lambda_0
