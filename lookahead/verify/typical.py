"""Lossy acceptance: candidates are accepted by a rule of their own, by the distribution at their parent, as logits
processors leave it (Cai et al., arXiv 2401.10774, section 2.3.1). The most likely token always may follow: at
temperature 0 both rules are greedy decoding."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList

from jacobi import LookaheadError, longest
from lookahead.runtime.scores import fetch
from lookahead.verify.processors import STATEFUL, not_row_wise
from lookahead.verify.sampler import Place, Sampler, ScoredPass

Decided = tuple[int, int, Tensor, Tensor]  # node, token, its processed scores and its logits [vocab]


def typical(scores: Tensor, posterior_threshold: float, posterior_alpha: float) -> Tensor:
    """Tokens with ``p > min(epsilon, delta * exp(-H))``, bool ``[..., vocab]``: the more certain the model, the fewer.
    ``p = softmax(scores)`` of processed scores ``[..., vocab]`` has the entropy H in nats; epsilon is the
    ``posterior_threshold``, delta the ``posterior_alpha``, for which the authors take the square root of epsilon."""
    probabilities = scores.softmax(-1)
    entropy = torch.special.entr(probabilities).sum(-1, keepdim=True)
    return probabilities > (posterior_alpha * (-entropy).exp()).clamp(max=posterior_threshold)


def nucleus(scores: Tensor, top_p: float) -> Tensor:
    """The smallest set of most likely tokens that together have at least the probability ``top_p``, above 0 up to 1. Of
    equally likely tokens the lower id counts as the likelier one. Scores and result are those of :func:`typical`."""
    ordered, ids = scores.softmax(-1).sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered  # what the likelier tokens have together
    inside = (before < top_p) & (ordered > 0)
    return torch.zeros_like(inside).scatter(-1, ids, inside)


def check_paths(
    batch: int, processors: LogitsProcessorList, criteria: StoppingCriteriaList, *, in_lockstep: bool
) -> None:
    """Refuse processors with a state and, for several sequences, lockstep and rules that may look at all of them."""
    if in_lockstep and batch > 1:
        raise LookaheadError(
            "Lossy acceptance writes each row of a batch at its own pace, and the rows of this model can only "
            f"advance together: got {batch} rows, expected one. Use acceptance='exact'."
        )
    for kind in {type(processor) for processor in processors} & STATEFUL:
        raise LookaheadError(
            f"Lossy acceptance asks processors along several candidate texts, and {kind.__name__} remembers the "
            "last one: expected processors without a state. Use acceptance='exact', or drop it."
        )
    others = not_row_wise(processors, criteria)
    if batch > 1 and others:
        raise LookaheadError(
            f"Lossy acceptance writes each row of a batch at its own pace, and {others[0]} may look at "
            f"the whole batch: got {batch} rows, expected one, or transformers' own row-wise processors and "
            "stopping rules. Decode one row at a time, or use acceptance='exact'."
        )


def accepted(
    now: ScoredPass, rows: Sequence[int], sampler: Sampler, rule: Callable[[Tensor], Tensor], end_tokens: frozenset[int]
) -> dict[int, list[Decided]]:
    """For each row the longest path of candidates that ``rule`` accepts, and after it the most likely token. Nothing is
    drawn. Processors are asked at every accepted candidate, along its own prefix."""
    seen: dict[Place, tuple[Tensor, Tensor]] = {}  # processed scores and logits

    def look(places: Sequence[Place]) -> Tensor:
        raw = sampler.logits(now, places)
        processed = sampler.process(places, raw, now.trees)
        fine = fetch(processed.softmax(-1).sum(-1).isfinite()).tolist()
        sampler.check_chances(fine, [row for row, _ in places])
        seen.update(zip(places, zip(processed, raw, strict=True), strict=True))
        return processed

    def judge(places: Sequence[Place]) -> list[dict[int, float]]:
        processed = look(places)
        values = processed.log_softmax(-1).masked_fill(~rule(processed), -torch.inf)
        pairs = [(line, token) for line, (row, node) in enumerate(places) for token in now.trees[row].children[node]]
        told: list[dict[int, float]] = [{} for _ in places]
        found = values[tuple(torch.tensor(pairs, device=values.device).T)].tolist()
        for (line, token), value in zip(pairs, found, strict=True):
            if value > -torch.inf:
                told[line][token] = value
        return told

    kept = longest({row: now.trees[row] for row in rows}, judge, end_tokens)
    last = [(row, nodes[-1]) for row, nodes in kept.items()]
    last = [(row, node) for row, node in last if node == 0 or now.trees[row].tokens[node] not in end_tokens]
    if missing := [place for place in last if place not in seen]:
        look(missing)
    best = torch.stack([seen[place][0] for place in last]).argmax(-1).tolist() if last else []
    bonus = {row: [token] for (row, _), token in zip(last, best, strict=True)}
    decided: dict[int, list[Decided]] = {}
    for row, nodes in kept.items():
        tokens = [now.trees[row].tokens[node] for node in nodes[1:]] + bonus.get(row, [])
        decided[row] = [(node, token, *seen[row, node]) for node, token in zip(nodes, tokens, strict=False)]
    return decided
