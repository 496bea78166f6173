"""The n-gram pool: what the window, the prompt and the output have taught, ready to be verified as guesses."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from jacobi.errors import LookaheadError


class NgramPool:
    """n-grams by their first token, least recently used out first (arXiv 2402.02057, section 3.2).

    One policy serves every source. A key holds at most ``per_key`` continuations; adding one that is there already
    makes it the newest again. The pool as a whole holds at most ``capacity`` n-grams: when it is full, the key that was
    neither added to nor asked for the longest goes first, so that a server that runs for weeks does not leak.

    Args:
        ngram_size: N; a continuation has N-1 tokens.
        per_key: G, the most continuations under one token. 0 makes a pool that stays empty.
        capacity: most n-grams in all.
    """

    def __init__(self, ngram_size: int, per_key: int, capacity: int = 65536) -> None:
        if ngram_size < 2 or per_key < 0 or capacity < max(1, per_key):
            raise LookaheadError(
                "A pool needs ngram_size >= 2, per_key >= 0 and capacity >= per_key: "
                f"got ngram_size={ngram_size}, per_key={per_key}, capacity={capacity}."
            )
        self.ngram_size = ngram_size
        self.per_key = per_key
        self.capacity = capacity
        self._keys: OrderedDict[int, OrderedDict[tuple[int, ...], None]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, key: int, continuation: tuple[int, ...]) -> None:
        """Put ``continuation`` (N-1 tokens) under ``key`` as its newest."""
        if not self.per_key:
            return
        under = self._keys.get(key)
        if under is None:
            under = self._keys[key] = OrderedDict()
        else:
            self._keys.move_to_end(key)
        if continuation in under:
            under.move_to_end(continuation)
            return
        under[continuation] = None
        self._count += 1
        if len(under) > self.per_key:
            under.popitem(last=False)
            self._count -= 1
        while self._count > self.capacity:
            _, oldest = self._keys.popitem(last=False)
            self._count -= len(oldest)

    def add_text(self, tokens: Sequence[int]) -> None:
        """Add every n-gram of a text, first to last."""
        size = self.ngram_size
        for start in range(len(tokens) - size + 1):
            self.add(tokens[start], tuple(tokens[start + 1 : start + size]))

    def get(self, key: int) -> Iterable[tuple[int, ...]]:
        """The continuations of ``key``, newest first; asking counts as use."""
        under = self._keys.get(key)
        if under is None:
            return ()
        self._keys.move_to_end(key)
        return reversed(under)
