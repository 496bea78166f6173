"""What the model last said after the contexts of its texts, in bounded memory."""

from collections.abc import Sequence

import numpy as np

from jacobi import LookaheadError, Successors

Context = tuple[int, int, int]
BEFORE = -1  # stands for the tokens before the text's first
BEGIN: Context = (BEFORE, BEFORE, BEFORE)

_ORDERS = len(BEGIN)  # tokens in the longest context
PLACES = _ORDERS + 1  # of contexts of one, two and three tokens, and of the two before the last; and of their kinds

_WAYS = 8  # entries of a bucket, which take one line of a processor's cache
_LEAST = 1 << 10  # buckets; large tables have one a row, because buckets of random contexts overflow if they are fewer
_TOGETHER = 64  # rows that are found before any of them is written
_FACTORS = (  # of a context's tokens, by place: odd, or 0 for those that do not count
    (0, 0, 0x9E3779B97F4A7C15),
    (0, 0xC2B2AE3D27D4EB4F, 0x9E3779B97F4A7C15),
    (0xD6E8FEB86659FD93, 0xC2B2AE3D27D4EB4F, 0x9E3779B97F4A7C15),
    (0xD6E8FEB86659FD93, 0xC2B2AE3D27D4EB4F, 0),
)
_MIXED = 0xFF51AFD7ED558CCD  # the multiplier of MurmurHash3's finalizer
_BY_TOKEN = np.array(_FACTORS, np.uint64).T
_LOW, _WHOLE = (int(np.iinfo(kind).max) for kind in (np.uint32, np.uint64))


