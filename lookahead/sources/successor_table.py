"""What the model last said after the contexts of its texts, in bounded memory."""

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from math import inf
from typing import Any

import numpy as np

from jacobi import LookaheadError, Successors
from lookahead import _native

Context = tuple[int, int, int]
# Rows of contexts of one, two and three tokens, and of the two tokens before the last.
Tables = tuple[dict[Any, int], dict[Any, int], dict[Any, int], dict[Any, int]]

BEST = 6  # next tokens of a row that are ranked; against 4, S at 48 nodes is 1 to 5 % higher, with 8 no higher
LEVEL_STEPS = (0.25, 0.5, 1.0, 1.5, 2.5, 4.0, 6.0)  # distances, in logits, at which the next level begins
_STEPS = np.array(LEVEL_STEPS, np.float32).data
LEVELS = len(LEVEL_STEPS) + 1
_ORDERS = 3  # tokens in the longest context
PLACES = _ORDERS + 1  # of tables, and of their kinds
_AROUND = _ORDERS * BEST * LEVELS  # the first kind of a token that followed another one in the place of the last
_USUAL = _AROUND + BEST * LEVELS  # and that of one which is said whatever comes before
_MOST_NEW = 1024  # rows that wait to be written to the others
_SAID = 128  # tokens that were said of late, among which those are counted that are said whatever comes before
_COUNTED_AFTER = 8  # passes
_OVERWRITTEN = 2  # rows of a generation for each one that it holds, because newer ones take their contexts


