"""Medusa's heads as a source of candidates: run once a pass for all sequences of a call."""

import math
from bisect import bisect_right
from collections.abc import Callable, Hashable, Sequence
from time import perf_counter

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from jacobi import Path, Successors, TokenTree
from lookahead._per_model import PerModel, latest
from lookahead.draft.planner import Planner
from lookahead.heads.base import ResBlock
from lookahead.heads.medusa.heads import MedusaHeads
from lookahead.heads.medusa.network import OutputLayer, best_of
from lookahead.models.fingerprint import is_hooked, weights_stamp
from lookahead.models.hidden_states import HiddenStates
from lookahead.sources.base import RANKS
from lookahead.sources.draft_model import Branch, Said
from lookahead.sources.perturbed import BINS, Draw, Offer

_STEPS = tuple(0.75 * step for step in range(-6, 8))  # strengths at which the next level begins
_LEVELS = len(_STEPS) + 1
_PRIORS = tuple(1.0 / (1.0 + math.exp(0.375 - strength)) for strength in (*_STEPS, _STEPS[-1] + 0.75))
DRAWN = 32  # candidates of a head where tokens are drawn
_DRAWN_PRIORS = (0.01, 0.015, 0.025, 0.045, 0.1, 0.2, 0.35, 0.5, 0.6, 0.7, 0.75, 0.8)  # by the bin of a share
_MOST_BYTES = 4 << 20  # of a block's weight; with larger ones the products themselves take the time
_MOST_COPIED = 64 << 20  # bytes of all weights together, which are held twice

Heard = list[tuple[list[int], list[float]]]  # of each head: tokens and their log-probabilities, best first
States = Callable[[Tensor], Tensor]  # from [token, hidden] to what the output layers read, [head, token, hidden]

_stacks: PerModel[dict[Hashable, States]] = PerModel(dict)  # of each heads' module, by the stamp of its weights


class HeadCandidates:
    """The ``most`` best candidates of every head among the ``vocab_size`` tokens that the model can be fed, for all
    sequences of a call. The heads run on accepted nodes only: once a pass, when the first sequence drafts its next
    tree, for all sequences that wrote something in the last pass, with one transfer to the host."""

    def __init__(self, heads: MedusaHeads, output: nn.Module, hidden: HiddenStates, most: int, vocab_size: int) -> None:
        self.num_heads = heads.num_heads
        self.spent_ms = 0.0  # time that the heads have taken
        self._heads = fast_heads(heads)
        self._output, self._hidden = output, hidden
        self._count, self._vocab_size = min(most, vocab_size), vocab_size
        self._found: dict[int, Heard] = {}  # by sequence
        self._nodes: dict[int, int] = {}  # by sequence, where the heads have not run yet
        self._pass = 0

    def note(self, sequence: int, node: int) -> None:
        if self._pass != self._hidden.passes:  # hidden states of earlier passes are gone
            self._nodes.clear()
            self._pass = self._hidden.passes
        self._found.pop(sequence, None)
        self._nodes[sequence] = node

    def of(self, sequence: int) -> Heard:
        """What the heads say below a sequence's next root; nothing if nobody asked right after its last pass."""
        if self._nodes and self._pass == self._hidden.passes:
            self._run()
        return self._found.get(sequence, [])

    @torch.no_grad()
    def _run(self) -> None:
        start, hidden = perf_counter(), self._hidden.of()
        sequences = list(self._nodes)
        at = torch.tensor([sequences, list(self._nodes.values())], device=hidden.device)
        logits = self._heads(hidden[at[0], at[1]], self._output)[..., : self._vocab_size]
        chances, tokens = best_of(logits, self._count)
        # Integers and floats of 32 bits share one transfer.
        both = torch.stack([tokens.int(), chances.float().view(torch.int32)]).transpose(1, 2).cpu()
        ids, logs = both[0].tolist(), both[1].contiguous().view(torch.float32).tolist()
        for sequence, *found in zip(sequences, ids, logs, strict=True):
            self._found[sequence] = list(zip(*found, strict=True))
        self._nodes.clear()
        self.spent_ms += 1e3 * (perf_counter() - start)


class HeadsPasses:
    """What the heads say in one sequence's fixed tree (Cai et al., arXiv 2401.10774, section 2.1.2): head k the same at
    every node of depth k, first those that ``draw`` is most likely to choose, where tokens are drawn."""

    def __init__(self, candidates: HeadCandidates, sequence: int, draw: Draw | None = None) -> None:
        self._candidates, self._sequence, self._draw = candidates, sequence, draw
        self._said: list[Said] | None = None
        self._index = 0  # of the next token

    def start(self, prompt: Sequence[int], successors: Successors | None = None) -> None:
        """Nothing: the prompt's hidden states come with its pass."""

    def write(self, path: Path) -> None:
        self._said = None
        self._index += len(path.tokens)
        self._candidates.note(self._sequence, path.nodes[-1])

    def after(self, branches: Sequence[Branch]) -> list[Said | None]:
        if self._said is None:
            self._said = []
            for head, (tokens, logs) in enumerate(self._candidates.of(self._sequence)):
                if self._draw is not None:
                    best = [token for token, _ in best_of_head(self._draw, tokens, logs, self._index + head)]
                    tokens = list(dict.fromkeys([*best, *tokens]))
                self._said.append((np.array(tokens), np.array(logs)))
        return [self._said[len(branch)] if len(branch) < len(self._said) else None for branch in branches]


