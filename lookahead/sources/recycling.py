"""Token recycling: what the model last said after a token is drafted again (Luo et al., arXiv 2408.08696)."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jacobi import LookaheadError, Path, Successors, TokenTree

BEST = 6  # next tokens kept of each scored node; against 4, S at 48 nodes is 1 to 5 % higher, with 8 no higher
_ORDERS = 3  # tokens in the longest context
_BEFORE = -1  # stands for the tokens before the text's first

Context = tuple[int, int, int]
# The best tokens and their levels, best first; and all that the model said, with the node at which it did.
Row = tuple[list[int], list[int], Successors, int]

LEVEL_STEPS = (0.25, 0.5, 1.0, 1.5, 2.5, 4.0, 6.0)  # distances, in logits, at which the next level begins
LEVELS = len(LEVEL_STEPS) + 1


def rows_of(said: Successors) -> list[Row]:
    """A row for each node. Levels, from 0 to ``LEVELS - 1``, tell how far in logits a token lies below the best one;
    for the best one, how far the second lies below it. Tokens that the model excludes are left out."""
    tokens, logits = said.tokens[:, :BEST].tolist(), said.logits[:, :BEST]
    with np.errstate(invalid="ignore"):  # between infinities; what comes of it is the last level
        gaps = logits[:, :1] - logits
    gaps[:, 0] = gaps[:, min(1, gaps.shape[1] - 1)]
    levels = np.searchsorted(LEVEL_STEPS, gaps, side="right").tolist()
    if np.isneginf(logits[:, -1]).any():
        counts = np.maximum(1, (logits != -np.inf).sum(1)).tolist()
        tokens = [line[:count] for line, count in zip(tokens, counts, strict=True)]
        levels = [line[:count] for line, count in zip(levels, counts, strict=True)]
    return [(*pair, said, node) for node, pair in enumerate(zip(tokens, levels, strict=True))]


class SuccessorTable:
    """The model's last best next tokens after each context of one, two and three tokens, in bounded memory.

    The published table has one row a token of the vocabulary. Here longer contexts have rows too, because the same
    token is followed by different ones in different places; a node is served from its longest known context::

        on the cat -> sat, ran, is       what the model said after these three tokens
           the cat -> is, sat, was       what it last said after any "the cat"
               cat -> is, food, sat      what it last said after any "cat"

    Rows live in two generations of ``capacity`` rows for each length of context: when the young one is full it becomes
    the old one, whose rows go unless they are written again. So a row outlives at least ``capacity`` newer ones.
    """

    def __init__(self, capacity: int = 1 << 14) -> None:
        if capacity < 1:
            raise LookaheadError(f"A successor table holds at least one row: got capacity={capacity}.")
        self.capacity = capacity
        self._young: tuple[dict[Any, Row], ...] = ({}, {}, {})  # by length of context
        self._old: tuple[dict[Any, Row], ...] = ({}, {}, {})

    def __len__(self) -> int:
        return sum(map(len, self._young)) + sum(map(len, self._old))

    def put(self, contexts: Sequence[Context], rows: Sequence[Row]) -> None:
        """Write down what the model said after each of ``contexts``, of which the last token stands last. The rows
        are kept, not copied."""
        start = 0
        while start < len(contexts):
            if len(self._young[2]) >= self.capacity:  # the longest contexts are the most
                self._old, self._young = self._young, ({}, {}, {})
            ones, twos, threes = self._young
            part = slice(start, start + self.capacity - len(threes))
            start = part.stop
            written, places = rows[part], contexts[part]
            threes.update(zip(places, written, strict=True))
            twos.update(zip([context[1:] for context in places], written, strict=True))
            ones.update(zip([context[2] for context in places], written, strict=True))

    def get(self, context: Context) -> tuple[int, Row] | None:
        """How many tokens the longest known suffix of ``context`` has, and its row; None where none is known."""
        ones, twos, threes = self._young
        if (row := threes.get(context) or self._old[2].get(context)) is not None:
            return 3, row
        pair = context[1:]
        if (row := twos.get(pair) or self._old[1].get(pair)) is not None:
            return 2, row
        row = ones.get(context[2]) or self._old[0].get(context[2])
        return None if row is None else (1, row)


# Shares that were right on the bundled model (greedy, penalised and sampled text mixed), rounded: by length of context,
# and for the best candidate by its level.
_BEST_PRIORS = (
    (0.14, 0.15, 0.20, 0.20, 0.30, 0.35, 0.45, 0.65),
    (0.18, 0.20, 0.20, 0.30, 0.40, 0.50, 0.60, 0.85),
    (0.27, 0.33, 0.43, 0.47, 0.72, 0.85, 0.87, 0.94),
)
_KINDS = [range(order * BEST * LEVELS, (order + 1) * BEST * LEVELS, LEVELS) for order in range(_ORDERS)]  # of ranks
_LATER_PRIORS = ((0.09, 0.05, 0.04, 0.03, 0.03), (0.12, 0.08, 0.06, 0.05, 0.04), (0.22, 0.13, 0.08, 0.06, 0.05))


class RecyclingSource:
    """Candidates from what the model said at scored nodes, in this text and before: also off the path that was kept. A
    candidate's kind is the length of its context, its rank, and its distance in logits from its rivals. Sequences and
    calls on the same model may share the table."""

    name = "recycling"
    priors = tuple(
        prior
        for best, later in zip(_BEST_PRIORS, _LATER_PRIORS, strict=True)
        for prior in (*best, *(share for share in later for _ in range(LEVELS)))
    )

    def __init__(self, table: SuccessorTable) -> None:
        self._table = table
        self._root = (_BEFORE, _BEFORE, _BEFORE)

    def start(self, prompt: Sequence[int], successors: Successors | None) -> None:
        text = [_BEFORE, _BEFORE, _BEFORE, *prompt]
        if successors is not None:
            rows = rows_of(successors)[-len(prompt) :] if prompt else []  # earlier ones stand for padding
            places = range(len(text) - len(rows), len(text))
            self._table.put([(text[place - 2], text[place - 1], text[place]) for place in places], rows)
        self._root = (text[-3], text[-2], text[-1])

    def root(self) -> Context:
        return self._root

    def step(self, state: Context, token: int) -> Context:
        return (state[1], state[2], token)

    def propose(self, state: Context) -> list[tuple[int, int]]:
        if (found := self._table.get(state)) is None:
            return []
        order, (tokens, levels, _, _) = found
        return [(token, kind + level) for token, level, kind in zip(tokens, levels, _KINDS[order - 1], strict=False)]

    def learn(self, tree: TokenTree, path: Path, successors: Successors | None) -> None:
        if successors is not None:
            contexts = [self._root]
            for parent, token in zip(tree.parents[1:], tree.tokens[1:], strict=True):
                _, before, last = contexts[parent]
                contexts.append((before, last, token))
            self._table.put(contexts, rows_of(successors)[: len(tree)])
        for token in path.tokens:
            self._root = (self._root[1], self._root[2], token)
