"""What learns to draft beside a model that stays as it is: EAGLE heads, recurrent heads, and whatever comes."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from jacobi import LookaheadError
from lookahead.models.hidden_states import HiddenStates, final_norm, tapped
from lookahead.models.output_layer import copyable_weight, output_layer, output_sizes
from lookahead.training.data import Example, Examples, Progress, Scored, batches, places_at_once
from lookahead.training.recipe import Recipe, Run
from lookahead.training.stage import Learner, Trained, kept_flags, train_stage

_STAGE = "drafter"


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


class TrainedHead(nn.Module, Recipe):
    """A head that is trained beside a model, which stays as it is; ``head`` is what decoding takes.

    Attributes:
        use: how it is used, as code, in its card.
    """

    use: ClassVar[str]

    def __init__(self, head: Any, settings: Any) -> None:
        super().__init__()
        self.head = head
        self._settings = settings

    @property
    @abstractmethod
    def title(self) -> str:
        """What cards call it."""

    def taps(self, model: Any) -> tuple[str, ...]:
        """Which hidden states of the model it learns from (:mod:`lookahead.models.hidden_states`): the head's own."""
        found: tuple[str, ...] = self.head.taps(model) if hasattr(self.head, "taps") else ()
        return found

    @abstractmethod
    def losses(self, seen: Seen, model: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a batch, and what it is made of, by the names that logs take, without gradients."""

    @classmethod
    def trained(cls, *given: Any, **more: Any) -> Any:
        """As :meth:`Recipe.trained`, but the head alone is returned."""
        return super().trained(*given, **more).heads

    def learn(self, model: PreTrainedModel, examples: Sequence[Example], folder: Path, **more: Any) -> Trained:
        learner = BesideModel(model, self, self._settings.rate(output_sizes(model)[0]))
        with kept_flags(model):
            model.requires_grad_(False)
            taken = train_stage(learner, examples, self._settings, _STAGE, folder / _STAGE, **more)
        return Trained(self.eval().head, model, False, *taken)

    def save(self, run: Run, trained: Trained) -> None:
        self.to(run.rounded)
        self.head.save_pretrained(run.output)
        self.to(run.model.dtype)  # as rounded

    @torch.no_grad()
    def score(self, model: PreTrainedModel, examples: Examples, pad: int = 0, report: Progress | None = None) -> Scored:
        """The parts of the loss, as means of batches."""
        learner = BesideModel(model, self, 0.0).eval()
        found: list[dict[str, float]] = []
        for batch in batches(examples, pad, model.device, report):
            learner(**batch)
            found.append({name: value.item() for name, value in learner.parts.items()})
        if not found:
            raise LookaheadError("The held-out data is empty: expected at least one example. Give more of it.")
        parts = {name: sum(each[name] for each in found) / len(found) for name in found[0]}
        return parts, sum(len(example.ids) for example in examples)

    def introduction(self, run: Run, name: str | None) -> str:
        return f"""---
library_name: lookahead
tags:
- speculative-decoding
---

# {self.title}{f" for {name}" if name else ""}

It is of use only beside the model that it was trained for, whose text it does not change.

```python
{self.use}
```"""


class BesideModel(Learner):
    """A drafter beside its model, which stays in evaluation mode and gets no gradients."""

    def __init__(self, model: PreTrainedModel, drafter: Any, rate: float) -> None:
        super().__init__(model)
        self.drafter = drafter
        self._rate = rate
        self._modules_read = tapped(model, drafter.taps(model))

    def rates(self) -> list[tuple[nn.Module, float]]:
        return [(self.drafter, self._rate)]

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


def in_parts(
    loss: Callable[..., tuple[Tensor, Tensor]], rows: Sequence[Tensor], vocab_size: int, start: Tensor
) -> tuple[Tensor, Tensor]:
    """What ``loss`` gives of ``rows``, ``[place, ...]`` each, a loss and a count, both added up, the loss to ``start``.
    Scores of ``vocab_size`` tokens never exist at all places at once: for the gradients they are made again."""
    count, size = len(rows[0]), places_at_once(start.device, vocab_size)
    total, right = start, torch.zeros((), device=start.device)
    for given in zip(*(each.split(size) for each in rows), strict=True):
        part, hits = loss(*given) if count <= size else checkpoint(loss, *given, use_reentrant=False)
        total, right = total + part, right + hits.detach()
    return total, right


@torch.no_grad()
def take_output(network: Any, model: Any, examples: Examples, scored: int | None) -> None:
    """Begin with the model's final norm and its output layer, or the lines of it that stand for the ``scored`` tokens
    that are the most frequent in ``examples``, if not all are."""
    theirs = getattr(final_norm(model), "weight", None)
    if network.norm is not None and isinstance(theirs, Tensor) and theirs.shape == network.norm.weight.shape:
        network.norm.weight.copy_(theirs)
    vocab, weight = output_sizes(model)[1], copyable_weight(output_layer(model))
    ids = torch.arange(vocab)
    if scored is not None and scored < vocab:
        counts = torch.zeros(vocab, dtype=torch.long)
        for example in examples:
            counts += torch.bincount(example.ids[example.loss].long(), minlength=vocab)
        ids = counts.argsort(descending=True, stable=True)[:scored].sort().values
        network.d2t = (ids - torch.arange(scored)).to(network.fc.weight.device)
    if network.lm_head is not None and weight is not None:
        network.lm_head.weight.copy_(weight[ids.to(weight.device)])
