"""How often heads are right in held-out texts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from jacobi import LookaheadError
from lookahead.models.hidden_states import passed
from lookahead.models.output_layer import output_layer, output_sizes
from lookahead.sources.medusa.accuracies import HeadAccuracies
from lookahead.sources.medusa.heads import MedusaHeads
from lookahead.training.data import IGNORE, Example, Progress, collate
from lookahead.training.medusa.calibration import HeadCounts
from lookahead.training.medusa.losses import shifted

RANKS = 10  # candidates of a head in the table, as many as the published trees use

_BATCH = 8  # texts scored at once


@dataclass(frozen=True)
class OwnScores:
    """How well the model itself predicts the next token."""

    loss: float  # mean cross-entropy, in nats a token
    top1: float  # share of tokens that it ranks first
    top5: float  # share among its five best
    tokens: int  # how many were scored


@torch.no_grad()
def score(
    model: Any, heads: MedusaHeads | None, examples: Sequence[Example], pad: int = 0, report: Progress | None = None
) -> tuple[OwnScores, HeadAccuracies | None]:
    """Compare the model's best next tokens, and every head's candidates, with the labelled tokens that really come.
    ``heads=None`` scores the model alone. A LookaheadError says that there is no label for it or for one of the
    heads."""
    layer = output_layer(model)
    counts = None if heads is None else HeadCounts(heads, layer, output_sizes(model)[1], RANKS)
    loss, best, tokens = 0.0, torch.zeros(2), 0
    for start in range(0, len(examples), _BATCH):
        batch = collate(examples[start : start + _BATCH], pad)
        labels = batch.pop("labels").to(model.device)
        inputs = {name: value.to(model.device) for name, value in batch.items()}
        logits, hidden = passed(model, layer, inputs | {"use_cache": False})
        target = shifted(labels, 1)
        kept = target != IGNORE
        scores, target = logits[:, :-1][kept].float(), target[kept]
        loss += cross_entropy(scores, target, reduction="sum").item()
        matches = scores.topk(min(5, scores.shape[-1])).indices == target[:, None]
        best += torch.stack([matches[:, 0].sum(), matches.sum()]).float().cpu()
        tokens += len(target)
        del logits, scores
        if counts is not None:
            for states, wanted in zip(hidden, labels, strict=True):
                counts.add(states, wanted)
        if report is not None:
            report(min(1.0, (start + _BATCH) / len(examples)))
    samples = [] if counts is None else counts.samples
    if not tokens or not all(samples):
        raise LookaheadError(
            "The held-out data is too short: there is no token for "
            f"{'the model' if not tokens else f'head {samples.index(0)}'} to predict. Give more of it."
        )
    top1, top5 = (best / tokens).tolist()
    return OwnScores(loss / tokens, top1, top5, tokens), None if counts is None else counts.accuracies()
