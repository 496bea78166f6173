"""How good heads are: how often they are right in texts held out, and what that is worth in decoding."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from jacobi import LookaheadError
from lookahead.models.hidden_states import passed
from lookahead.models.output_layer import output_layer
from lookahead.sources.medusa.accuracies import HeadAccuracies, expected_length
from lookahead.sources.medusa.choices import ChoiceTree
from lookahead.sources.medusa.heads import MedusaHeads
from lookahead.stats import DecodingStats
from lookahead.strategies.medusa import Medusa
from lookahead.training.data import IGNORE, Example, collate
from lookahead.training.losses import shifted

RANKS = 10  # candidates of a head in the table, as many as the published trees use

_LOGITS = 1 << 24  # numbers made at once
_T = TypeVar("_T")
_WARM_UP = 8  # tokens
_PROMPT = 64  # tokens of a text that are continued


@dataclass(frozen=True)
class OwnScores:
    """How well the model itself predicts the next token.

    Attributes:
        loss: mean cross-entropy, in nats for each token.
        top1: share of tokens that it ranks first.
        top5: share among its five best.
        tokens: how many were scored.
    """

    loss: float
    top1: float
    top5: float
    tokens: int


@dataclass(frozen=True)
class Measured:
    """Texts written plainly and with the heads, greedily, one after the other in one process.

    Attributes:
        prompts: how many texts.
        tokens: how many tokens of each kind.
        tokens_per_pass: mean acceptance length with the heads, the model's own token included.
        plain_tokens_per_s: speed of plain decoding.
        tokens_per_s: speed with the heads.
    """

    prompts: int
    tokens: int
    tokens_per_pass: float
    plain_tokens_per_s: float
    tokens_per_s: float

    @property
    def speedup(self) -> float:
        """Times as fast as plain decoding."""
        return self.tokens_per_s / self.plain_tokens_per_s


@torch.no_grad()
def score(
    model: Any,
    heads: MedusaHeads | None,
    examples: Sequence[Example],
    *,
    pad: int = 0,
    batch_size: int = 8,
    report: Callable[[float], None] | None = None,
) -> tuple[OwnScores, HeadAccuracies | None]:
    """Compare the model's best next tokens, and every head's best, with the labelled tokens that really come.

    Args:
        model: the causal model, in evaluation mode.
        heads: its heads; None scores the model alone.
        examples: texts that nothing was trained on.
        pad: fills up shorter examples.
        batch_size: examples in a pass.
        report: told the share that is done, from 0 to 1.

    Raises:
        LookaheadError: nothing is labelled for one of the heads.
    """
    layer = output_layer(model)
    count = 0 if heads is None else heads.num_heads
    loss, best, right = 0.0, torch.zeros(2), 0
    hits, samples = torch.zeros(count, RANKS, dtype=torch.long), [0] * count
    for start in range(0, len(examples), batch_size):
        batch = collate(examples[start : start + batch_size], pad)
        labels = batch.pop("labels").to(model.device)
        inputs = {name: value.to(model.device) for name, value in batch.items()}
        logits, hidden = passed(model, layer, inputs | {"use_cache": False})
        target = shifted(labels, 1)
        kept = target != IGNORE
        scores, target = logits[:, :-1][kept].float(), target[kept]
        loss += cross_entropy(scores, target, reduction="sum").item()
        matches = scores.topk(min(5, scores.shape[-1])).indices == target[:, None]
        best += torch.stack([matches[:, 0].sum(), matches.sum()]).float().cpu()
        right += len(target)
        del logits, scores
        if heads is not None:
            _count_heads(heads, layer, hidden, labels, hits, samples)
        if report is not None:
            report(min(1.0, (start + batch_size) / len(examples)))
    if not right or not all(samples):
        raise LookaheadError(
            "The held-out data is too short: there is no token for "
            f"{'the model' if not right else f'head {samples.index(0)}'} to predict. Give more of it."
        )
    top1, top5 = (best / right).tolist()
    own = OwnScores(loss / right, top1, top5, right)
    if heads is None:
        return own, None
    shares = (hits.double() / torch.tensor(samples)[:, None]).tolist()
    return own, HeadAccuracies(tuple(map(tuple, shares)), tuple(samples))


def _count_heads(
    heads: MedusaHeads, layer: Any, hidden: Tensor, labels: Tensor, hits: Tensor, samples: list[int]
) -> None:
    """Add one batch to ``hits`` ``[head, rank]`` and ``samples`` ``[head]``."""
    size = max(1, _LOGITS // (heads.num_heads * (heads.vocab_size or 1)))
    for row, wanted in zip(hidden, labels, strict=True):
        later = [shifted(wanted[None], head + 2)[0] for head in range(heads.num_heads)]
        places = len(later[0])
        for start in range(0, places, size):
            _, ids = heads.top(row[start : min(start + size, places)], layer, min(RANKS, heads.vocab_size or RANKS))
            for head, target in enumerate(later):
                part = target[start : start + size]
                kept = part != IGNORE
                matches = ids[head, : len(part)][kept] == part[kept][:, None]
                hits[head, : matches.shape[1]] += matches.sum(0).cpu()
                samples[head] += int(kept.sum())


def measure(
    model: PreTrainedModel, heads: MedusaHeads, prompts: Sequence[Sequence[int]], choices: ChoiceTree, new_tokens: int
) -> Measured:
    """Write every prompt's continuation plainly and with the heads, in turns.

    Args:
        model: a causal model that lookahead supports, in evaluation mode.
        heads: its heads.
        prompts: token ids.
        choices: the tree.
        new_tokens: tokens to write at most, for each prompt.
    """
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
    """Prompts cut from texts held out: all that comes before an answer, or the beginning of a plain text."""
    prompts = []
    for example in examples:
        first = int(example.loss.int().argmax())
        ids = example.ids[: first or min(_PROMPT, len(example.ids) // 2)].tolist()
        if ids:
            prompts.append(ids)
    return spread(prompts, count)


def spread(items: Sequence[_T], count: int) -> list[_T]:
    """At most ``count`` of them, evenly from the first to the last."""
    return [items[len(items) * place // count] for place in range(count)] if len(items) > count else list(items)


def expected_tokens(accuracies: HeadAccuracies, choices: ChoiceTree) -> float:
    """Tokens that a pass over the tree is expected to write: the drafted ones that are kept, and the model's own."""
    return 1.0 + expected_length(accuracies, choices)
