"""How drafters are trained: the settings that all of them share."""

import math
from dataclasses import dataclass, fields
from typing import ClassVar, Literal, get_args, get_origin

from jacobi import LookaheadError


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """How a drafter is trained. A LookaheadError says what does not fit.

    A subclass names its own numbers in ``whole`` (integers from 1 on), ``positive`` and ``shares`` (from 0, below 1).
    """

    whole: ClassVar[tuple[str, ...]] = ("batch_size", "accumulate", "save_steps", "answer_tokens")
    positive: ClassVar[tuple[str, ...]] = ("learning_rate", "epochs", "max_minutes", "temperature")
    shares: ClassVar[tuple[str, ...]] = ("warmup",)

    distil: bool = False  # learn from the model's own answers
    answer_tokens: int = 256  # (distil) most tokens of an answer
    temperature: float | None = None  # (distil) of sampled answers; None is greedy
    learning_rate: float | None = None  # peak, of the drafter; None is what suits the model
    epochs: float = 2.0  # passes over the data in each stage; more, if that is needed for min_steps
    min_steps: int = 1000  # of a stage
    max_minutes: float | None = None  # of the whole training, None is no limit; learning rates then follow the clock
    batch_size: int = 2  # examples of a step on each device
    accumulate: int = 1  # batches whose gradients add up to one step
    block_size: int = 512  # most tokens of an example
    warmup: float = 0.03  # share of the steps in which learning rates rise
    precision: Literal["none", "bf16", "fp16"] = "none"  # mixed precision; none computes in the dtypes of the weights
    seed: int = 0  # of the order of the examples and of fresh weights
    save_steps: int = 200  # steps between two checkpoints
    report_to: str = "none"  # a logger that transformers knows, for example "tensorboard"

    def __post_init__(self) -> None:
        for field in fields(self):
            value, known = getattr(self, field.name), get_args(field.type)
            if get_origin(field.type) is Literal and value not in known:
                raise LookaheadError(f"{field.name}={value!r}: expected one of {', '.join(known)}.")
        for name in self.whole:
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise LookaheadError(f"{name}={getattr(self, name)!r}: expected an integer from 1 on.")
        if self.min_steps < 0:
            raise LookaheadError(f"min_steps={self.min_steps}: expected 0 or more.")
        if self.block_size < self.least:
            raise LookaheadError(
                f"block_size={self.block_size}: expected at least {self.least}, so that {self.last} has a token to "
                "predict."
            )
        for name in self.positive:
            value = getattr(self, name)
            if value is not None and not 0.0 < value < math.inf:
                raise LookaheadError(f"{name}={value!r}: expected a number above 0.")
        for name in self.shares:
            if not 0.0 <= getattr(self, name) < 1.0:
                raise LookaheadError(f"{name}={getattr(self, name)!r}: expected at least 0 and below 1.")

    @property
    def steps(self) -> int:
        """How many tokens are learnt to be predicted, one after the other."""
        return 1

    @property
    def least(self) -> int:
        """Tokens that an example needs, so that everything that is trained has one to predict."""
        return self.steps + 2

    @property
    def last(self) -> str:
        """What predicts the last of them, for messages."""
        return f"step {self.steps - 1}"


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


_PUBLISHED_SIZE, _PUBLISHED_RATE = 4096, 1e-3  # hidden size of the model that the published rate was for


@dataclass(frozen=True, kw_only=True)
class ReDrafterSettings(TrainingSettings):
    """How a head is trained; defaults are Apple's where they give them."""

    whole: ClassVar[tuple[str, ...]] = (*TrainingSettings.whole, "unroll")

    num_layers: int = 2  # residual blocks before the output layer
    exit_size: int | None = None  # channels of these; None is twice the model's hidden size
    rnn: bool = True  # a recurrent network's state, or a sum of embeddings
    unroll: int = 5  # tokens that it learns to draft one after the other
    targets: Literal["tokens", "model"] = "tokens"  # the tokens that came, or the model's own distribution there

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_layers < 0:
            raise LookaheadError(f"num_layers={self.num_layers}: expected 0 or more.")
        if self.exit_size is not None and self.exit_size < 1:
            raise LookaheadError(f"exit_size={self.exit_size}: expected an integer from 1 on.")

    @property
    def steps(self) -> int:
        return self.unroll

    def rate(self, hidden_size: int) -> float:
        """The peak: the published 1e-3 for 4,096 channels, and times the square root for smaller models."""
        return self.learning_rate or _PUBLISHED_RATE * math.sqrt(_PUBLISHED_SIZE / hidden_size)
