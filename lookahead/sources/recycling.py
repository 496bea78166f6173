"""Token recycling: what the model last said after a token is drafted again (Luo et al., arXiv 2408.08696)."""

from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from jacobi import LookaheadError, Path, Successors, TokenTree
from lookahead.sources.perturbed import Draw

BEST = 6  # next tokens kept of each scored node; against 4, S at 48 nodes is 1 to 5 % higher, with 8 no higher
_ORDERS = 3  # tokens in the longest context
_MOST_NEW = 1024  # rows that wait to be written to the others
_BLOCK = 1 << 18  # bytes of a block of what was said
_MOST_BYTES = 12 << 20  # of blocks, for each generation
_MOST_RANKED = 256  # passes whose ranks and chances are kept beside what was said
_BEFORE = -1  # stands for the tokens before the text's first

LEVEL_STEPS = (0.25, 0.5, 1.0, 1.5, 2.5, 4.0, 6.0)  # distances, in logits, at which the next level begins
LEVELS = len(LEVEL_STEPS) + 1
_STEPS = np.array(LEVEL_STEPS, np.float32)
_RANK_KINDS = np.arange(0, BEST * LEVELS, LEVELS)  # the first kind of each rank, where one token is known
# From these kinds to those where so many tokens are known, as `bytes.translate` reads it.
_OF_ORDER = [bytes((kind + (order - 1) * BEST * LEVELS) % 256 for kind in range(256)) for order in range(_ORDERS + 1)]


class Said:
    """What the model said at the nodes of one pass. What is made of it for drafts is made of all nodes at once, when it
    is asked for first.

    Attributes:
        tokens, logits: the best next tokens at each node, as in :class:`jacobi.Successors`.
    """

    __slots__ = ("_chances", "_kinds", "_lists", "_warp", "logits", "tokens")

    def __init__(self, successors: Successors) -> None:
        self.tokens, self.logits = successors.tokens, successors.logits
        self._lists: list[list[int]] | None = None
        self._kinds: list[bytes] = []
        self._warp: Hashable = None
        self._chances: np.ndarray = self.logits

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_ranked(self) -> bool:
        return self._lists is not None

    @property
    def is_warped(self) -> bool:
        return self._warp is not None

    def best(self, node: int) -> int:
        """The token that the model called the likeliest at a node."""
        return int(self.tokens[node, 0])

    def candidates(self, node: int, order: int) -> list[tuple[int, int]]:
        """The best tokens of a node with their kinds, best first, where so many tokens before them are known."""
        if self._lists is None:
            self._lists, self._kinds = self._ranked()
        return list(zip(self._lists[node], self._kinds[node].translate(_OF_ORDER[order]), strict=False))

    def _ranked(self) -> tuple[list[list[int]], list[bytes]]:
        """Tokens by node, and their kinds where one token is known. Levels, from 0 to ``LEVELS - 1``, tell how far in
        logits a token lies below the best one; for the best one, how far the second lies below it. Tokens that the
        model excludes are left out."""
        tokens, logits = self.tokens[:, :BEST].tolist(), self.logits[:, :BEST]
        count = logits.shape[1]
        with np.errstate(invalid="ignore"):  # between infinities; what comes of it is the last level
            gaps = logits[:, :1] - logits
        gaps[:, 0] = gaps[:, min(1, count - 1)]
        kinds = (np.searchsorted(_STEPS, gaps, side="right") + _RANK_KINDS[:count]).astype(np.uint8)
        if (logits[:, -1] == -np.inf).any():
            counts = np.maximum(1, (logits != -np.inf).sum(1)).tolist()
            tokens = [line[:count] for line, count in zip(tokens, counts, strict=True)]
        return tokens, kinds.view(f"V{count}")[:, 0].tolist()

    def forget(self) -> None:
        """Free what was made of it."""
        self._lists, self._kinds, self._warp, self._chances = None, [], None, self.logits

    def chances(self, draw: Draw) -> np.ndarray:
        """What a draw makes of the logits, ``[node, rank]``; see :meth:`.Draw.chances`."""
        warp = draw.warp
        if self._warp != warp:  # nothing is kept of the draw itself, which knows the call
            self._warp, self._chances = warp, draw.chances(self.logits)
        return self._chances


Context = tuple[int, int, int]
Row = tuple[Said, int]  # what the model said, and the node at which it did
Rows = tuple[Row, ...]  # newest first


