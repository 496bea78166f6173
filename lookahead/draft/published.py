"""Drafts as published: a draft of given size in every pass."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from jacobi import Path, Successors, TokenTree
from lookahead.draft.context import RowContext
from lookahead.sources.draft_model import Passes
from lookahead.sources.ngram_pool import NgramPool, PoolSource

_WINDOW = "window"  # the source that its nodes are credited to
# Guesses chained behind the newest one. S on held-out code, greedy, 5/15/15, by this number: 0 3.38, 1 4.17, 2 4.57,
# 3 4.95, 6 5.25; sampled at temperature 0.8: 1.86, 1.90, 1.91, 1.92, 1.93. Past 3 the pass grows faster than S.
_MOST_CONTINUED = 3


class JacobiWindow:
    """The lookahead window, an (N-1) x W table of Jacobi trajectories, and the one move it makes a pass: take the new
    argmaxes in, give n-grams out, shift.

    Symbols of Fu et al., arXiv 2402.02057, section 3: W is ``window_size`` (columns), N is ``ngram_size`` (the window
    has N-1 levels). With the root at position p, column i of level l sits at position p+l+i; level 0 is stored without
    its column 0, which is the root itself.

    Level 0 starts with W+N-3 tokens. Every pass adds a level, of which older ones lose their first token, until there
    are N-1: W-1 tokens in level 0 and W in each other. From then on the oldest level is dropped. For W = 3, N = 4::

                   before          after a pass whose newest level's argmaxes are n1 n2 n3
        level 0    root a2 a3      root' b2 b3
        level 1      b1 b2 b3         c1 c2 c3
        level 2      c1 c2 c3         n1 n2 n3

        n-grams, read downwards: (root: b1 c1 n1)  (a2: b2 c2 n2)  (a3: b3 c3 n3)

    ``levels`` are those filled so far, oldest first.
    """

    def __init__(self, window_size: int, ngram_size: int, fill: Sequence[int]) -> None:
        self.window_size, self.ngram_size = window_size, ngram_size
        self.levels: list[list[int]] = [list(fill[: window_size + ngram_size - 3])]

    @property
    def warm(self) -> bool:
        return len(self.levels) == self.ngram_size - 1

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


class LookaheadDrafter:
    """Lookahead decoding (Fu et al., arXiv 2402.02057): the window's W columns and the pool's G guesses, in one tree::

        root -+- s1 -+- s2 -- w     level 0 of the window (W = 3: root, s1, s2), and below each its deeper levels
              |      +- w
              +- w
              +- g -- g -- g        a guess of the pool for the root

    The settings are those of :class:`lookahead.Lookahead`, with N >= 2; ``pool`` has this N and G. Where the model
    takes one branch only, there is no window, and of the guesses the newest is drafted, continued.
    """

    def __init__(
        self,
        row: RowContext,
        pool: NgramPool,
        window_size: int,
        *,
        pool_from_prompt: bool,
        pool_from_output: bool,
        always_forward_one: bool,
    ) -> None:
        self.pool, self._row = pool, row
        self._text = list(row.prompt)
        self._always_forward_one, self._pool_from_output = always_forward_one, pool_from_output
        if pool_from_prompt:
            pool.add_text(self._text)
        self._window: JacobiWindow | None = None
        if not row.chain:
            fill = self._draw(max(0, window_size + pool.ngram_size - 3))
            self._window = JacobiWindow(window_size, pool.ngram_size, fill)
        self._newest: list[int] = []
        self._columns = 1  # nodes of the tree drafted last that are the root and the window

    def _draw(self, count: int) -> list[int]:
        if self._text:
            return self._row.rng.choices(self._text, k=count)
        return [self._row.rng.randrange(self._row.vocab_size) for _ in range(count)]

    def draft(self, room: int) -> TokenTree:
        """The window and the guesses for the root, sharing prefixes; nothing lies deeper than ``room``."""
        tree = TokenTree(self._text[-1])
        if self._window is not None and room < len(self._window.levels):
            self._window = None  # the text ends before column 0 could be used
        if (window := self._window) is not None:
            if len(window.levels[0]) + len(window.levels) - 1 > room:
                window.narrow(room)
            self._newest = tree.grow_comb(window.levels)[-1]
        self._columns = len(tree)
        if self.pool.per_key:
            self._grow_guesses(tree, room)
        return tree

    def told(self, tree: TokenTree) -> tuple[Sequence[str], Sequence[float]]:
        """Of every node of the tree drafted last: its source. Nothing is estimated."""
        guesses = len(tree) - self._columns
        return ["", *[_WINDOW] * (self._columns - 1), *[PoolSource.name] * guesses], []

    def _grow_guesses(self, tree: TokenTree, room: int) -> None:
        """Hang the pool's guesses below the root; free slots continue the newest with its own newest one. That lifts
        the limit of N tokens a pass where the text repeats, within the same budget of G(N-1) nodes."""
        guesses = list(islice(self.pool.get(tree.tokens[0]), 1 if self._row.chain else self.pool.per_key))
        for guess in guesses:
            tree.extend(0, guess[:room])
        if not guesses:
            return
        newest = guesses[0]
        node = tree.extend(0, newest[:room])
        for _ in range(min(_MOST_CONTINUED, self.pool.per_key - len(guesses))):
            newest = next(iter(self.pool.get(newest[-1])), ())
            if not newest or tree.depths[node] >= room:
                break
            node = tree.extend(node, newest[: room - tree.depths[node]])

    def learn(self, tree: TokenTree, greedy: Sequence[int], path: Path, successors: Successors | None = None) -> None:
        """Take n-grams from the window and shift it, then add the output's newest n-grams to the pool."""
        if self._window is not None and self._newest:  # nothing was drafted in the prompt's own pass
            for key, tail in self._window.advance(tree.tokens[0], [greedy[node] for node in self._newest]):
                self.pool.add(key, tail)
            if not self._always_forward_one:
                self._window.skip(self._draw(len(path.tokens) - 1))
        self._text += path.tokens
        if self._pool_from_output:
            self.pool.add_text(self._text[1 - self.pool.ngram_size - len(path.tokens) :])


# From the root's token, what drafts, the greatest depth, and whether the model takes one branch only, to a tree.
Grow = Callable[[int, Passes, int, bool], TokenTree]


@dataclass(eq=False)
class HeadDrafter:
    """One sequence's drafter with a head alone, the source ``name``: every pass scores a tree that ``grow`` makes of
    what it says. ``learnt`` is told what became of each."""

    name: str
    prompt: Sequence[int]
    passes: Passes
    grow: Grow
    chain: bool
    learnt: Callable[[TokenTree, Path], None] = lambda tree, path: None
    root: int = -1
    started: bool = False

    def draft(self, room: int) -> TokenTree:
        return self.grow(self.root, self.passes, room, self.chain)

    def told(self, tree: TokenTree) -> tuple[Sequence[str], Sequence[float]]:
        """Every node is the head's. Nothing is estimated."""
        return ["", *[self.name] * (len(tree) - 1)], []

    def learn(self, tree: TokenTree, greedy: Sequence[int], path: Path, successors: Successors | None = None) -> None:
        if not self.started:
            self.passes.start(self.prompt)
            self.started = True
        self.learnt(tree, path)
        self.passes.write(path)
        self.root = path.tokens[-1]
