"""The n-gram pool against a slow model of the same policy."""

from collections.abc import Sequence

import pytest
from helpers.drafting import tokens_of
from helpers.refusals import refuses
from helpers.toy import examples
from hypothesis import given
from hypothesis import strategies as st

from jacobi import Path, TokenTree
from lookahead.sources import PoolSource
from lookahead.sources.ngram_pool import NgramPool

Ngram = tuple[int, ...]
KEYS = st.integers(0, 5)
TAILS = st.tuples(st.integers(0, 2), st.integers(0, 2))
# Adding an n-gram, or (None) asking for a key's.
USES = st.lists(st.tuples(KEYS, st.none() | TAILS), max_size=60)


class SlowPool:
    """The policy in the words of its documentation: two lists in order of use, searched from end to end."""

    def __init__(self, per_key: int, capacity: int) -> None:
        self.per_key, self.capacity = per_key, capacity
        self.ngrams: list[tuple[int, Ngram]] = []  # the newest last
        self.keys: list[int] = []  # the most recently used last

    def use(self, key: int) -> None:
        self.keys = [other for other in self.keys if other != key] + [key]

    def add(self, key: int, tail: Ngram) -> None:
        if self.per_key == 0:
            return
        self.ngrams = [ngram for ngram in self.ngrams if ngram != (key, tail)] + [(key, tail)]
        self.use(key)
        of_key = [ngram for ngram in self.ngrams if ngram[0] == key]
        if len(of_key) > self.per_key:
            self.ngrams.remove(of_key[0])
        while len(self.ngrams) > self.capacity:
            oldest = self.keys.pop(0)
            self.ngrams = [ngram for ngram in self.ngrams if ngram[0] != oldest]

    def get(self, key: int) -> list[Ngram]:
        if key in self.keys:
            self.use(key)
        return [tail for other, tail in reversed(self.ngrams) if other == key]


def contents(pool: NgramPool | SlowPool, keys: Sequence[int] = range(10)) -> dict[int, list[Ngram]]:
    return {key: list(pool.get(key)) for key in keys}


@examples(150)
@given(USES, st.integers(0, 3), st.integers(3, 12))
def test_policy_is_the_slow_model(uses: list[tuple[int, Ngram | None]], per_key: int, capacity: int) -> None:
    """After every single use: the same size, at most G a key, never more than the capacity."""
    pool, slow = NgramPool(3, per_key, capacity), SlowPool(per_key, capacity)
    for key, tail in uses:
        if tail is None:
            assert list(pool.get(key)) == slow.get(key)
        else:
            pool.add(key, tail)
            slow.add(key, tail)
            assert list(pool.get(key))[:1] == slow.get(key)[:1] == ([tail] if per_key else [])
        assert len(pool) == len(slow.ngrams) <= capacity
    found = contents(pool)
    assert found == contents(slow)
    assert all(len(tails) <= per_key and len(set(tails)) == len(tails) for tails in found.values())
    assert sum(map(len, found.values())) == len(pool)


@examples(150)
@given(st.lists(st.integers(0, 3), max_size=20), st.integers(2, 5))
def test_add_text_adds_every_ngram(text: list[int], size: int) -> None:
    """With room for all of them, a key holds exactly what followed it, the last seen first."""
    pool = NgramPool(size, 100)
    pool.add_text(text)
    ngrams = [tuple(text[start:][:size]) for start in range(len(text)) if len(text[start:]) >= size]
    assert len(pool) == len(set(ngrams))
    for key in range(4):
        newest_first = dict.fromkeys(ngram[1:] for ngram in reversed(ngrams) if ngram[0] == key)
        assert list(pool.get(key)) == list(newest_first)


@pytest.mark.parametrize(
    ("ngram_size", "per_key", "capacity", "message"),
    [
        (1, 1, 10, "ngram_size >= 2.*got ngram_size=1, per_key=1, capacity=10"),
        (3, -1, 10, "per_key >= 0.*got ngram_size=3, per_key=-1"),
        (3, 5, 4, "capacity >= per_key.*got ngram_size=3, per_key=5, capacity=4"),
        (3, 0, 0, "capacity=0"),
    ],
)
def test_impossible_pools(ngram_size: int, per_key: int, capacity: int, message: str) -> None:
    refuses(message, NgramPool, ngram_size, per_key, capacity)


def pool_source(text: Sequence[int]) -> PoolSource:
    source = PoolSource()
    source.start(text, None)
    return source


def test_pool_proposes_ngrams_of_the_text() -> None:
    source = pool_source([1, 2, 3, 4, 5, 1, 2, 6, 7, 8, 1])
    state = source.root()
    assert tokens_of(source.propose(state)) == [2]
    state = source.step(state, 2)
    assert source.propose(state) == [(6, 3), (3, 4)], "the newest n-gram first; one token into it"
    state = source.step(state, 6)
    assert source.propose(state) == [(7, 6)]
    state = source.step(state, 7)
    assert source.propose(state) == [(8, 9)]
    state = source.step(state, 8)
    assert source.propose(state) == [], "the n-gram ends here, and no other starts with 8"
    again = source.step(source.root(), 5)
    assert tokens_of(source.propose(again)) == [1], "no n-gram goes on with 5, but one starts at it"


def test_pool_goes_on_where_an_ngram_ends() -> None:
    source = pool_source([1, 2, 3, 4, 5, 6, 7, 8, 9, 1])
    state, path = source.root(), []
    for _ in range(7):
        token = tokens_of(source.propose(state))[0]
        path.append(token)
        state = source.step(state, token)
    assert path == [2, 3, 4, 5, 6, 7, 8]


def test_pool_learns_the_output() -> None:
    source = pool_source([])
    source.learn(TokenTree(0), Path([0], [1]), None)
    source.learn(TokenTree(1), Path([0, 1, 2, 3], [2, 3, 4, 5]), None)
    assert len(source.pool) == 1
    source.learn(TokenTree(5), Path([0], [1]), None)
    assert tokens_of(source.propose(source.root())) == [2]
    assert list(source.pool.get(1)) == [(2, 3, 4, 5)]
