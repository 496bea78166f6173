"""Training what drafts beside a model that stays as it is: EAGLE heads, recurrent drafters, and whatever comes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback

from lookahead.models.hidden_states import HiddenStates, tapped
from lookahead.training.clock import Report
from lookahead.training.data import Example
from lookahead.training.settings import TrainingSettings
from lookahead.training.stage import Trained, check_stage, train_stage
from lookahead.training.trainer import Learner

STAGE = "drafter"


@dataclass(frozen=True, eq=False)
class Seen:
    """A batch of texts as the model sees it. Nothing of it has a gradient.

    Attributes:
        tokens: ids ``[batch, token]``, padded on the right.
        labels: ``[batch, token]``, each its own token, or ``IGNORE`` where nothing is to be predicted; padding too.
        states: by tap, what the tapped modules read, ``[batch, token, hidden]``.
        logits: the model's of the next token, ``[batch, token, vocab]``.
    """

    tokens: Tensor
    labels: Tensor
    states: Mapping[str, Tensor]
    logits: Tensor


class Drafter(Protocol):
    """What can be trained beside a model: an ``nn.Module`` whose weights that require a gradient are trained."""

    def taps(self, model: Any) -> tuple[str, ...]:
        """Which hidden states of the model it learns from (:mod:`lookahead.models.hidden_states`)."""

    def losses(self, seen: Seen, model: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a batch, and what it is made of, by the names that logs take, without gradients."""

    def save_pretrained(self, folder: str | Path) -> None:
        """Write what decoding reads."""


class BesideModel(Learner):
    """A drafter beside its model, which stays in evaluation mode and gets no gradients."""

    def __init__(self, model: PreTrainedModel, drafter: Any, rate: float) -> None:
        super().__init__(model)
        self.drafter = drafter
        self._rate = rate
        self._modules_read = tapped(model, drafter.taps(model))

    def rates(self) -> list[tuple[nn.Module, float]]:
        return [(self.drafter, self._rate)]

    def train(self, mode: bool = True) -> "BesideModel":
        super().train(mode)
        self.backbone.eval()
        return self

    @torch.no_grad()
    def look(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Seen:
        """One pass of the model over a batch; all ``[batch, token]``, padded on the right."""
        with HiddenStates(self._modules_read) as hidden:
            hidden.expect()
            logits = self.backbone(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
            states = hidden.take(logits, whole=True)
        return Seen(input_ids, labels, dict(zip(hidden.taps, states, strict=True)), logits)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        loss, self.parts = self.drafter.losses(self.look(input_ids, attention_mask, labels), self.backbone)
        return {"loss": loss}


def train_drafter(
    model: PreTrainedModel,
    drafter: Any,
    examples: Sequence[Example],
    settings: TrainingSettings,
    folder: str | Path,
    *,
    rate: float,
    pad: int = 0,
    resume: bool = False,
    report: Report | None = None,
    callbacks: Sequence[TrainerCallback] = (),
) -> Trained:
    """Train a :class:`Drafter` beside its model, with ``rate`` as the peak learning rate.

    ``pad`` fills up shorter examples. ``folder`` gets checkpoints; with ``resume``, training continues from the last
    one in it. ``report`` is called with the stage (``"drafter"``), the share of it that is done, and now and then
    losses and rates. A LookaheadError says that nothing can be trained with these settings, or that the loss is not
    finite.
    """
    check_stage(model, settings)
    flags = [(weight, weight.requires_grad) for weight in model.parameters()]
    limit_s = None if settings.max_minutes is None else 60.0 * settings.max_minutes
    more: dict[str, Any] = {"pad": pad, "resume": resume, "report": report, "callbacks": callbacks}
    try:
        model.requires_grad_(False)
        learner = BesideModel(model, drafter, rate)
        taken = train_stage(learner, examples, settings, STAGE, Path(folder) / STAGE, limit_s=limit_s, **more)
    finally:
        for weight, flag in flags:
            weight.requires_grad_(flag)
    return Trained(drafter.eval(), model, False, *taken)
