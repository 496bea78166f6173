"""An EAGLE head beside one sequence: what it says after branches, from the model's features of the text."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from jacobi import Path
from lookahead.models.hidden_states import HiddenStates
from lookahead.sources.draft_model import BEST, Branch, Said
from lookahead.sources.eagle.network import EagleNetwork, PairCache
from lookahead.sources.vocabularies import SameVocabulary


class EaglePasses:
    """What a head says at the nodes of one sequence's drafts.

    A pair is a feature of the model at a token, and the token after it. Pairs of the text are *stable*; those of a
    draft take the head's own outputs for features, and go when the text goes on::

        text       once   upon   a      time              tokens 0 to 3, of which the last is the next root
        features   h0     h1     h2
        pairs      (h0, upon)  (h1, a)  (h2, time) -> z   scores the root's children
        draft      (z, there)  position 3          -> z'  scores those of the branch "there"

    Args:
        features: gives the model's features of the last pass, ``[row, node, channel]``.
        embed, output: the model's own, used where the head has none.
        vocab_size: tokens that the model can be fed.
    """

    def __init__(
        self,
        network: EagleNetwork,
        features: Callable[[], Tensor],
        row: int,
        embed: nn.Module,
        output: nn.Module,
        vocab_size: int,
    ) -> None:
        weight = network.fc.weight
        self._network, self._features, self._row = network, features, row
        self._embed, self._output = network.embed_tokens or embed, output
        self._vocabulary = SameVocabulary(vocab_size, vocab_size)
        self._weight = weight  # whose device and dtype are the head's
        self._cache = PairCache(network.sizes.layers)
        self._stable = 0
        self._new: list[tuple[Tensor, list[int]]] = []  # features and next tokens that are still to be fed
        self._seen: dict[Branch, tuple[int, Tensor]] = {}  # place in the cache, and what came out
        self._starts = False

    def start(self, prompt: Sequence[int]) -> None:
        """Take the prompt's features, which the last pass has left."""
        self._new = [(self._features()[self._row, -len(prompt) :].clone(), list(prompt[1:]))]
        self._starts = True

    def write(self, path: Path) -> None:
        """The text goes on along a path of the last pass."""
        if self._starts:
            self._starts = False
            self._new[0][1].extend(path.tokens)
        else:
            nodes = torch.tensor(path.nodes)
            self._new.append((self._features()[self._row][nodes], list(path.tokens)))
        self._cache.crop(self._stable)
        self._seen.clear()

    @torch.no_grad()
    def after(self, branches: Sequence[Branch]) -> list[Said | None]:
        """What the head says after each branch."""
        if self._new:
            self._read_text()
        missing = {branch[:end] for branch in branches for end in range(1, len(branch) + 1)} - self._seen.keys()
        for depth in sorted({len(branch) for branch in missing}):
            self._grow(sorted(branch for branch in missing if len(branch) == depth))
        out = torch.stack([self._seen[branch][1] for branch in branches])
        scores = self._network.logits(out, self._output).float().log_softmax(-1)
        values, ids = scores.topk(min(BEST, scores.shape[-1]))
        offsets = self._network.d2t
        tokens = ids if offsets is None else ids + offsets[ids]
        told = zip(np.asarray(tokens.cpu()), np.asarray(values.cpu()), strict=True)
        return [self._vocabulary.proposed(*line) for line in told]

    def _read_text(self) -> None:
        features = torch.cat([each for each, _ in self._new]).to(self._weight)
        tokens = [token for _, each in self._new for token in each]
        count, before = len(tokens), self._stable
        mask = torch.ones(count, before + count, dtype=torch.bool, device=features.device).tril(before)
        out = self._pass(features, tokens, range(before, before + count), mask, fed_back=False)
        self._new, self._stable = [], before + count
        self._seen = {(): (-1, out[-1])}

    def _grow(self, branches: Sequence[Branch]) -> None:
        """Feed nodes of one depth: each sees the stable pairs, its ancestors and itself."""
        held, stable = self._cache.length, self._stable
        mask = torch.zeros(len(branches), held + len(branches), dtype=torch.bool)
        mask[:, :stable] = True
        for line, branch in enumerate(branches):
            mask[line, [self._seen[branch[:end]][0] for end in range(1, len(branch))] + [held + line]] = True
        above = torch.stack([self._seen[branch[:-1]][1] for branch in branches])
        positions = [stable + len(branch) - 1 for branch in branches]
        out = self._pass(above, [branch[-1] for branch in branches], positions, mask, fed_back=True)
        for line, branch in enumerate(branches):
            self._seen[branch] = held + line, out[line]

    def _pass(
        self, features: Tensor, tokens: Sequence[int], positions: Sequence[int], mask: Tensor, fed_back: bool
    ) -> Tensor:
        device, network = features.device, self._network
        embedded = self._embed(torch.tensor(tokens, device=device)).to(self._weight)
        states = network.joined(features, embedded, fed_back)
        return network(states, embedded, torch.tensor(positions, device=device), self._cache, mask.to(device))


def joined_features(hidden: HiddenStates, taps: Sequence[str], norm: nn.Module | None) -> Callable[[], Tensor]:
    """How a head's features are read of the model's last pass: the states of all ``taps`` side by side, or of one,
    after the model's final ``norm``."""

    def read() -> Tensor:
        states = [hidden.of(tap) for tap in taps]
        return torch.cat(states, dim=-1) if norm is None else norm(states[0])

    return read
