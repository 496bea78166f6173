"""How often Medusa's heads are right: in texts that the model writes itself, and in held-out ones."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from jacobi import LookaheadError
from lookahead.heads.medusa.accuracies import HeadAccuracies
from lookahead.heads.medusa.heads import MedusaHeads
from lookahead.models.compat import last_logits
from lookahead.models.hidden_states import passed
from lookahead.models.output_layer import MOST_LOGITS, output_layer, output_sizes
from lookahead.training.data import IGNORE, Example, Progress, batches
from lookahead.training.distillation import writing


class HeadCounts:
    """Right guesses of each head's ``ranks`` best candidates; ``samples`` ``[head]`` counts what it was asked for."""

    def __init__(self, heads: MedusaHeads, output: Any, vocab_size: int, ranks: int) -> None:
        self.samples = [0] * heads.num_heads
        self._hits = torch.zeros(heads.num_heads, ranks, dtype=torch.long)
        self._heads, self._output = heads, output
        self._ranks = min(ranks, vocab_size)
        self._at_once = max(1, MOST_LOGITS // (heads.num_heads * vocab_size))

    def add(self, hidden: Tensor, labels: Tensor) -> None:
        """Compare what head k guesses at token t of a text with the label of token t + k + 2.

        ``hidden`` ``[token, hidden]`` is what the output layer reads; the last two tokens' may be left out. ``labels``
        ``[token]`` are token ids, or :data:`IGNORE` where nothing is to be guessed.
        """
        labels = labels.cpu()
        guessed_at = len(labels) - 2  # tokens after which head 0 has one to guess
        for start in range(0, guessed_at, self._at_once):
            part = hidden[start : min(start + self._at_once, guessed_at)]
            _, ids = self._heads.top(part, self._output, self._ranks)
            for head, candidates in enumerate(ids.cpu()):
                target = labels[start + head + 2 :][: len(part)]
                kept = target != IGNORE
                right = candidates[: len(target)][kept] == target[kept][:, None]
                self._hits[head, : self._ranks] += right.sum(0)
                self.samples[head] += int(kept.sum())

    def accuracies(self) -> HeadAccuracies:
        """The shares; every head needs a sample."""
        shares = (self._hits.double() / torch.tensor(self.samples)[:, None]).tolist()
        return HeadAccuracies(tuple(map(tuple, shares)), tuple(self.samples))


@torch.no_grad()
def calibrate(
    model: PreTrainedModel,
    heads: MedusaHeads,
    prompts: Sequence[Sequence[int] | Tensor],
    new_tokens: int = 128,
    ranks: int = 10,
    *,
    temperature: float | None = None,
    seed: int = 0,
    report: Progress | None = None,
) -> HeadAccuracies:
    """Measure how often each candidate of each head is right in texts that the model writes itself.

    The model, in evaluation mode, continues every prompt; one more pass over prompt and text gives all hidden states.
    From the prompt's last token on, each head's candidates are compared with the tokens that really came.

    Args:
        prompts: token ids, each a sequence or ``[token]``.
        new_tokens: most tokens to write for each prompt.
        ranks: candidates of each head to look at.
        temperature: for trees to be used with sampling, write sampled texts at this temperature; None writes greedily.
        seed: of the sampled texts; torch's own generators are left as they are.
        report: called with the share that is done, from 0 to 1.

    Raises:
        LookaheadError: the heads do not fit the model, a number is out of range, a prompt is empty or holds what is no
            token, or the texts ended too early for a head to have any sample.
    """
    heads.check(model)
    layer, vocab_size = output_layer(model), output_sizes(model)[1]
    if not 1 <= ranks <= vocab_size:
        raise LookaheadError(f"ranks={ranks}: expected 1 to {vocab_size}, the size of the vocabulary.")
    if new_tokens <= heads.num_heads:
        raise LookaheadError(
            f"new_tokens={new_tokens}: expected more than {heads.num_heads}, so that the last of {heads.num_heads} "
            "heads has a token to predict."
        )
    if temperature is not None and not 0.0 < temperature < math.inf:
        raise LookaheadError(f"temperature={temperature}: expected above 0, or None for greedy texts.")
    known = model.get_input_embeddings().weight.shape[0]
    ids = [_ids(prompt, number, known).to(model.device) for number, prompt in enumerate(prompts)]
    if not ids:
        raise LookaheadError("There are no prompts to calibrate on: expected at least one.")
    counts = HeadCounts(heads, layer, vocab_size, ranks)
    with writing(temperature, seed) as settings:
        for done, prompt in enumerate(ids, start=1):
            mask = torch.ones_like(prompt)
            text = model.generate(input_ids=prompt, attention_mask=mask, max_new_tokens=new_tokens, **settings)
            written = text.shape[1] - prompt.shape[1]
            if written > 1:
                inputs = {"input_ids": text[:, :-2], "attention_mask": torch.ones_like(text[:, :-2])}
                inputs |= {"use_cache": False} | last_logits(model, written - 1)
                _, hidden = passed(model, layer, inputs)
                counts.add(hidden[0, 1 - written :], text[0, prompt.shape[1] - 1 :])
            if report is not None:
                report(done / len(ids))
    if not counts.samples[-1]:
        empty = counts.samples.index(0)
        raise LookaheadError(
            f"Head {empty} has no sample: every text ended within {empty + 1} tokens, and the first token it predicts "
            f"is number {empty + 2}. Give prompts with longer answers."
        )
    return counts.accuracies()


def _ids(prompt: Sequence[int] | Tensor, number: int, vocab: int) -> Tensor:
    try:
        ids = torch.as_tensor(prompt)
    except (TypeError, ValueError, RuntimeError) as error:
        raise LookaheadError(f"Prompt {number} is {prompt!r}: expected token ids.") from error
    if ids.ndim != 1 or not ids.numel() or ids.is_floating_point() or ids.min() < 0 or ids.max() >= vocab:
        raise LookaheadError(
            f"Prompt {number} is not a sequence of token ids: expected at least one integer from 0 to {vocab - 1}, got "
            f"{ids.dtype} {list(ids.shape)}."
        )
    return ids.long()[None]


@torch.no_grad()
def score(
    model: Any, heads: MedusaHeads | None, examples: Sequence[Example], pad: int = 0, report: Progress | None = None
) -> tuple[dict[str, float], int]:
    """The loss of the model itself, in nats a token, and the shares of labelled tokens that it, and each head, ranks
    first, and among the first five; and how many were scored. ``heads=None`` scores the model alone. A LookaheadError
    says that there is no label for it or for one of the heads."""
    layer = output_layer(model)
    counts = None if heads is None else HeadCounts(heads, layer, output_sizes(model)[1], 5)
    loss, best, tokens = 0.0, torch.zeros(2), 0
    for inputs in batches(examples, pad, model.device, report):
        labels = inputs.pop("labels")
        logits, hidden = passed(model, layer, inputs | {"use_cache": False})
        target = labels[:, 1:]
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
    samples = [] if counts is None else counts.samples
    if not tokens or not all(samples):
        raise LookaheadError(
            "The held-out data is too short: there is no token for "
            f"{'the model' if not tokens else f'head {samples.index(0)}'} to predict. Give more of it."
        )
    top1, top5 = (best / tokens).tolist()
    parts = {"loss_model": loss / tokens, "right_model": top1, "top5_model": top5}
    for head, row in enumerate([] if counts is None else counts.accuracies().accuracies):
        parts |= {f"right_{head}": row[0], f"top5_{head}": sum(row)}
    return parts, tokens
