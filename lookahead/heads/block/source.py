"""A block drafter as a source of candidates: run once a pass for all sequences of a call."""

from bisect import bisect_right
from collections.abc import Sequence
from math import exp, log, nan
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from jacobi import Path, Successors, TokenTree
from lookahead.heads.block.head import BlockHead, Reading
from lookahead.heads.block.network import NOWHERE, BlockNetwork, Pairs
from lookahead.models.hidden_states import HiddenStates
from lookahead.models.output_layer import output_layer
from lookahead.sources.draft_model import BEST, DRAWN_PRIORS, GREEDY_PRIORS, Branch, Said
from lookahead.sources.perturbed import BINS, BOUNDS, Draw, Offer, offer

_DEPTHS = 8  # that are told apart; deeper ones count as the last
# Of what is expected of a candidate, is kept a level further down: first drafts of published drafters of seven tokens
# are kept at rates that fall from 0.90 to 0.69.
_DEEPER = 0.957
_LEAST = 1e-6  # of a share and of what is beside it
_ROOM = 64  # places by which a text's memory grows at least

State = tuple[int, int]  # how deep a node is, and its token


class TextMemory:
    """Keys and values of the text, for each layer ``[row, place, key head, channel]``, of sequences that grow each at
    its own pace; and at which positions they stand, ``[row, place]``."""

    def __init__(self, batch: int) -> None:
        self._lengths = np.zeros(batch, np.int64)
        self.places = torch.empty(0)
        self._held: list[Pairs] = []

    def append(self, rows: Tensor, positions: Tensor, pairs: Sequence[Pairs], counts: Sequence[int]) -> None:
        """Take in ``pairs`` of some rows, of which so many count; the others stand nowhere."""
        lengths, most = self._lengths[rows.tolist()], positions.shape[1]
        if not self._held or lengths.max() + most > self.places.shape[1]:
            self._grow(positions, pairs, int(lengths.max()) + most)
        at = torch.from_numpy(lengths)[:, None].to(rows.device) + torch.arange(most, device=rows.device)
        self.places[rows[:, None], at] = positions
        for held, given in zip(self._held, pairs, strict=True):
            for whole, part in zip(held, given, strict=True):
                whole[rows[:, None], at] = part
        self._lengths[rows.tolist()] += counts

    def _grow(self, positions: Tensor, pairs: Sequence[Pairs], needed: int) -> None:
        size, batch = max(needed + _ROOM, needed * 5 // 4), len(self._lengths)
        places = positions.new_full((batch, size), NOWHERE)
        held = [tuple(each.new_zeros((batch, size, *each.shape[2:])) for each in pair) for pair in pairs]
        if self._held:
            places[:, : self.places.shape[1]] = self.places
            for new, old in zip(held, self._held, strict=True):
                for whole, part in zip(new, old, strict=True):
                    whole[:, : part.shape[1]] = part
        self.places, self._held = places, held  # type: ignore[assignment]

    def of(self, rows: Tensor) -> tuple[list[Pairs], Tensor]:
        """What is held of ``rows``, and its positions."""
        most = int(self._lengths[rows.tolist()].max())
        if len(rows) == len(self._lengths):
            return [(keys[:, :most], values[:, :most]) for keys, values in self._held], self.places[:, :most]
        return [(keys[rows, :most], values[rows, :most]) for keys, values in self._held], self.places[rows, :most]


class Found:
    """What a block says of one sequence: each slot's best tokens ``[slot, rank]``, their scores whatever stands before
    and behind each of the best before, ``[slot, before, rank]``, and the log-odds of each line's best one.
    """

    def __init__(self, said: np.ndarray) -> None:
        self._tokens, self._alone = said[:, 0].view(np.int32), said[:, 1]
        self._odds, self._pairs = said[:, 2], said[:, 3:]

    def __len__(self) -> int:
        return len(self._tokens)

    def after(self, depth: int, token: int) -> tuple[np.ndarray, np.ndarray, float]:
        """Tokens behind a node, best first, with scores; and the log-odds of the first."""
        place = 0
        if depth:
            places = (self._tokens[depth - 1] == token).nonzero()[0]
            place = int(places[0]) if len(places) else -1
        scores = self._alone[depth] if place < 0 or not self._pairs.shape[1] else self._pairs[depth, place]
        order = (-scores).argsort(kind="stable")
        return self._tokens[depth][order], scores[order], float(self._odds[depth, place])


class BlockCandidates:
    """What a drafter says below the next root of every sequence of a call. It runs once a pass, when the first sequence
    asks, for all that wrote something since; until then only features of what was written are kept."""

    def __init__(self, head: BlockHead, model: Any, hidden: HiddenStates, batch: int, vocab_size: int) -> None:
        self.spent_ms = 0.0  # time that the drafter has taken
        self._head, self._model, self._hidden = head, model, hidden
        self._vocab_size, self._taps = vocab_size, head.taps(model)
        self._reading: Reading | None = None
        self._memory = TextMemory(batch)
        self._new: dict[int, list[Tensor]] = {}  # by sequence, features that are not read yet, [token, tap, channel]
        self._at, self._anchors = [0] * batch, [0] * batch  # position and token of each next root
        self._prompts: dict[int, Sequence[int]] = {}  # as far as there are features of them, until one was tried
        self._starts: set[int] = set()  # sequences that have written nothing yet
        self._written: set[int] = set()  # sequences that have since the drafter ran for them
        self._found: dict[int, Found] = {}

    def start(self, row: int, prompt: Sequence[int]) -> None:
        """Take the prompt's features, which the last pass has left: of its last tokens only, where a cache was
        continued or the prompt was read in chunks; of one, where it was given as embeddings."""
        features = self._features(row)
        count = min(len(features), max(1, len(prompt)))
        self._new[row], self._prompts[row] = [features[-count:].clone()], prompt[len(prompt) - count :]
        self._at[row] = max(len(prompt), count)
        self._starts.add(row)

    def write(self, row: int, path: Path) -> None:
        if row in self._starts:  # the first token, behind all features of the prompt
            self._starts.remove(row)
        else:
            self._new.setdefault(row, []).append(self._features(row)[torch.tensor(path.nodes)])
            self._at[row] += len(path.tokens)
        self._anchors[row] = path.tokens[-1]
        self._written.add(row)
        self._found.pop(row, None)

    def of(self, row: int) -> Found | None:
        if row in self._written:
            self._run(sorted(self._written))
            self._written.clear()
        return self._found.get(row)

    def _features(self, row: int) -> Tensor:
        return torch.stack([self._hidden.of(tap)[row] for tap in self._taps], dim=1)

    def _read(self, features: Tensor, reading: Reading) -> Tensor:
        """Features side by side, ``[token, channel]``."""
        return features[:, [self._taps.index(f"layer.{index}") for index in reading.layers]].flatten(1)

    @torch.no_grad()
    def _run(self, rows: list[int]) -> None:
        start, network = perf_counter(), self._head.network
        if self._reading is None:
            longest = max(self._prompts, key=lambda row: len(self._prompts[row]))
            features = self._new[longest][0]
            self._reading = self._head.tried(
                self._model, self._prompts[longest], lambda reading: self._read(features, reading)
            )
            self._prompts.clear()
        new = [self._read(torch.cat(self._new.pop(row)), self._reading) for row in rows]
        where, at, anchors, counts = torch.tensor(
            [rows, [self._at[row] for row in rows], [self._anchors[row] for row in rows], list(map(len, new))],
            device=new[0].device,
        )
        joined = pad_sequence(new, batch_first=True)
        slots = torch.arange(joined.shape[1], device=joined.device)
        positions = (at - counts)[:, None] + slots
        pairs = network.remember(joined, positions)
        self._memory.append(where, positions.masked_fill(slots >= counts[:, None], NOWHERE), pairs, list(map(len, new)))
        text, places = self._memory.of(where)
        embed, output, first = self._model.get_input_embeddings(), output_layer(self._model), self._reading.anchor_first
        hidden = network(anchors[:, None], at[:, None], text, places, embed)[:, 0, not first :]
        scores = network.logits(hidden, output)
        scores = scores[..., : self._vocab_size] if network.d2t is None else scores
        said = best_behind(network, hidden, scores.log_softmax(-1), anchors).cpu().numpy()
        self._found.update((row, Found(each)) for row, each in zip(rows, said, strict=True))
        self.spent_ms += 1e3 * (perf_counter() - start)


def best_behind(network: BlockNetwork, hidden: Tensor, logs: Tensor, anchors: Tensor) -> Tensor:
    """What :class:`Found` holds of each row, in one tensor ``[row, slot, 3 and before, rank]`` of 32 bits: for slots
    ``hidden`` ``[row, slot, hidden]``, their log-probabilities ``[row, slot, token]``, and ``anchors`` ``[row]``.

    A slot's tokens are the best whatever stands before, and behind the best token of the slot before. A recurrent
    Markov head's state is that of the best tokens, too: so its scores are exact along these.
    """
    markov, (batch, slots, vocab), found = network.markov_head, logs.shape, []
    count, lines = min(BEST, vocab), torch.arange(batch, device=logs.device)
    before, best = anchors[:, None].expand(-1, count), lines.new_zeros(batch)
    state: Tensor | None = None
    for slot in range(slots):
        alone, place = logs[:, slot], hidden[:, slot, None].expand(-1, count, -1)
        odds = network.confidence(place, before)
        said = [alone.new_full((batch, count), nan) if odds is None else odds]
        if markov is None:
            tokens = alone.topk(count).indices
        else:
            vectors, states = markov(before, place, state)
            along = alone + markov.markov_w2(vectors[lines, best])[..., :vocab].float()
            tokens = torch.maximum(alone, along.log_softmax(-1)).topk(count).indices
            added = vectors @ markov.markov_w2.weight[tokens].transpose(1, 2)
            said += (alone.gather(1, tokens)[:, None] + added.float()).unbind(1)
            if states is not None:
                state = states[lines, best][:, None].expand(-1, count, -1)
            best = along.gather(1, tokens).argmax(-1)
        before = tokens if network.d2t is None else tokens + network.d2t[tokens]
        found.append(torch.stack([before.int().view(torch.float32), alone.gather(1, tokens), *said], dim=1))
    return torch.stack(found, dim=1)


class BlockSource:
    """A drafter as one source among others, and alone: a node's candidates depend on its depth and its token. Their
    kind is the depth, whether one is the best, and its share: its own under the noise of ``draw`` where tokens are
    drawn, and in the middle between that and what the confidence head says of it, if there is one."""

    name = "block"

    def __init__(self, candidates: BlockCandidates, row: int, draw: Draw | None) -> None:
        priors = GREEDY_PRIORS if draw is None else DRAWN_PRIORS
        self.priors = [prior * _DEEPER**depth for depth in range(_DEPTHS) for prior in priors]
        self._candidates, self._row, self._draw = candidates, row, draw or Draw(lambda index: None)
        self._index = 0  # of the next token
        self._offers: dict[State, Offer] = {}

    @property
    def spent_ms(self) -> float:
        return self._candidates.spent_ms

    def start(self, prompt: Sequence[int], successors: Successors | None = None) -> None:
        self._candidates.start(self._row, prompt)

    def root(self) -> State:
        return 0, -1

    def step(self, state: State, token: int) -> State:
        return state[0] + 1, token

    def propose(self, state: State) -> Offer:
        if state not in self._offers:
            self._offers[state] = self._offer(*state)
        return self._offers[state]

    def _offer(self, depth: int, token: int) -> Offer:
        found = self._candidates.of(self._row)
        if found is None or depth >= len(found):
            return []
        tokens, scores, odds = found.after(depth, token)
        shares = self._draw.shares(tokens[None], self._draw.chances(scores[None]), self._draw.line(self._index + depth))
        first = 2 * BINS * min(depth, _DEPTHS - 1)
        best = [(each, first + level + BINS * (rank > 0)) for rank, (each, level) in enumerate(offer(shares))]
        if best and odds == odds:  # not NaN
            share = min(max(shares[best[0][0]], _LEAST), 1.0 - _LEAST)
            both = 1.0 / (1.0 + exp(-(log(share / (1.0 - share)) + odds) / 2.0))
            best[0] = best[0][0], first + bisect_right(BOUNDS, both)
        return best

    def learn(self, tree: TokenTree, path: Path, successors: Successors | None) -> None:
        self.write(path)

    def write(self, path: Path) -> None:
        self._offers.clear()
        self._index += len(path.tokens)
        self._candidates.write(self._row, path)

    def after(self, branches: Sequence[Branch]) -> list[Said]:
        """The candidates of each branch's last node, best first; only their order means something."""
        offers = [self.propose((len(branch), branch[-1] if branch else -1)) for branch in branches]
        return [(np.array([token for token, _ in each], np.int64), np.zeros(len(each))) for each in offers]
