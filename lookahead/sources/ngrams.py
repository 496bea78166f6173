"""The n-gram pool as a source, and the Jacobi window that feeds it."""

import random
from collections.abc import Sequence
from itertools import islice

from jacobi import Path, Successors, TokenTree
from lookahead.sources.jacobi_window import JacobiWindow
from lookahead.sources.ngram_pool import NgramPool

NGRAM_SIZE = 5
_PER_KEY = 7  # guesses kept under one token
_RANKS = 3
State = tuple[int, int, tuple[tuple[int, ...], ...]]  # last token, tokens into the n-gram, its possible rests


def window_nodes(columns: int) -> int:
    """The most nodes that a window of so many columns adds to a tree, while it is being filled or later."""
    levels = range(1, NGRAM_SIZE)
    return max(count * (columns + NGRAM_SIZE - 1 - count) - 1 for count in levels) if columns else 0


def columns_for(nodes: int) -> int:
    """How many window columns fit into so many nodes."""
    columns = max(0, (nodes + 1) // (NGRAM_SIZE - 1))
    while columns and window_nodes(columns) > nodes:
        columns -= 1
    return columns


class PoolSource:
    """Candidates from a pool of n-grams keyed by their first token (Fu et al., arXiv 2402.02057, section 3.2).

    A candidate's kind is how far into the n-gram it stands and its rank. Where an n-gram ends, the pool is asked again
    for the last token. This pool is fed from prompt and output.
    """

    name = "pool"
    priors = tuple(
        (0.35, 0.5, 0.6, 0.7)[place] * (1.0, 0.4, 0.2)[rank]
        for place in range(NGRAM_SIZE - 1)
        for rank in range(_RANKS)
    )

    def __init__(self) -> None:
        self.pool = NgramPool(NGRAM_SIZE, _PER_KEY)
        self._text: list[int] = []

    def start(self, prompt: Sequence[int], successors: Successors | None) -> None:
        """Add the prompt's n-grams."""
        self._text = list(prompt)
        self.pool.add_text(self._text)

    def root(self) -> State:
        """The guesses for the last written token."""
        return self._at(self._text[-1]) if self._text else (-1, 0, ())

    def _at(self, token: int) -> State:
        return (token, 0, tuple(islice(self.pool.get(token), _PER_KEY)))

    def step(self, state: State, token: int) -> State:
        """The guesses that go on with ``token``, or, where none is left, those that start at it."""
        rests = tuple(rest[1:] for rest in state[2] if rest[0] == token and len(rest) > 1)
        return (token, state[1] + 1, rests) if rests else self._at(token)

    def propose(self, state: State) -> list[tuple[int, int]]:
        """The next token of each guess, the newest guess first."""
        found: dict[int, int] = {}
        for rest in state[2]:
            if rest[0] not in found:
                found[rest[0]] = state[1] * _RANKS + min(len(found), _RANKS - 1)
        return list(found.items())

    def learn(self, tree: TokenTree, path: Path, successors: Successors | None) -> None:
        """Add the output's newest n-grams."""
        for token in path.tokens:
            self._text.append(token)
            if len(self._text) >= NGRAM_SIZE:
                self.pool.add(self._text[-NGRAM_SIZE], tuple(self._text[1 - NGRAM_SIZE :]))


class WindowSource(PoolSource):
    """The lookahead window (same paper, section 3.1) with a pool of its own, fed from its trajectories alone.

    Its columns are not candidates but an investment: each costs N-1 nodes a pass and brings n-grams for later passes.
    Who grows the tree decides how many columns that is worth (:meth:`grow`, :func:`window_nodes`).

    Args:
        rng: source of the window's first tokens.
        vocab_size: the window starts from random tokens where there is no text to draw from.
    """

    name = "window"

    def __init__(self, rng: random.Random, vocab_size: int) -> None:
        super().__init__()
        self._rng = rng
        self._vocab_size = vocab_size
        self._window: JacobiWindow | None = None
        self._newest: list[int] = []

    def start(self, prompt: Sequence[int], successors: Successors | None) -> None:
        """Remember the prompt, from which the window's first tokens are drawn."""
        self._text = list(prompt)

    def grow(self, tree: TokenTree, columns: int, room: int) -> None:
        """Add the window to a tree: as many columns as asked for, and as fit above depth ``room``."""
        window = self._window
        if columns < 1 or room < NGRAM_SIZE - 1:
            self._window, self._newest = None, []
            return
        if window is None or window.window_size < columns:
            size = columns + NGRAM_SIZE - 3
            fill = (
                self._rng.choices(self._text, k=size)
                if self._text
                else self._rng.choices(range(self._vocab_size), k=size)
            )
            window = self._window = JacobiWindow(columns, NGRAM_SIZE, fill)
        elif window.window_size > columns:
            window.shrink(columns)
        if len(window.levels[0]) + len(window.levels) - 1 > room:
            window.narrow(room)
        self._newest = tree.grow_comb(window.levels)[-1]

    def learn(self, tree: TokenTree, path: Path, successors: Successors | None) -> None:
        """Take the n-grams that the window finished, and shift it."""
        if self._window is not None and self._newest and successors is not None:
            new = [successors.tokens[node][0] for node in self._newest]
            for key, tail in self._window.advance(tree.tokens[0], new):
                self.pool.add(key, tail)
        self._newest = []
        self._text += path.tokens
