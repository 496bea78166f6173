"""Block drafters: decoding with one, which runs once a pass for all sequences of a call, as a source of candidates."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from itertools import chain
from math import exp, log, nan
from os import PathLike
from time import perf_counter
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from jacobi import Path, Successors, TokenTree
from lookahead.draft.context import CallContext, Drafts, RowContext
from lookahead.heads.base import HeadStrategy, fixed_tree
from lookahead.heads.block.head import BlockHead, Reading
from lookahead.heads.block.network import NOWHERE, BlockNetwork, Pairs
from lookahead.models.hidden_states import HiddenStates
from lookahead.models.output_layer import output_layer
from lookahead.sources.draft_model import BEST, DRAWN_PRIORS, GREEDY_PRIORS, Branch, Said
from lookahead.sources.perturbed import BINS, BOUNDS, Draw, Offer, offer
from lookahead.strategies.automatic import DEFAULT_SOURCES, FREE_SOURCES

_DEPTHS = 8  # that are told apart; deeper ones count as the last
_DEEPER = 0.957  # of what is expected is kept a level further down: published drafters fall from 0.90 to 0.69 in seven
_LEAST = 1e-6  # of a share and of what is beside it


class Found:
    """What a block says of one sequence: each slot's best tokens ``[slot, rank]``, their scores whatever stands before
    and behind each of the best before, ``[slot, before, rank]``, and the log-odds of each line's best one."""

    def __init__(self, said: np.ndarray) -> None:
        self.tokens, self._alone = said[:, 0].view(np.int32), said[:, 1]
        self._odds, self._pairs = said[:, 2], said[:, 3:]

    def after(self, depth: int, token: int) -> tuple[np.ndarray, np.ndarray, float]:
        """Tokens behind a node, best first, with scores; and the log-odds of the first."""
        places = (self.tokens[depth - 1] == token).nonzero()[0] if depth else [0]
        place = int(places[0]) if len(places) else -1
        scores = self._alone[depth] if place < 0 or not self._pairs.shape[1] else self._pairs[depth, place]
        order = (-scores).argsort(kind="stable")
        return self.tokens[depth][order], scores[order], float(self._odds[depth, place])


