"""The lookahead window: an (N-1) x W table of Jacobi trajectories, and the source that carries one.

Symbols of Fu et al., arXiv 2402.02057, section 3: W is ``window_size`` (columns), N is ``ngram_size`` (the window has
N-1 levels), G is ``verification_set_size``. With the root at position p, column i of level l sits at position p+l+i;
level 0 is stored without its column 0, which is the root itself.
"""

import random
from collections.abc import Sequence

from jacobi import Path, Successors, TokenTree
from lookahead.sources.ngram_pool import NGRAM_SIZE, PoolSource


class JacobiWindow:
    """The window's tokens, and the one move it makes a pass: take the new argmaxes in, give n-grams out, shift.

    Level 0 starts with W+N-3 tokens. Every pass adds a level, of which older ones lose their first token, until there
    are N-1: W-1 tokens in level 0 and W in each other. From then on the oldest level is dropped. For W = 3, N = 4::

                   before          after a pass whose newest level's argmaxes are n1 n2 n3
        level 0    root a2 a3      root' b2 b3
        level 1      b1 b2 b3         c1 c2 c3
        level 2      c1 c2 c3         n1 n2 n3

        n-grams, read downwards: (root: b1 c1 n1)  (a2: b2 c2 n2)  (a3: b3 c3 n3)

    ``levels`` are those filled so far, oldest first; level 0 without its column 0.
    """

    def __init__(self, window_size: int, ngram_size: int, fill: Sequence[int]) -> None:
        self.window_size, self.ngram_size = window_size, ngram_size
        self.levels: list[list[int]] = [list(fill[: window_size + ngram_size - 3])]

    @property
    def warm(self) -> bool:
        return len(self.levels) == self.ngram_size - 1

    def shrink(self, window_size: int) -> None:
        """Drop columns from the right until there are ``window_size``, and what a window that is being filled needs."""
        self.window_size = min(self.window_size, window_size)
        width = self.window_size + self.ngram_size - 1 - len(self.levels)
        for depth, level in enumerate(self.levels):
            del level[width - (depth == 0) :]

    def narrow(self, room: int) -> None:
        """Drop columns from the right until no token is deeper than ``room``; needs ``room >= len(levels) - 1``."""
        for depth, level in enumerate(self.levels):
            del level[max(0, room - depth + (depth > 0)) :]

    def advance(self, root: int, new: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
        """Take in the root's token and the newest level's argmaxes; return finished n-grams as (key, N-1 tokens)."""
        levels = self.levels
        if not self.warm:
            for level in levels:
                del level[:1]
            levels.append(list(new[1:]))
            return []
        keys = [root, *levels[0]]
        ngrams = [(key, tail) for key, tail in zip(keys, zip(*levels[1:], new, strict=False), strict=False)]
        del levels[0]
        levels.append(list(new))
        del levels[0][:1]  # its column 0 is the new root
        return ngrams

    def skip(self, tokens: Sequence[int]) -> None:
        """Shift by one column more for each of ``tokens``, which fill the right edge (the levels above keep step)."""
        for level in self.levels:
            for token in tokens:
                level.append(token)
                del level[0]


def window_nodes(columns: int) -> int:
    """The most nodes that a window of so many columns adds to a tree, while it is being filled or later."""
    levels = range(1, NGRAM_SIZE)
    return max(count * (columns + NGRAM_SIZE - 1 - count) - 1 for count in levels) if columns else 0


def columns_for(nodes: int) -> int:
    columns = max(0, (nodes + 1) // (NGRAM_SIZE - 1))
    while columns and window_nodes(columns) > nodes:
        columns -= 1
    return columns


class WindowSource(PoolSource):
    """The lookahead window (same paper, section 3.1) with a pool of its own, fed from its trajectories alone. Its
    columns are no candidates but an investment: each costs N-1 nodes a pass and brings n-grams for later passes. Who
    grows the tree decides how many columns that is worth. ``rng`` draws the first tokens from the text, or, where that
    is empty, from the vocabulary."""

    name = "window"

    def __init__(self, rng: random.Random, vocab_size: int) -> None:
        super().__init__()
        self._rng, self._vocab_size = rng, vocab_size
        self._window: JacobiWindow | None = None
        self._newest: list[int] = []

    def start(self, prompt: Sequence[int], successors: Successors | None) -> None:
        self._text = list(prompt)

    def grow(self, tree: TokenTree, columns: int, room: int) -> None:
        """Add the window to a tree: as many columns as asked for, and as fit above depth ``room``."""
        window = self._window
        if columns < 1 or room < NGRAM_SIZE - 1:
            self._window, self._newest = None, []
            return
        if window is None or window.window_size < columns:
            size = columns + NGRAM_SIZE - 3
            fill = self._rng.choices(self._text or range(self._vocab_size), k=size)
            window = self._window = JacobiWindow(columns, NGRAM_SIZE, fill)
        elif window.window_size > columns:
            window.shrink(columns)
        if len(window.levels[0]) + len(window.levels) - 1 > room:
            window.narrow(room)
        self._newest = tree.grow_comb(window.levels)[-1]

    def learn(self, tree: TokenTree, path: Path, successors: Successors | None) -> None:
        if self._window is not None and self._newest and successors is not None:
            new = successors.tokens[self._newest, 0].tolist()
            for key, tail in self._window.advance(tree.tokens[0], new):
                self.pool.add(key, tail)
        self._newest = []
        self._text += path.tokens
