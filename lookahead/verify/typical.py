"""Lossy acceptance: candidates are accepted by a rule of their own, not by what the model would have drawn.

Both rules look at the distribution at a candidate's parent, as logits processors leave it, and say which tokens may
follow there (Cai et al., arXiv 2401.10774, section 2.3.1). Neither keeps the model's distribution. Under both the most
likely token may always follow, so as the temperature goes to 0 they become greedy decoding.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from jacobi import TokenTree, longest
from lookahead.verify.sampler import Pass, Place, Sampler
from lookahead.verify.sequences import Sequences
from lookahead.verify.verifier import Limits, Verifier


def typical(scores: Tensor, posterior_threshold: float, posterior_alpha: float) -> Tensor:
    """Tokens with ``p > min(epsilon, delta * exp(-H))``: the more certain the model is, the fewer.

    Args:
        scores: processed scores ``[..., vocab]``, from which ``p = softmax(scores)``, with entropy H in nats.
        posterior_threshold: epsilon, the most that is ever asked for.
        posterior_alpha: delta; the authors take the square root of epsilon.

    Returns:
        bool ``[..., vocab]``.
    """
    probabilities = scores.softmax(-1)
    entropy = torch.special.entr(probabilities).sum(-1, keepdim=True)
    return probabilities > (posterior_alpha * (-entropy).exp()).clamp(max=posterior_threshold)


def nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Tokens of the smallest set of most likely ones that together have at least the probability ``top_p``.

    Of equally likely tokens the lower id counts as the likelier one.

    Args:
        scores: processed scores ``[..., vocab]``.
        top_p: from above 0 to 1, which is all that have any probability.

    Returns:
        bool ``[..., vocab]``.
    """
    ordered, ids = scores.softmax(-1).sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered  # what the likelier tokens have together
    inside = (before < top_p) & (ordered > 0)
    return torch.zeros_like(inside).scatter(-1, ids, inside)


class LossyVerifier(Verifier):
    """Writes in each sequence the longest path of accepted candidates, and after it the most likely token.

    Nothing is drawn, and no draft-free decoding writes this text. Processors are asked at every accepted candidate,
    along its own prefix; stopping rules only about what is written, token by token.

    Args:
        sequences, criteria, limits, sampler: see :class:`lookahead.verify.verifier.Verifier`.
        rule: which tokens may be accepted where processed scores are ``[place, vocab]``; bool of the same shape.
    """

    def __init__(
        self,
        sequences: Sequences,
        criteria: StoppingCriteriaList,
        limits: Limits,
        sampler: Sampler,
        rule: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__(sequences, criteria, limits, sampler)
        self._rule = rule

    def _write(self, now: Pass, rows: Sequence[int]) -> None:
        trees, sequences = now.trees, self._sequences
        seen: dict[Place, tuple[Tensor, Tensor]] = {}  # processed scores and logits

        def judge(places: Sequence[Place]) -> list[Mapping[int, float]]:
            processed = self._look(now, places, seen)
            values = processed.log_softmax(-1).masked_fill(~self._rule(processed), -torch.inf)
            tokens = [list(trees[row].children[node]) for row, node in places]
            lines = torch.tensor([line for line, under in enumerate(tokens) for _ in under], device=values.device)
            columns = torch.tensor([token for under in tokens for token in under], device=values.device)
            found = iter(values[lines, columns].tolist())
            told = [dict(zip(under, found, strict=False)) for under in tokens]
            return [{token: value for token, value in line.items() if value > -torch.inf} for line in told]

        kept = longest({row: trees[row] for row in rows}, judge, sequences.end_tokens)
        last = [(row, nodes[-1]) for row, nodes in kept.items() if not self._is_end(trees[row], nodes[-1])]
        missing = [place for place in last if place not in seen]
        if missing:
            self._look(now, missing, seen)
        bonus: dict[int, int] = {}
        if last:
            best = torch.stack([seen[place][0] for place in last]).argmax(-1).tolist()
            bonus = {row: token for (row, _), token in zip(last, best, strict=True)}
        for row, nodes in kept.items():
            tokens = [trees[row].tokens[node] for node in nodes[1:]]
            tokens += [bonus[row]] if row in bonus else []
            for node, token in zip(nodes, tokens, strict=False):
                self._sampler.records.note(row, len(sequences.written[row]), *seen[row, node])
                now.paths[row].nodes.append(node)
                now.paths[row].tokens.append(token)
                sequences.written[row].append(token)
                if self._ends(row, token):
                    sequences.finish(row)
                    break

    def _is_end(self, tree: TokenTree, node: int) -> bool:
        return node > 0 and tree.tokens[node] in self._sequences.end_tokens

    def _look(self, now: Pass, places: Sequence[Place], seen: dict[Place, tuple[Tensor, Tensor]]) -> Tensor:
        """Processed scores ``[place, vocab]``, each along the node's own prefix; they are noted in ``seen``."""
        raw = self._sampler.logits(now, places)
        processed = self._sampler.process(places, raw, now.trees)
        self._sampler.check_probabilities(processed.softmax(-1), [row for row, _ in places])
        seen.update(zip(places, zip(processed, raw, strict=True), strict=True))
        return processed
