"""How good heads are: how often they are right in held-out texts, and what that is worth in decoding."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from jacobi import LookaheadError
from lookahead.models.hidden_states import passed
from lookahead.models.output_layer import output_layer, output_sizes
from lookahead.sources.medusa.accuracies import HeadAccuracies
from lookahead.sources.medusa.choices import ChoiceTree
from lookahead.sources.medusa.heads import MedusaHeads
from lookahead.stats import DecodingStats
from lookahead.strategies.medusa import Medusa
from lookahead.training.calibration import HeadCounts
from lookahead.training.data import IGNORE, Example, Progress, collate
from lookahead.training.losses import shifted

RANKS = 10  # candidates of a head in the table, as many as the published trees use

_T = TypeVar("_T")
_BATCH = 8  # texts scored at once
_WARM_UP = 8  # tokens
_PROMPT = 64  # tokens of a text that are continued


@dataclass(frozen=True)
class OwnScores:
    """How well the model itself predicts the next token."""

    loss: float  # mean cross-entropy, in nats a token
    top1: float  # share of tokens that it ranks first
    top5: float  # share among its five best
    tokens: int  # how many were scored


@dataclass(frozen=True)
class Measured:
    """Greedy decoding, plain and with the heads, of the same texts in turns in one process."""

    prompts: int  # how many texts
    tokens: int  # written in each of the two ways
    tokens_per_pass: float  # mean acceptance length with the heads, the model's own token included
    plain_tokens_per_s: float
    tokens_per_s: float  # with the heads

    @property
    def speedup(self) -> float:
        return self.tokens_per_s / self.plain_tokens_per_s


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


def measure(
    model: PreTrainedModel, heads: MedusaHeads, prompts: Sequence[Sequence[int]], choices: ChoiceTree, new_tokens: int
) -> Measured:
    """Continue every prompt (token ids) by at most ``new_tokens``, with plain decoding and with the heads in turns."""
    strategy = Medusa(heads, choices, seed=0)
    seconds, tokens = {False: 0.0, True: 0.0}, {False: 0, True: 0}
    stats = DecodingStats()
    for number, prompt in enumerate([prompts[0], *prompts]):
        for ours in (False, True) if number % 2 else (True, False):
            begin = time.perf_counter()
            output = model.generate(
                input_ids=(ids := torch.tensor([prompt], device=model.device)),
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=new_tokens if number else min(new_tokens, _WARM_UP),
                return_dict_in_generate=True,
                pad_token_id=model.generation_config.pad_token_id or 0,
                custom_generate=strategy if ours else None,
            )
            if not number:
                continue  # the first text warms up
            seconds[ours] += time.perf_counter() - begin
            tokens[ours] += output.sequences.shape[1] - len(prompt)
            if ours:
                stats += output.stats
    speeds = {ours: tokens[ours] / seconds[ours] for ours in seconds}
    return Measured(len(prompts), tokens[True], stats.mean_acceptance_length, speeds[False], speeds[True])


def continued(examples: Sequence[Example], count: int) -> list[list[int]]:
    """Prompts cut from examples: all that comes before an answer, or the beginning of a plain text."""
    ends = [int(example.loss.int().argmax()) or min(_PROMPT, len(example.ids) // 2) for example in examples]
    return spread([example.ids[:end].tolist() for example, end in zip(examples, ends, strict=True) if end], count)


def spread(items: Sequence[_T], count: int) -> list[_T]:
    """At most ``count`` of the items, at even distances."""
    return [items[len(items) * index // count] for index in range(count)] if len(items) > count else list(items)
