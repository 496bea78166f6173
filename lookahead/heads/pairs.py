"""Heads beside one sequence that read pairs of a feature and a token, as EAGLE's: what they say after branches."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from jacobi import Path
from lookahead.heads.base import best_next
from lookahead.models.hidden_states import HiddenStates
from lookahead.sources.draft_model import Branch, Said

_CHUNK = 512  # pairs of a text that are read at a time, so that masks of long prompts stay small


class PairPasses:
    """What a head says at the nodes of one sequence's drafts.

    A pair is a feature of the model at a token, and the token after it. Pairs of the text are *stable*; those of a
    draft take the head's own outputs for features, and go when the text goes on::

        text       once   upon   a      time              tokens 0 to 3, of which the last is the next root
        features   h0     h1     h2
        pairs      (h0, upon)  (h1, a)  (h2, time) -> z   scores the root's children
        draft      (z, there)  position 3          -> z'  scores those of the branch "there"

    Where a head has several networks, each has a cache of its own, and they take turns: number d modulo their count
    speaks at depth d. Each reads what the one before it gave, one token later, as far as that goes back to the text::

        network 0  (h0, upon) -> y0   (h1, a) -> y1   (h2, time) -> z   | speaks below the root
        network 1                     (y0, a) -> x0   (y1, time) -> x1  | (z, there) -> z'   speaks below "there"
        network 2                                     (x0, time) -> ..  | (x1, there) -> ..  (z', was) -> z''

    Args:
        networks: each with its empty cache of pairs, which has a ``length`` and can ``crop``. It has ``joined``,
            ``forward`` and ``logits`` as :class:`lookahead.heads.eagle.network.EagleNetwork`, and the offsets ``d2t``.
        weight: a tensor whose device and dtype are the head's.
        features: gives the model's features of the last pass, ``[row, node, channel]``.
        embed, output: by which tokens are embedded, and by which outputs are scored where a network does not itself.
        vocab_size: tokens that the model can be fed.
    """

    def __init__(
        self,
        networks: Sequence[tuple[Any, Any]],
        weight: Tensor,
        features: Callable[[], Tensor],
        row: int,
        embed: Callable[[Tensor], Tensor],
        output: nn.Module,
        vocab_size: int,
    ) -> None:
        self._networks, self._features, self._row = networks, features, row
        self._embed, self._output, self._weight = embed, output, weight
        self._vocab_size = vocab_size
        self._stable = [0] * len(networks)  # pairs of the text, in each cache
        self._waiting: dict[int, Tensor] = {}  # by network, the feature whose next token is not known yet
        self._new: list[tuple[Tensor, list[int]]] = []  # features and next tokens that are still to be fed
        self._seen: dict[Branch, dict[int, tuple[int, Tensor]]] = {}  # by network: place in its cache, what came out
        self._starts = False

    def start(self, prompt: Sequence[int]) -> None:
        """Take the prompt's features, which the last pass has left: of its last tokens only, where a cache was
        continued or the prompt was read in chunks; of one, where it was given as embeddings."""
        features = self._features()[self._row]
        count = min(len(features), max(1, len(prompt)))
        self._new = [(features[-count:].clone(), list(prompt[len(prompt) - count + 1 :]))]
        self._starts = True

    def write(self, path: Path) -> None:
        if self._starts:
            self._starts = False
            self._new[0][1].extend(path.tokens)
        else:
            nodes = torch.tensor(path.nodes)
            self._new.append((self._features()[self._row][nodes], list(path.tokens)))
        for (_, cache), stable in zip(self._networks, self._stable, strict=True):
            cache.crop(stable)
        self._seen.clear()

    @torch.no_grad()
    def after(self, branches: Sequence[Branch]) -> list[Said | None]:
        if self._new:
            self._read_text()
        missing = {branch[:end] for branch in branches for end in range(1, len(branch) + 1)} - self._seen.keys()
        for depth in sorted({len(branch) for branch in missing}):
            self._grow(sorted(branch for branch in missing if len(branch) == depth))
        said: list[Said | None] = [None] * len(branches)
        for turn, (network, _) in enumerate(self._networks):
            asked = [index for index, branch in enumerate(branches) if len(branch) % len(self._networks) == turn]
            if asked:
                out = torch.stack([self._seen[branches[index]][turn][1] for index in asked])
                logs = network.logits(out, self._output).float().log_softmax(-1)
                for index, line in zip(asked, best_next(logs, self._vocab_size, network.d2t), strict=True):
                    said[index] = line
        return said

    def _read_text(self) -> None:
        features = torch.cat([each for each, _ in self._new]).to(self._weight)
        tokens = [token for _, each in self._new for token in each]
        end = self._stable[0] + len(tokens)
        root = self._seen[()] = {}
        for turn in range(len(self._networks)):
            if turn:
                features = torch.cat([self._waiting.get(turn, features[:0]), features])
                self._waiting[turn], features = features[-1:], features[:-1]
            if not (count := len(features)):
                continue
            features = self._read_pairs(turn, features, tokens[-count:], end - count)
            self._stable[turn] += count
            self._networks[turn][1].crop(self._stable[turn])  # all that it holds is text
            root[turn] = -1, features[-1]
        self._new = []

    def _read_pairs(self, turn: int, features: Tensor, tokens: Sequence[int], position: int) -> Tensor:
        """What comes out for pairs of the text, each of which sees those before it; the first is at ``position``."""
        out = []
        for start in range(0, len(tokens), _CHUNK):
            part, before = tokens[start : start + _CHUNK], self._stable[turn] + start
            mask = torch.ones(len(part), before + len(part), dtype=torch.bool, device=features.device).tril(before)
            places = range(position + start, position + start + len(part))
            out.append(self._pass(turn, features[start : start + len(part)], part, places, mask, fed_back=turn > 0))
        return torch.cat(out)

    def _grow(self, branches: Sequence[Branch]) -> None:
        """Feed nodes of one depth, to the network whose turn it is and to those that still read what the text gave."""
        depth, turns = len(branches[0]), len(self._networks)
        for branch in branches:
            self._seen[branch] = {}
        for turn in range(depth, turns) if depth < turns else (depth % turns,):
            if (turn - 1) % turns in self._seen[branches[0][:-1]]:  # else the text is too short
                self._feed(turn, branches)

    def _feed(self, turn: int, branches: Sequence[Branch]) -> None:
        """Each node sees the stable pairs, its ancestors and itself."""
        held, before = self._networks[turn][1].length, (turn - 1) % len(self._networks)
        mask = torch.zeros(len(branches), held + len(branches), dtype=torch.bool)
        mask[:, : self._stable[turn]] = True
        for line, branch in enumerate(branches):
            above = [self._seen[branch[:end]] for end in range(1, len(branch))]
            mask[line, [each[turn][0] for each in above if turn in each] + [held + line]] = True
        features = torch.stack([self._seen[branch[:-1]][before][1] for branch in branches])
        positions = [self._stable[0] + len(branch) - 1 for branch in branches]
        out = self._pass(turn, features, [branch[-1] for branch in branches], positions, mask, fed_back=True)
        for line, branch in enumerate(branches):
            self._seen[branch][turn] = held + line, out[line]

    def _pass(
        self, turn: int, features: Tensor, tokens: Sequence[int], positions: Sequence[int], mask: Tensor, fed_back: bool
    ) -> Tensor:
        device, (network, cache) = features.device, self._networks[turn]
        embedded = self._embed(torch.tensor(tokens, device=device)).to(self._weight)
        states = network.joined(features, embedded, fed_back)
        return network(states, embedded, torch.tensor(positions, device=device), cache, mask.to(device))


def joined_features(hidden: HiddenStates, taps: Sequence[str], norm: nn.Module | None) -> Callable[[], Tensor]:
    """Reads a head's features of the last pass: states of ``taps`` side by side, or of one after the final ``norm``."""

    def read() -> Tensor:
        states = [hidden.of(tap) for tap in taps]
        return torch.cat(states, dim=-1) if norm is None else norm(states[0])

    return read
