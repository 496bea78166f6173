"""The n-gram pool: what the window, the prompt and the output have taught, ready to be verified as guesses."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from jacobi import LookaheadError, Path, Successors, TokenTree
from lookahead.sources.base import RANKS

PoolState = tuple[int, int, tuple[tuple[int, ...], ...]]  # last token, tokens into the n-gram, its possible rests


class NgramPool:
    """n-grams by their first token, least recently used out first (arXiv 2402.02057, section 3.2).

    For N = 3, after ``add_text`` of "the cat sat on the cat ran"::

        key   continuations, newest first
        the   (cat ran)  (cat sat)
        cat   (sat on)
        sat   (on the)
        on    (the cat)

    Adding a continuation that is there makes it the newest again. ``ngram_size`` is the paper's N, ``per_key`` is G,
    the most continuations under one token (0: the pool stays empty). With ``capacity`` n-grams the pool is full: the
    key that was neither added to nor asked for the longest goes first.
    """

    def __init__(self, ngram_size: int = 5, per_key: int = 7, capacity: int = 65536) -> None:
        if ngram_size < 2 or per_key < 0 or capacity < max(1, per_key):
            raise LookaheadError(
                "A pool needs ngram_size >= 2, per_key >= 0 and capacity >= per_key: "
                f"got ngram_size={ngram_size}, per_key={per_key}, capacity={capacity}."
            )
        self.ngram_size, self.per_key, self.capacity = ngram_size, per_key, capacity
        self._keys: OrderedDict[int, OrderedDict[tuple[int, ...], None]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, key: int, continuation: tuple[int, ...]) -> None:
        """Put ``continuation`` (N-1 tokens) under ``key`` as its newest."""
        if not self.per_key:
            return
        under = self._keys.setdefault(key, OrderedDict())
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
        size = self.ngram_size
        for start in range(len(tokens) - size + 1):
            self.add(tokens[start], tuple(tokens[start + 1 : start + size]))

    def get(self, key: int) -> Iterable[tuple[int, ...]]:
        """The continuations of ``key``, newest first; asking counts as use."""
        if (under := self._keys.get(key)) is None:
            return ()
        self._keys.move_to_end(key)
        return reversed(under)


class PoolSource:
    """Candidates from a pool of n-grams keyed by their first token (Fu et al., arXiv 2402.02057, section 3.2). A
    candidate's kind is how far into the n-gram it stands and its rank. Where an n-gram ends, the pool is asked again
    for the last token. This pool is fed from prompt and output."""

    name = "pool"
    priors = tuple(place * rank for place in (0.35, 0.5, 0.6, 0.7) for rank in (1.0, 0.4, 0.2))  # place, rank

    def __init__(self) -> None:
        self.pool = NgramPool()
        self._text: list[int] = []

    def start(self, prompt: Sequence[int], successors: Successors | None) -> None:
        self._text = list(prompt)
        self.pool.add_text(self._text)

    def root(self) -> PoolState:
        return self._at(self._text[-1]) if self._text else (-1, 0, ())

    def _at(self, token: int) -> PoolState:
        return (token, 0, tuple(self.pool.get(token)))

    def step(self, state: PoolState, token: int) -> PoolState:
        """The guesses that go on with ``token``, or, where none is left, those that start at it."""
        rests = tuple(rest[1:] for rest in state[2] if rest[0] == token and len(rest) > 1)
        return (token, state[1] + 1, rests) if rests else self._at(token)

    def propose(self, state: PoolState) -> list[tuple[int, int]]:
        found: dict[int, int] = {}
        for rest in state[2]:
            if rest[0] not in found:
                found[rest[0]] = state[1] * RANKS + min(len(found), RANKS - 1)
        return list(found.items())

    def learn(self, tree: TokenTree, path: Path, successors: Successors | None) -> None:
        self._text += path.tokens
        self.pool.add_text(self._text[1 - self.pool.ngram_size - len(path.tokens) :])
