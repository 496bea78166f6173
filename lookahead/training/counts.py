"""How often each head's candidates are right, counted over many tokens."""

from typing import Any

import torch
from torch import Tensor

from lookahead.sources.medusa.accuracies import HeadAccuracies
from lookahead.sources.medusa.heads import MedusaHeads
from lookahead.training.data import IGNORE

_LOGITS = 1 << 24  # numbers that the heads may make at once: 64 MB in float32


class HeadCounts:
    """Right guesses of each head, by rank.

    Args:
        heads: the heads.
        output: the model's output layer.
        vocab_size: tokens that it scores.
        ranks: candidates of each head to look at.

    Attributes:
        samples: ``[head]``, how many tokens each head was asked for.
    """

    def __init__(self, heads: MedusaHeads, output: Any, vocab_size: int, ranks: int) -> None:
        self.samples = [0] * heads.num_heads
        self._hits = torch.zeros(heads.num_heads, ranks, dtype=torch.long)
        self._heads = heads
        self._output = output
        self._ranks = min(ranks, vocab_size)
        self._at_once = max(1, _LOGITS // (heads.num_heads * vocab_size))

    def add(self, hidden: Tensor, labels: Tensor) -> None:
        """Compare one text with what the heads guess: head k at token t with the label of token t + k + 2.

        Args:
            hidden: what the output layer reads, ``[token, hidden]``; the last two tokens' may be left out.
            labels: token ids ``[token]``, :data:`IGNORE` where nothing is to be guessed.
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
