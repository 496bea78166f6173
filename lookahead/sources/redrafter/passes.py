"""A recurrent head beside one sequence: what it says after branches."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from jacobi import Path
from lookahead.sources.draft_model import BEST, Branch, Said
from lookahead.sources.redrafter.head import RecurrentHead
from lookahead.sources.vocabularies import SameVocabulary


class RecurrentPasses:
    """What a head says at the nodes of one sequence's drafts.

    States live for one draft: where the text goes on, they begin anew at its last token::

        text    once upon a        h: read at "upon"; s("a") from nothing
        draft   a -+- time - ,     s("a", "time") from s("a"), s("a", "time", ",") from that
                   +- day          s("a", "day") from s("a"), too

    Args:
        features: gives what the model's output layer read in the last pass, ``[row, node, hidden]``.
        embed: the model's embeddings.
        vocab_size: tokens that the model can be fed.
    """

    def __init__(
        self, head: RecurrentHead, features: Callable[[], Tensor], row: int, embed: nn.Module, vocab_size: int
    ) -> None:
        self._head, self._features, self._row, self._embed = head, features, row, embed
        self._vocabulary = SameVocabulary(vocab_size, vocab_size)
        self._hidden = torch.empty(0)  # [hidden], where the last token was chosen
        self._root = -1
        self._states: dict[Branch, Tensor] = {}  # [hidden], of the last token's own state and below

    def start(self, prompt: Sequence[int]) -> None:
        """Nothing: of the prompt, only where its next token was chosen matters."""

    def write(self, path: Path) -> None:
        """The text goes on along a path of the last pass."""
        self._hidden = self._features()[self._row, path.nodes[-1]].to(self._head.weight, copy=True)
        self._root = path.tokens[-1]
        self._states.clear()

    @torch.no_grad()
    def after(self, branches: Sequence[Branch]) -> list[Said | None]:
        """What the head says after each branch."""
        missing = {branch[:end] for branch in branches for end in range(len(branch) + 1)} - self._states.keys()
        for depth in sorted({len(branch) for branch in missing}):
            self._step(sorted(branch for branch in missing if len(branch) == depth))
        states = torch.stack([self._states[branch] for branch in branches])
        scores = self._head(self._hidden.expand(len(branches), -1), states).float()
        values, ids = scores.topk(min(BEST, scores.shape[-1]))
        told = zip(np.asarray(ids.cpu()), np.asarray(values.cpu()), strict=True)
        return [self._vocabulary.proposed(*line) for line in told]

    def _step(self, branches: Sequence[Branch]) -> None:
        """Take in the last tokens of branches of one depth, whose parents are known."""
        weight = self._head.weight
        tokens = torch.tensor([branch[-1] if branch else self._root for branch in branches], device=weight.device)
        nothing = torch.zeros_like(self._hidden)
        above = torch.stack([self._states[branch[:-1]] if branch else nothing for branch in branches])
        self._states.update(zip(branches, self._head.step(above, self._embed(tokens).to(weight)), strict=True))