class BlockCandidates:
    """What a drafter says below the next root of every sequence of a call. It runs once a pass, when the first sequence
    asks, for all that wrote something since; until then only features of what was written are kept."""

    def __init__(self, head: BlockHead, model: Any, hidden: HiddenStates, batch: int, vocab_size: int) -> None:
        self.spent_ms = 0.0  # time that the drafter has taken
        self._head, self._model, self._hidden = head, model, hidden
        self._vocab_size, self._taps = vocab_size, head.taps(model)
        self._reading: Reading | None = None
        self._batch = batch
        self._memory: list[Tensor] = []  # positions [row, place]; keys and values of each layer, [row, place, ...]
        self._new: dict[int, list[Tensor]] = {}  # by sequence, features that are not read yet, [token, tap, channel]
        self._roots: dict[int, tuple[int, int]] = {}  # position and token of each next one
        self._prompts: dict[int, Sequence[int]] = {}  # as far as there are features of them
        self._written: set[int] = set()  # sequences that have since the drafter ran for them
        self._found: dict[int, Found] = {}

    def start(self, row: int, prompt: Sequence[int]) -> None:
        """Take the prompt's features, which the last pass has left: of its last tokens only, where a cache was
        continued or the prompt was read in chunks; of one, where it was given as embeddings."""
        features = self._features(row)
        count = min(len(features), max(1, len(prompt)))
        self._new[row], self._prompts[row] = [features[-count:].clone()], prompt[len(prompt) - count :]
        self._roots[row] = max(len(prompt), count), -1

    def write(self, row: int, path: Path) -> None:
        at, root = self._roots[row]
        if root >= 0:  # else it is the first token, behind all features of the prompt
            self._new.setdefault(row, []).append(self._features(row)[torch.tensor(path.nodes)])
            at += len(path.tokens)
        self._roots[row] = at, path.tokens[-1]
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
            row = max(self._prompts, key=lambda row: len(self._prompts[row]))
            read = partial(self._read, self._new[row][0])
            self._reading = self._head.tried(self._model, self._prompts[row], read)
        new = [self._read(torch.cat(self._new.pop(row)), self._reading) for row in rows]
        numbers = [(row, *self._roots[row], len(each)) for row, each in zip(rows, new, strict=True)]
        where, at, anchors, counts = torch.tensor(numbers, device=new[0].device).T
        joined = pad_sequence(new, batch_first=True)
        slots = torch.arange(joined.shape[1], device=joined.device)
        positions = (at - counts)[:, None] + slots
        pairs = network.remember(joined, positions)
        text, places = self._grown(where, [positions.masked_fill(slots >= counts[:, None], NOWHERE), *chain(*pairs)])
        embed, output, first = self._model.get_input_embeddings(), output_layer(self._model), self._reading.anchor_first
        hidden = network(anchors[:, None], at[:, None], text, places, embed)[:, 0, not first :]
        known = self._vocab_size if network.d2t is None else None
        logs = network.logits(hidden, output)[..., :known].log_softmax(-1)
        said = best_behind(network, hidden, logs, anchors).cpu().numpy()
        self._found.update((row, Found(each)) for row, each in zip(rows, said, strict=True))
        self.spent_ms += 1e3 * (perf_counter() - start)

    def _grown(self, rows: Tensor, given: Sequence[Tensor]) -> tuple[list[Pairs], Tensor]:
        """Keys and values of the texts of ``rows`` and their positions, with what is ``given`` behind. Texts grow each
        at its own pace: where one has less, nothing stands."""
        new = [each.new_zeros(self._batch, *each.shape[1:]).index_copy(0, rows, each) for each in given]
        new[0][torch.isin(torch.arange(self._batch, device=rows.device), rows, invert=True)] = NOWHERE
        self._memory = [torch.cat(both, 1) for both in zip(self._memory, new, strict=True)] if self._memory else new
        places, *held = self._memory if len(rows) == self._batch else [each[rows] for each in self._memory]
        return list(zip(held[::2], held[1::2], strict=True)), places


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
    kind is the depth, whether one is the best, and its share (under the noise of ``draw`` where tokens are drawn), of
    the best one in the middle between that and what the confidence head says."""

    name = "block"

    def __init__(self, candidates: BlockCandidates, row: int, draw: Draw | None) -> None:
        priors = GREEDY_PRIORS if draw is None else DRAWN_PRIORS
        self.priors = [prior * _DEEPER**depth for depth in range(_DEPTHS) for prior in priors]
        self._candidates, self._row, self._draw = candidates, row, draw or Draw(lambda index: None)
        self._index = 0  # of the next token
        self._offers: dict[tuple[int, int], Offer] = {}

    @property
    def spent_ms(self) -> float:
        return self._candidates.spent_ms

    def start(self, prompt: Sequence[int], successors: Successors | None = None) -> None:
        self._candidates.start(self._row, prompt)

    def root(self) -> tuple[int, int]:
        return 0, -1

    def step(self, state: tuple[int, int], token: int) -> tuple[int, int]:
        return state[0] + 1, token

    def propose(self, state: tuple[int, int]) -> Offer:
        if state not in self._offers:
            self._offers[state] = self._offer(*state)
        return self._offers[state]

    def _offer(self, depth: int, token: int) -> Offer:
        found = self._candidates.of(self._row)
        if found is None or depth >= len(found.tokens):
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


@dataclass(frozen=True)
class Block(HeadStrategy):
    """Decoding with a block drafter: DFlash, DSpark or JetSpec.

    The drafter fills a block of masked places behind the text's last token in one pass, from the model's features, and
    is one source among others in the automatic mode's tree. The text is plain ``generate``'s, greedy and sampled.

    Attributes:
        head: the drafter; a folder or hub name that holds it, which is read once; or Muse Glimmer's assistant.
        sources: where candidates come from, in the order of credit: ``"block"``, and any that
            :class:`lookahead.Lookahead` knows.
        tree: ``"chain"`` drafts the best token of every place from the drafter alone, in place of the automatic tree.
        nodes, max_nodes, tuning, remember: see :class:`lookahead.Lookahead`.
        verification, seed, stats, static: see :class:`lookahead.strategies.base.Strategy`.

    For example::

        model.generate(**inputs, custom_generate=Block("folder of the drafter"))
    """

    name: ClassVar[str] = "block"
    known_sources: ClassVar[tuple[str, ...]] = ("block", *FREE_SOURCES)
    kind: ClassVar[type[BlockHead]] = BlockHead
    expected: ClassVar[str] = "a BlockHead or the folder it lies in"
    title: ClassVar[str] = "The block drafter is"

    head: BlockHead | str | PathLike[str] | None = None
    _: KW_ONLY
    tree: Literal["chain"] | None = None

    def __post_init__(self) -> None:
        if isinstance(given := self.head, PreTrainedModel) and type(given).__name__ in BlockHead.assistants:
            object.__setattr__(self, "head", BlockHead.of(given))
        super().__post_init__()

    @property
    def draws_candidates(self) -> bool:
        """Never: what is said of a place goes for many nodes."""
        return False

    def taps(self, model: PreTrainedModel) -> tuple[str, ...]:
        return self.heads_for(model).taps(model)

    def drafts(self, call: CallContext) -> Drafts:
        head, rows = self.heads_for(call.model), call.rows
        assert call.hidden is not None  # it is wanted
        candidates = BlockCandidates(head, call.model, call.hidden, len(rows), rows[0].vocab_size)

        def made(row: RowContext, _: object = None) -> BlockSource:
            return BlockSource(candidates, row.index, row.draw)

        if self.tree is None:
            return self.automatic_drafts(call, self.sources or (self.name, *DEFAULT_SOURCES), {self.name: made})
        chain = [(0,) * depth for depth in range(1, head.network.sizes.block_size + 1)]
        return self._drafts_of(call, made, partial(fixed_tree, chain))
