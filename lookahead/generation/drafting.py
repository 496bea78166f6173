"""What drafters are told of a call, and what is fed for sequences that have ended."""

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from jacobi import Drafter, Path, Successors, TokenTree
from lookahead import _native
from lookahead.draft.context import CallContext, RowContext
from lookahead.draft.latency import StepTimes
from lookahead.draft.memory import Memory
from lookahead.draft.pass_costs import ModelLimits
from lookahead.draft.strategy import DraftStrategy
from lookahead.generation.call import Call
from lookahead.models.hidden_states import HiddenStates
from lookahead.runtime.linear import LinearModel
from lookahead.sources.perturbed import Draw
from lookahead.verify.noise import Noise
from lookahead.verify.processors import warp_of
from lookahead.verify.sequences import Sequences


class DraftedModel(ModelLimits, Protocol):
    """What drafters and statistics may know of the model: the hidden states of the last pass that were asked for, the
    tokens in the KV cache, and how many tokens passes had to replay."""

    @property
    def hidden(self) -> HiddenStates | None: ...
    @property
    def context(self) -> int: ...
    @property
    def replayed(self) -> int: ...


def draft_context(
    call: Call,
    sequences: Sequences,
    memory: Memory,
    model: DraftedModel,
    curve: Callable[[], StepTimes],
    strategy: DraftStrategy,
    noise: Noise | None,
    closing: Callable[[Callable[[], None]], object],
) -> CallContext:
    """What a strategy may know of a call; ``curve`` finds the latency curve of passes as they are run now, ``noise`` is
    what sequences draw from, where that can be known, and ``closing`` is told what to call in the end."""
    _native.warn_if_missing()
    vocab_size = call.traits.vocab_size
    pad = sequences.pad if 0 <= sequences.pad < vocab_size else 0  # drafts must be tokens that the model can be fed
    linear = isinstance(model, LinearModel)
    warp = warp_of(call.processors)
    by_chance = strategy.draws_candidates and bool(call.config.do_sample)
    chance, seed = Draw(lambda index: None, **warp) if by_chance else None, strategy.seed
    rows = []
    for index, prompt in enumerate(call.prompts()):
        draw = None if noise is None else Draw(partial(noise.line, index), **warp)
        rng = random.Random(None if seed is None else seed + index)
        rows.append(RowContext(prompt, vocab_size, pad, sequences.end_tokens, rng, index, linear, draw, chance))
    trust = call.trust(sees_noise=noise is not None)
    how = (call.choice, sequences.most_new, trust, model, curve, closing)
    return CallContext(call.model, rows, memory, *how, model.hidden)


class WhileWriting:
    """A sequence's drafter while it writes; once it has ended, pad tokens as deep as the other sequences' trees.
    ``depths`` are those of all sequences' last trees; the call's drafters share it. Where a model scores more tokens
    than the ``vocab_size`` that it can be fed, the drafter hears nothing of the others."""

    def __init__(self, drafter: Drafter, row: int, sequences: Sequences, depths: list[int], vocab_size: int) -> None:
        self._drafter = drafter
        self._row = row
        self._sequences = sequences
        self._depths = depths
        self._vocab_size = vocab_size
        self._writes = True

    def draft(self, room: int) -> TokenTree:
        sequences = self._sequences
        self._writes = not sequences.finished[self._row]
        if not self._writes:
            self._depths[self._row] = 0
            depth = room if all(sequences.finished) else min(room, max(self._depths))
            return TokenTree.chain(sequences.written[self._row][-1], [sequences.pad] * depth)
        tree = self._drafter.draft(room)
        self._depths[self._row] = max(tree.depths)
        return tree

    def learn(self, tree: TokenTree, greedy: Sequence[int], path: Path, successors: Successors | None = None) -> None:
        """Let the drafter take a pass in, if the sequence wrote when its tree was drafted."""
        if not self._writes:
            return
        if max(greedy) >= self._vocab_size:
            greedy = [token if token < self._vocab_size else 0 for token in greedy]
        self._drafter.learn(tree, greedy, path, successors and _fed(successors, self._vocab_size))


def _fed(successors: Successors, vocab_size: int) -> Successors:
    """The same, with tokens that the model cannot be fed told as excluded ones, after all others."""
    if successors.tokens.max(initial=0) < vocab_size:
        return successors
    known = successors.tokens < vocab_size
    order = np.argsort(~known, axis=1, kind="stable")
    tokens, logits = np.where(known, successors.tokens, 0), np.where(known, successors.logits, -np.inf)
    return Successors(np.take_along_axis(tokens, order, 1), np.take_along_axis(logits, order, 1).astype(np.float32))
