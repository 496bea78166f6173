"""The lookahead window: an (N-1) x W table of Jacobi trajectories, and the drafter that grows trees from it.

Symbols of Fu et al., arXiv 2402.02057, section 3: W is ``window_size`` (columns), N is ``ngram_size`` (the window has
N-1 levels), G is ``verification_set_size``. With the root at position p, column i of level l sits at position p+l+i;
level 0 is stored without its column 0, which is the root itself.
"""

import random
from collections.abc import Sequence
from itertools import islice

from jacobi.drafter import Successors
from jacobi.tree import TokenTree
from jacobi.verify import Path
from lookahead.sources.ngram_pool import NgramPool

# Guesses chained behind the newest one. S on held-out code, greedy, 5/15/15, by this number: 0 3.38, 1 4.17, 2 4.57,
# 3 4.95, 6 5.25; sampled at temperature 0.8: 1.86, 1.90, 1.91, 1.92, 1.93. Past 3 the pass grows faster than S.
_MOST_CONTINUED = 3


class JacobiWindow:
    """The window's tokens, and the one move it makes a pass: take the new argmaxes in, give n-grams out, shift.

    It starts with level 0 alone, W+N-3 tokens long. Every pass adds a level while older levels lose their first token,
    until there are N-1 levels: W-1 tokens in level 0 and W in each other. From then on the oldest level is dropped.

    Attributes:
        levels: tokens of the levels filled so far, oldest first.
    """

    def __init__(self, window_size: int, ngram_size: int, fill: Sequence[int]) -> None:
        self.window_size = window_size
        self.ngram_size = ngram_size
        self.levels: list[list[int]] = [list(fill[: window_size + ngram_size - 3])]

    @property
    def warm(self) -> bool:
        """Whether all N-1 levels are filled."""
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
        """Take in the argmaxes at the newest level; return the finished n-grams as (key, N-1 tokens).

        Args:
            root: the token the pass was rooted at: the key of column 0.
            new: argmax of each column of the newest level, column 0 first.
        """
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
    """One row's lookahead decoding: the window and the pool's guesses in one trie, every path of it verified.

    Args:
        window_size: W >= 1.
        ngram_size: N >= 2.
        verification_set_size: G >= 0.
        prompt: the row's prompt.
        vocab_size: the window starts from random tokens where there is no prompt to draw from.
        rng: source of the window's first tokens (and of its refills).
        pool: where n-grams are kept.
        pool_from_prompt: add the prompt's n-grams.
        pool_from_output: add every n-gram of the output.
        always_forward_one: shift the window by one a pass, however many tokens were accepted; otherwise by their
            number, with tokens drawn from the text so far at the right edge.
        chain: draft one branch only: no window, and of the guesses the newest, continued.
    """

    def __init__(
        self,
        *,
        window_size: int,
        ngram_size: int,
        verification_set_size: int,
        prompt: Sequence[int],
        vocab_size: int,
        rng: random.Random,
        pool: NgramPool,
        pool_from_prompt: bool,
        pool_from_output: bool,
        always_forward_one: bool,
        chain: bool = False,
    ) -> None:
        self.pool = pool
        self._guesses = verification_set_size
        self._chain = chain
        self._text = list(prompt)
        self._vocab_size = vocab_size
        self._rng = rng
        self._always_forward_one = always_forward_one
        self._pool_from_output = pool_from_output
        if pool_from_prompt:
            pool.add_text(self._text)
        self._window: JacobiWindow | None = None
        if not chain:
            self._window = JacobiWindow(window_size, ngram_size, self._draw(max(0, window_size + ngram_size - 3)))
        self._newest: list[int] = []

    def _draw(self, count: int) -> list[int]:
        if self._text:
            return self._rng.choices(self._text, k=count)
        return [self._rng.randrange(self._vocab_size) for _ in range(count)]

    def draft(self, room: int) -> TokenTree:
        """The window's comb and the guesses for the root, sharing prefixes; nothing lies deeper than ``room``."""
        tree = TokenTree(self._text[-1])
        window = self._window
        if window is not None:
            if room < len(window.levels):
                self._window = window = None  # the text ends before column 0 could be used
            else:
                if len(window.levels[0]) + len(window.levels) - 1 > room:
                    window.narrow(room)
                self._newest = tree.grow_comb(window.levels)[-1]
        if self._guesses:
            self._grow_guesses(tree, room)
        return tree

    def _grow_guesses(self, tree: TokenTree, room: int) -> None:
        """Hang the pool's guesses below the root; slots left free continue the newest guess with its own newest one.

        Continuing lifts the limit of N tokens a pass where the text repeats, within the same budget of G(N-1) nodes.
        """
        guesses = list(islice(self.pool.get(tree.tokens[0]), 1 if self._chain else self._guesses))
        for guess in guesses:
            tree.extend(0, guess[:room])
        if not guesses:
            return
        newest = guesses[0]
        node = tree.extend(0, newest[:room])
        for _ in range(min(_MOST_CONTINUED, self._guesses - len(guesses))):
            newest = next(iter(self.pool.get(newest[-1])), ())
            if not newest or tree.depths[node] >= room:
                break
            node = tree.extend(node, newest[: room - tree.depths[node]])

    def learn(self, tree: TokenTree, greedy: Sequence[int], path: Path, successors: Successors | None = None) -> None:
        """Harvest and shift the window, then add the output's newest n-grams to the pool."""
        if self._window is not None and self._newest:  # nothing was drafted in the prompt's own pass
            for key, tail in self._window.advance(tree.tokens[0], [greedy[node] for node in self._newest]):
                self.pool.add(key, tail)
            if not self._always_forward_one:
                self._window.skip(self._draw(len(path.tokens) - 1))
        text, size = self._text, self.pool.ngram_size
        for token in path.tokens:
            text.append(token)
            if self._pool_from_output and len(text) >= size:
                self.pool.add(text[-size], tuple(text[1 - size :]))