class SuccessorTable:
    """The model's last best next tokens after each context of one, two and three tokens.

    The published table has one row a token of the vocabulary. Here longer contexts have rows too, because the same
    token is followed by different ones in different places::

        on the cat -> sat, ran, is       what the model said after these three tokens
           the cat -> is, sat, was       what it last said after any "the cat"
               cat -> is, food, sat      what it last said after any "cat"

    After a token that has not been there yet the model may say what it said after another one in the same place, or
    else what it says most often of late::

        on the dog -> sat, ran, is, .    the row of "on the cat", and then the usual tokens
        a pink dog -> ., is, the         the usual tokens

    Rows live in two generations, each of which knows ``capacity`` contexts of three tokens at most: when the young one
    is full it becomes the old one, whose rows go unless they are written again. So a row outlives at least
    ``capacity`` newer ones. A row is a line of two arrays, one half of which is each generation's own::

        row       1     2     3    ...                     tokens and logits, best first
        before    0     0     1                            the row that the same context had in this generation; 0: none
        "cat" -> row 3 -> row 1

    New rows are found through small dictionaries, which are faster, until :meth:`settle` moves them to the others.
    Tokens take 16 bits where ``vocab_size`` is known to allow it.
    """

    def __init__(self, capacity: int = 1 << 14, vocab_size: int = 1 << 31) -> None:
        if capacity < 1:
            raise LookaheadError(f"A successor table holds at least one row: got capacity={capacity}.")
        self.capacity = capacity
        self._half = _OVERWRITTEN * capacity
        self._dtype = np.uint16 if vocab_size <= 1 << 16 else np.int32
        self._said: deque[int] = deque(maxlen=_SAID)
        self._usual: list[tuple[int, int]] = []
        self._passes = 0
        self._begin(0)

    def _begin(self, width: int) -> None:
        """Begin anew with rows of so many tokens; only lines that are written take memory."""
        rows = 1 + 2 * self._half  # row 0 stands for none
        self._free, self._end = 1, 1 + self._half  # rows of the young generation that are still free
        self._tokens = np.empty((rows, width), self._dtype)
        self._logits = np.empty((rows, width), np.float32)
        self._before = np.zeros((_ORDERS, rows), np.int32)
        self._links = [memoryview(line.data) for line in self._before]  # of which single numbers are read faster
        self._new: Tables = ({}, {}, {}, {})
        self._young: Tables = ({}, {}, {}, {})
        self._old: Tables = ({}, {}, {}, {})
        self._show()

    def _show(self) -> None:
        """All rows, and how they are found, as functions in C read them."""
        arrays = self._tokens.data, self._logits.data
        self.rows = (self._new, self._young, self._old), tuple(self._links), *arrays

    def __len__(self) -> int:
        self.settle()
        return sum(map(len, self._young[:_ORDERS])) + sum(map(len, self._old[:_ORDERS]))

    def put(self, contexts: Sequence[Context], said: Successors) -> None:
        """Write down what the model said after each of ``contexts``, of which the last token stands last. Narrower rows
        than those before are filled up; the first wider ones, as drawn tokens want them, begin a new table."""
        if said.tokens.shape[1] > self._tokens.shape[1]:
            self._begin(said.tokens.shape[1])
        most = min(_MOST_NEW, self.capacity)
        ones, twos, threes, around = self._new
        for start in range(0, len(contexts), most):
            places = contexts[start : start + most]
            count = len(places)
            if len(threes) + count > most:
                self.settle()
            if self._free + count > self._end or len(self._young[2]) + len(threes) + count > self.capacity:
                self._turn()
            rows = range(self._free, self._free + count)
            self._free = rows.stop
            self._write(slice(rows.start, rows.stop), said.tokens[start:][:count], said.logits[start:][:count])
            threes.update(zip(places, rows, strict=True))
            twos.update(zip([context[1:] for context in places], rows, strict=True))
            ones.update(zip([context[2] for context in places], rows, strict=True))
            around.update(zip([context[:2] for context in places], rows, strict=True))
        self._said.extend(said.tokens[-_SAID:, 0].tolist())
        self._passes += 1
        if self._passes % _COUNTED_AFTER == 0 or not self._usual:
            said_most = Counter(self._said).most_common(BEST)
            self._usual = [(token, _USUAL + rank) for rank, (token, _) in enumerate(said_most)]

    def _write(self, rows: slice, tokens: np.ndarray, logits: np.ndarray) -> None:
        width = tokens.shape[1]
        self._tokens[rows, :width], self._tokens[rows, width:] = tokens, 0
        self._logits[rows, :width], self._logits[rows, width:] = logits, -np.inf
        self._before[:, rows] = 0

    def _turn(self) -> None:
        """Begin a generation, in the lines of the old one."""
        self.settle()
        self._old, self._young = self._young, ({}, {}, {}, {})
        self._free = 1 + self._half if self._end == 1 + self._half else 1
        self._end = self._free + self._half
        self._show()

    def settle(self) -> None:
        """Write the newest rows to the others. Nothing that is known changes by it."""
        for before, young, new in zip(self._before, self._young[:_ORDERS], self._new[:_ORDERS], strict=True):
            if new:
                before[list(new.values())] = [young.get(context, 0) for context in new]
        for young, new in zip(self._young, self._new, strict=True):
            young.update(new)
            new.clear()

    def get(self, context: Context) -> tuple[int, int] | None:
        """How many tokens the longest known suffix of ``context`` has, and its last row; 0 and the row behind any token
        in the place of the last one, or None, where none is known."""
        for order, key in _keys(context):
            for tables in (self._new, self._young, self._old):
                if (row := tables[place_of(order)].get(key)) is not None:
                    return order, row
        return None

    def last(self, context: Context, most: int) -> tuple[list[int], list[int]]:
        """The last rows, ``most`` at most each, of the suffixes of ``context`` with three tokens, two and one, newest
        first: how many tokens it is, for each row, and the rows. Where no more than one token is known, the last row
        behind any token in its place, too: 0 tokens."""
        orders, rows = list[int](), list[int]()
        for order, key in _keys(context):
            if not order and orders and orders[0] > 1:
                break
            enough = len(rows) + (most if order else 1)
            for tables in (self._new, self._young, self._old):
                row = tables[place_of(order)].get(key)
                while row and len(rows) < enough:
                    rows.append(row)
                    row = self._links[order - 1][row] if order and tables is not self._new else 0
            orders += [order] * (len(rows) - len(orders))
        return orders, rows

    def said(self, rows: Sequence[int]) -> Successors:
        """What these rows say, ``[row, rank]``."""
        return Successors(self._tokens.take(rows, 0), self._logits.take(rows, 0))

    def best(self, row: int) -> int:
        """The token that the model called the likeliest."""
        return int(self._tokens[row, 0])

    def ranked(self, context: Context, guess: bool = True) -> Sequence[tuple[int, int]]:
        """The best tokens after the longest known suffix of ``context``, best first, with their kinds: by its length,
        rank and level. Levels, from 0 to ``LEVELS - 1``, tell how far in logits a token lies below the best one; for
        the best one, how far the second lies below it. Tokens that the model excludes are left out. What may follow a
        token that has not been there yet is left to a ``guess``."""
        if _native.speedups is not None:
            found = _native.speedups.ranked(self.rows, context, _STEPS, BEST)
        else:
            found = self._ranked(context)
        if found and found[0][1] < _AROUND:
            return found
        if not guess:
            return []
        known = {token for token, _ in found}
        return [*found, *(usual for usual in self._usual if usual[0] not in known)]

    def _ranked(self, context: Context) -> list[tuple[int, int]]:
        if (place := self.get(context)) is None:
            return []
        order, row = place
        logits = self._logits[row, :BEST].tolist()
        gaps = [logits[0] - logits[min(1, len(logits) - 1)], *(logits[0] - logit for logit in logits[1:])]
        ranks = [rank for rank, logit in enumerate(logits) if not rank or logit > -inf]
        tokens, group = self._tokens[row, : len(ranks)].tolist(), place_of(order)
        return [
            (token, (group * BEST + rank) * LEVELS + bisect_right(LEVEL_STEPS, gaps[rank]))
            for rank, token in zip(ranks, tokens, strict=True)
        ]


def place_of(order: int) -> int:
    """Where the table and the kinds of contexts of so many tokens stand; 0 are the two before the last."""
    return (order - 1) % PLACES


def _keys(context: Context) -> Iterable[tuple[int, Any]]:
    """Under what the rows of a context are found, by how many tokens it is."""
    return (3, context), (2, context[1:]), (1, context[2]), (0, context[:2])