class SuccessorTable:
    """The model's last best next tokens after each context of one, two and three tokens, in bounded memory.

    The published table has one row a token of the vocabulary. Here longer contexts have rows too, because the same
    token is followed by different ones in different places; a node is served from its longest known context::

        on the cat -> sat, ran, is       what the model said after these three tokens
           the cat -> is, sat, was       what it last said after any "the cat"
               cat -> is, food, sat      what it last said after any "cat"

    Rows live in two generations of ``capacity`` rows for each length of context: when the young one is full it becomes
    the old one, whose rows go unless they are written again. So a row outlives at least ``capacity`` newer ones. The
    newest rows wait beside them, in dictionaries that are small enough to be fast, until :meth:`settle`.

    What the model said is copied into blocks (:meth:`hold`), because small arrays of many calls would hold the heap's
    pages; tokens take 16 bits where ``vocab_size`` is known to allow it. A generation also ends when ``most_bytes`` of
    blocks are written. What is made of rows for drafts is kept for the last passes that were asked.
    """

    def __init__(self, capacity: int = 1 << 14, most_bytes: int = _MOST_BYTES, vocab_size: int = 1 << 31) -> None:
        if capacity < 1:
            raise LookaheadError(f"A successor table holds at least one row: got capacity={capacity}.")
        self.capacity = capacity
        self.most_bytes = most_bytes
        self._written = 0  # bytes of blocks, in the young generation
        self._dtype = np.uint16 if vocab_size <= 1 << 16 else np.int32
        self._block = Successors(np.empty((0, 0), self._dtype), np.empty((0, 0), np.float32))
        self._free = 0  # first free line of it
        self._ranked: deque[Said] = deque()
        self._new: tuple[dict[Any, Rows], ...] = ({}, {}, {})  # by length of context
        self._young: tuple[dict[Any, Rows], ...] = ({}, {}, {})
        self._old: tuple[dict[Any, Rows], ...] = ({}, {}, {})

    def __len__(self) -> int:
        self.settle()
        return sum(map(len, self._young)) + sum(map(len, self._old))

    def put(self, contexts: Sequence[Context], rows: Sequence[Row], most: int = 1) -> None:
        """Write down what the model said after each of ``contexts``, of which the last token stands last, beside the
        last rows that are known there: ``most`` in all. The rows are kept, not copied."""
        count = min(_MOST_NEW, self.capacity)
        for start in range(0, len(contexts), count):
            if len(self._new[2]) + len(contexts) - start > count:
                self.settle(most)
            written, places = [(row,) for row in rows[start : start + count]], contexts[start : start + count]
            ones, twos, threes = self._new
            threes.update(zip(places, written, strict=True))
            twos.update(zip([context[1:] for context in places], written, strict=True))
            ones.update(zip([context[2] for context in places], written, strict=True))

    def hold(self, successors: Successors) -> Said:
        """A copy of what the model said at the nodes of a pass, to be put here."""
        count, width = successors.tokens.shape
        block = self._block
        if width != block.tokens.shape[1] or self._free + count > len(block.tokens):
            shape = max(count, _BLOCK // (6 * max(1, width))), width
            self._block = block = Successors(np.empty(shape, self._dtype), np.empty(shape, np.float32))
            self._free = 0
            self._written += block.tokens.nbytes + block.logits.nbytes
        start = self._free
        self._free = stop = start + count
        tokens, logits = block.tokens[start:stop], block.logits[start:stop]
        tokens[:] = successors.tokens
        logits[:] = successors.logits
        return Said(Successors(tokens, logits))

    def candidates(self, said: Said, node: int, order: int) -> list[tuple[int, int]]:
        """See :meth:`Said.candidates`."""
        if not said.is_ranked:
            self._keep_ranked(said)
        return said.candidates(node, order)

    def chances(self, said: Said, draw: Draw) -> np.ndarray:
        """See :meth:`Said.chances`."""
        if not said.is_warped:
            self._keep_ranked(said)
        return said.chances(draw)

    def _keep_ranked(self, said: Said) -> None:
        self._ranked.append(said)
        if len(self._ranked) > _MOST_RANKED:
            self._ranked.popleft().forget()

    def settle(self, most: int = 1) -> None:
        """Write the newest rows to the others, of which ``most`` are kept in all. What is known last stays the same."""
        full = self._written > self.most_bytes
        if full or len(self._young[2]) + len(self._new[2]) > self.capacity:  # the longest contexts are the most
            self._old, self._young = self._young, ({}, {}, {})
            self._written = 0
        for young, new in zip(self._young, self._new, strict=True):
            if most == 1:
                young.update(new)
            else:
                young.update({context: (rows + young.get(context, ()))[:most] for context, rows in new.items()})
            new.clear()

    def get(self, context: Context) -> tuple[int, Row] | None:
        """How many tokens the longest known suffix of ``context`` has, and its last row; None where none is known."""
        (new_ones, new_twos, new_threes), (ones, twos, threes) = self._new, self._young
        rows = new_threes.get(context) or threes.get(context) or self._old[2].get(context)
        if rows is not None:
            return 3, rows[0]
        pair = context[1:]
        rows = new_twos.get(pair) or twos.get(pair) or self._old[1].get(pair)
        if rows is not None:
            return 2, rows[0]
        last = context[2]
        rows = new_ones.get(last) or ones.get(last) or self._old[0].get(last)
        return None if rows is None else (1, rows[0])

    def last(self, context: Context, most: int) -> list[tuple[int, Row]]:
        """The last rows, ``most`` at most each, of the suffixes of ``context`` with three tokens, two and one: how many
        these are, and the row, newest first."""
        found = []
        for order, key in ((3, context), (2, context[1:]), (1, context[2])):
            rows = self._new[order - 1].get(key, ()) + self._young[order - 1].get(key, ())
            if len(rows) < most:
                rows += self._old[order - 1].get(key, ())
            found += [(order, row) for row in rows[:most]]
        return found


# Shares that were right on the bundled model (greedy, penalised and sampled text mixed), rounded: by length of context,
# and for the best candidate by its level.
_BEST_PRIORS = (
    (0.14, 0.15, 0.20, 0.20, 0.30, 0.35, 0.45, 0.65),
    (0.18, 0.20, 0.20, 0.30, 0.40, 0.50, 0.60, 0.85),
    (0.27, 0.33, 0.43, 0.47, 0.72, 0.85, 0.87, 0.94),
)
_LATER_PRIORS = ((0.09, 0.05, 0.04, 0.03, 0.03), (0.12, 0.08, 0.06, 0.05, 0.04), (0.22, 0.13, 0.08, 0.06, 0.05))


class RecyclingSource:
    """Candidates from what the model said at scored nodes, in this text and before: also off the path that was kept. A
    candidate's kind is the length of its context, its rank, and its distance in logits from its rivals. Sequences and
    calls on the same model may share the table, in which ``most`` rows are kept of each context."""

    name = "recycling"
    priors = tuple(
        prior
        for best, later in zip(_BEST_PRIORS, _LATER_PRIORS, strict=True)
        for prior in (*best, *(share for share in later for _ in range(LEVELS)))
    )

    def __init__(self, table: SuccessorTable, most: int = 1) -> None:
        self._table = table
        self._most = most
        self._root = (_BEFORE, _BEFORE, _BEFORE)

    def start(self, prompt: Sequence[int], successors: Successors | None) -> None:
        text = [_BEFORE, _BEFORE, _BEFORE, *prompt]
        if successors is not None:
            said = self._table.hold(successors)
            nodes = range(max(0, len(said) - len(prompt)), len(said))  # earlier ones stand for padding
            places = range(len(text) - len(nodes), len(text))
            contexts = [(text[place - 2], text[place - 1], text[place]) for place in places]
            self._table.put(contexts, [(said, node) for node in nodes], self._most)
        self._root = (text[-3], text[-2], text[-1])

    def root(self) -> Context:
        return self._root

    def step(self, state: Context, token: int) -> Context:
        return (state[1], state[2], token)

    def propose(self, state: Context) -> list[tuple[int, int]]:
        if (found := self._table.get(state)) is None:
            return []
        order, (said, node) = found
        return self._table.candidates(said, node, order)

    def learn(self, tree: TokenTree, path: Path, successors: Successors | None) -> None:
        self.take_in(tree, path, None if successors is None else self._table.hold(successors))

    def take_in(self, tree: TokenTree, path: Path, said: Said | None) -> None:
        """What :meth:`learn` does, for those who read what was said, too."""
        if said is not None:
            contexts = [self._root]
            for parent, token in zip(tree.parents[1:], tree.tokens[1:], strict=True):
                _, before, last = contexts[parent]
                contexts.append((before, last, token))
            self._table.put(contexts, [(said, node) for node in range(len(tree))], self._most)
        for token in path.tokens:
            self._root = self.step(self._root, token)

    def catch_up(self) -> None:
        self._table.settle(self._most)