class SuccessorTable:
    """The model's last best next tokens after each context of one, two and three tokens.

    The published table has one row a token of the vocabulary. Here longer contexts have rows too, because the same
    token is followed by different ones in different places::

        on the cat -> sat, ran, is       what the model said after these three tokens
           the cat -> is, sat, was       what it last said after any "the cat"
               cat -> is, food, sat      what it last said after any "cat"

    After a token that has not been there yet the model may say what it said after another one in the same place::

        on the dog -> sat, ran, is       the row of "on the cat"

    The newest ``capacity`` rows are kept, in a ring. A context's last row is found as processors find what is in their
    caches: its hash says in which bucket it is, of eight entries, and the tag that tells it from the others there. A
    new entry takes the place of the oldest one. Every row knows the one that its context had before::

        bucket    tag of "the cat", row 7    tag of "a dog", row 3    ...
        row       3     4     5     6     7                  tokens and logits, best first
        before    3     4     5     6     4                  the row that "the cat" had before; its own: none

    Rows have numbers that only grow, modulo 2**32, and stand at their number modulo ``capacity``: a number tells
    whether its row has been overwritten. Different contexts have the same bucket and tag about once in 10**14 pairs;
    then a draft is a bad one. Tokens take 16 bits where ``vocab_size`` is known to allow it.

    Args:
        capacity: rows, a power of 2.
        vocab_size: of the model.
        width: tokens of a row, at first.

    Attributes:
        rows: all of them, and how they are found, as functions in C read them.
        written: the next row's number.
    """

    def __init__(self, capacity: int = 1 << 16, vocab_size: int = 1 << 31, width: int = 0) -> None:
        if capacity < 1 or capacity & (capacity - 1):
            raise LookaheadError(f"A successor table holds 1, 2, 4, 8... rows: got capacity={capacity}.")
        self.capacity = capacity
        self._dtype = np.uint16 if vocab_size <= 1 << 16 else np.int32
        self._begin(width)

    def _begin(self, width: int) -> None:
        """Begin anew with rows of so many tokens; only lines that are written take memory."""
        self.written = 2 * self.capacity  # the next row's number; entries that are 0 are too old to count
        self._tokens = np.empty((self.capacity, width), self._dtype)
        self._logits = np.empty((self.capacity, width), np.float32)
        self._before = np.zeros((self.capacity, _ORDERS), np.uint32)
        self._entries = np.zeros((max(_LEAST, self.capacity), 2, _WAYS), np.uint32)  # tags, numbers
        arrays = self._entries.reshape(-1, 2 * _WAYS), self._before, self._tokens, self._logits
        self.rows = tuple(array.data for array in arrays)

    def put(self, root: Context, parents: Sequence[int], tokens: Sequence[int], said: Successors) -> None:
        """Write down what the model said after each node of a tree: the first lines of ``said``. ``root`` is the first
        node's context, of which the last token stands last. Of equal contexts the last one counts.

        Narrower rows than those before are filled up; the first wider ones, for drawn tokens, begin a new table."""
        count, width = len(tokens), said.tokens.shape[1]
        if width > self._tokens.shape[1]:
            self._begin(width)
        contexts, above = np.empty((count, _ORDERS), np.int64), np.array(parents[1:], np.int64)
        contexts[:, -1], contexts[0] = tokens, root
        for place in range(_ORDERS - 2, -1, -1):  # what stands before a node's token ends its parent's context
            contexts[1:, place] = contexts[above, place + 1]
        self._enter(contexts.view(np.uint64))
        rows: slice | np.ndarray = slice(first := self.written % self.capacity, first + count)
        if first + count > self.capacity:
            rows = (first + np.arange(count)) % self.capacity
        self._tokens[rows, :width], self._logits[rows, :width] = said.tokens[:count], said.logits[:count]
        if width < self._tokens.shape[1]:
            self._tokens[rows, width:], self._logits[rows, width:] = 0, -np.inf
        self.written = (self.written + count) & _LOW

    def _enter(self, contexts: np.ndarray) -> None:
        """Enter the next rows as those of ``contexts`` ``[row, 3]``."""
        flat, half, by_place = self._entries.reshape(-1), np.uint64(32), np.arange(PLACES, dtype=np.uint64)
        for start in range(0, len(contexts), _TOGETHER):
            hashed: np.ndarray = contexts[start : start + _TOGETHER] @ _BY_TOKEN + by_place  # [row, place]
            hashed = (hashed ^ (hashed >> half)) * np.uint64(_MIXED)
            buckets = (hashed >> half).view(np.int64) & (len(self._entries) - 1)
            tags, numbers = hashed.astype(np.uint32), np.arange(len(hashed), dtype=np.uint32)[:, None]
            numbers += np.uint32(self.written + start & _LOW)
            lines = self._entries.take(buckets, 0)  # [row, place, tags and numbers, way]
            ages = numbers[..., None] - lines[:, :, 1]
            ages[lines[:, :, 0] == tags[..., None]] = _LOW  # if it is there, that way; else the oldest one
            places = buckets * (2 * _WAYS) + ages.argmax(-1)
            before = np.where(flat.take(places) == tags, flat.take(places + _WAYS), numbers)
            self._before[numbers[:, 0] & (self.capacity - 1)] = before[:, :_ORDERS]
            flat[places], flat[places + _WAYS] = tags, numbers

    def _last(self, context: Context, order: int) -> int | None:
        """The number of the last row of the suffix of ``context`` with so many tokens."""
        first, second, third = _FACTORS[place := place_of(order)]
        hashed = first * context[0] + second * context[1] + third * context[2] + place & _WHOLE
        hashed = (hashed ^ (hashed >> 32)) * _MIXED & _WHOLE
        tags, numbers = self._entries[(hashed >> 32) & (len(self._entries) - 1)].tolist()
        if (tag := hashed & _LOW) not in tags:
            return None
        number: int = numbers[tags.index(tag)]
        return number if self.since(number) <= self.capacity else None

    def since(self, number: int) -> int:
        """How many rows were written from the one of a number on."""
        return (self.written - number) & _LOW

    def get(self, context: Context) -> tuple[int, int] | None:
        """How many tokens the longest known suffix of ``context`` has, and its last row; 0 and the row behind any token
        in the place of the last one, or None, where none is known."""
        for order in (3, 2, 1, 0):
            if (number := self._last(context, order)) is not None:
                return order, number % self.capacity
        return None

    def last(self, context: Context, most: int) -> tuple[list[int], list[int]]:
        """The last rows, ``most`` at most each, of the suffixes of ``context`` with three tokens, two and one, newest
        first: how many tokens it is, for each row, and the rows. Where no more than one token is known, the last row
        behind any token in its place, too: 0 tokens."""
        orders, rows = list[int](), list[int]()
        for order in (3, 2, 1, 0):
            if not order and orders and orders[0] > 1:
                break
            number, enough = self._last(context, order), len(rows) + (most if order else 1)
            while number is not None and len(rows) < enough:
                orders.append(order)
                rows.append(number % self.capacity)
                before = int(self._before[rows[-1], order - 1]) if order else number
                number = before if self.since(number) < self.since(before) <= self.capacity else None
        return orders, rows

    def ages(self, rows: Sequence[int]) -> list[int]:
        """How many rows were written after each of these."""
        return [(self.written - 1 - row) % self.capacity for row in rows]

    def row_of(self, token: int) -> int | None:
        """The last row behind a token, whatever stands before it."""
        number = self._last((0, 0, token), 1)
        return None if number is None else number % self.capacity

    def said(self, rows: Sequence[int]) -> Successors:
        """What these rows say, ``[row, rank]``."""
        return Successors(self._tokens.take(rows, 0), self._logits.take(rows, 0))

    def likeliest(self, context: Context) -> int | None:
        """The token that the model called the likeliest after the longest known suffix of ``context``."""
        found = self.get(context)
        return None if found is None else int(self._tokens[found[1], 0])


def place_of(order: int) -> int:
    """Where entries and kinds of contexts of so many tokens stand; 0 are the two before the last."""
    return (order - 1) % PLACES