class HeadsSource(HeadsPasses):
    """The heads as one source among others: head k has candidates for every node at depth k, from 0. A candidate's kind
    is its head, its rank and its strength: the log-odds that the head gives it against all tokens that it does not
    propose. How often candidates of a kind are right is learnt from there. Where tokens are drawn, its kind is its
    head, and its share under the noise of ``draw``."""

    name = "heads"

    def __init__(self, candidates: HeadCandidates, sequence: int, draw: Draw | None = None) -> None:
        super().__init__(candidates, sequence, draw)
        self.priors = (_PRIORS * RANKS if draw is None else _DRAWN_PRIORS) * candidates.num_heads
        self._offers: list[list[tuple[int, int]]] | None = None

    @property
    def spent_ms(self) -> float:
        return self._candidates.spent_ms

    def root(self) -> int:
        return 0

    def step(self, state: int, token: int) -> int:
        return state + 1  # the heads do not see which token they follow

    def propose(self, state: int) -> list[tuple[int, int]]:
        if self._offers is None:
            lines = enumerate(self._candidates.of(self._sequence))
            self._offers = [self._offer(head, tokens, logs) for head, (tokens, logs) in lines]
        return self._offers[state] if state < len(self._offers) else []

    def _offer(self, head: int, tokens: list[int], logs: list[float]) -> list[tuple[int, int]]:
        if self._draw is None:
            return _by_strength(head, tokens, logs)
        best = best_of_head(self._draw, tokens, logs, self._index + head)
        return [(token, head * BINS + level) for token, level in best]

    def expand(self, states: Sequence[int]) -> list[list[tuple[int, int]]]:
        return [self.propose(state) for state in states]

    def rollback(self, path: Path) -> None:
        self._offers = None  # they stood below the root of the pass

    def learn(self, tree: TokenTree, path: Path, successors: Successors | None) -> None:
        self.write(path)


def best_of_head(draw: Draw, tokens: list[int], logs: list[float], index: int) -> Offer:
    """Of one head's candidates for the token ``index``, those that the draw is most likely to choose."""
    return draw.best(np.array(tokens), draw.chances(np.array(logs, np.float32)), draw.line(index))


def _by_strength(head: int, tokens: list[int], logs: list[float]) -> list[tuple[int, int]]:
    chances = [0.0 if math.isnan(log) else math.exp(min(0.0, log)) for log in logs]
    rest = max(1e-3, 1.0 - sum(chances))
    offers = []
    for rank, (token, chance) in enumerate(zip(tokens, chances, strict=True)):
        if chance < Planner.floor:
            break
        level = bisect_right(_STEPS, math.log(chance / rest))
        offers.append((token, (head * RANKS + min(rank, RANKS - 1)) * _LEVELS + level))
    return offers


def _stacked(heads: MedusaHeads) -> States:
    """:meth:`MedusaHeads.states` in one product a layer: called one by one, small heads take most of the time so."""
    layers = list(zip(*(blocks.children() for blocks in heads.blocks), strict=True))
    with torch.no_grad():
        weights = [torch.stack([block.linear.weight.T for block in layer]) for layer in layers]
        biases = [torch.stack([block.linear.bias for block in layer])[:, None] for layer in layers]
    count = heads.num_heads  # of the heads nothing else is kept

    def states(hidden: Tensor) -> Tensor:
        found = hidden.to(weights[0].device, weights[0].dtype).expand(count, -1, -1)
        for weight, bias in zip(weights, biases, strict=True):
            found = found + silu(torch.baddbmm(bias, found, weight))
        return found.to(hidden.device, hidden.dtype)

    return states


def fast_heads(heads: MedusaHeads) -> Callable[[Tensor, OutputLayer], Tensor]:
    """The fastest way from a few hidden states ``[token, hidden]`` to the heads' logits ``[head, token, vocab]``. For
    small blocks those are stacked copies, kept until a weight changes; otherwise the heads themselves."""
    blocks = [block for blocks in heads.blocks for block in blocks.children()]
    made = all(type(block) is ResBlock and type(block.linear) is nn.Linear for block in blocks)  # not adapted since
    if type(heads) is not MedusaHeads or not blocks or not made or any(map(is_hooked, heads.modules())):
        return heads
    weights = list(heads.blocks.parameters())
    size = max(weight.nbytes for weight in weights)
    alike = len({(weight.device, weight.dtype) for weight in weights}) == 1
    counted = not any(weight.is_inference() for weight in weights)  # changes of the others are
    if not (alike and counted) or size > _MOST_BYTES or size * len(blocks) > _MOST_COPIED:
        return heads
    states = latest(_stacks.of(heads), weights_stamp(weights), lambda: _stacked(heads))
    return lambda hidden, output: heads.logits(states(hidden), output)
