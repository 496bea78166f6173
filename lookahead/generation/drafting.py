"""What drafters are told of a call, and what is fed for sequences that have ended."""

import random
from collections.abc import Callable, Sequence
from functools import partial

from jacobi import Drafter, Path, Successors, TokenTree
from lookahead.draft.context import CallContext, RowContext
from lookahead.draft.latency import StepTimes
from lookahead.draft.memory import Memory
from lookahead.generation.call import Call
from lookahead.runtime.linear import LinearModel
from lookahead.runtime.tree import TreeModel
from lookahead.sources.perturbed import Draw
from lookahead.verify.noise import Noise
from lookahead.verify.processors import warp_of
from lookahead.verify.sequences import Sequences


def draft_context(
    call: Call,
    sequences: Sequences,
    memory: Memory,
    model: TreeModel | LinearModel,
    curve: Callable[[], StepTimes],
    seed: int | None,
    noise: Noise | None,
) -> CallContext:
    """What a strategy may know of a call; ``curve`` finds the latency curve of passes as they are run now, ``noise`` is
    what sequences draw from, where that can be known."""
    vocab_size = call.traits.vocab_size
    pad = sequences.pad if 0 <= sequences.pad < vocab_size else 0  # drafts must be tokens that the model can be fed
    linear = isinstance(model, LinearModel)
    warp = warp_of(call.processors)
    rows = []
    for index, prompt in enumerate(call.prompts()):
        draw = None if noise is None else Draw(partial(noise.line, index), **warp)
        rng = _generator(seed, index)
        rows.append(RowContext(prompt, vocab_size, pad, sequences.end_tokens, rng, index, linear, draw))
    return CallContext(
        call.model, rows, memory, call.choice, sequences.most_new, call.trust, model, curve, model.hidden
    )


def _generator(seed: int | None, index: int) -> random.Random:
    return random.Random(None if seed is None else seed + index)


class WhileWriting:
    """A sequence's drafter while it writes; once it has ended, pad tokens as deep as the other sequences' trees.
    ``depths`` are those of all sequences' last trees; the call's drafters share it."""

    def __init__(self, drafter: Drafter, row: int, sequences: Sequences, depths: list[int]) -> None:
        self._drafter = drafter
        self._row = row
        self._sequences = sequences
        self._depths = depths
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
        if self._writes:
            self._drafter.learn(tree, greedy, path, successors)
