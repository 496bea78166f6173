"""The lookahead window: an (N-1) x W table of Jacobi trajectories.

Symbols of Fu et al., arXiv 2402.02057, section 3: W is ``window_size`` (columns), N is ``ngram_size`` (the window has
N-1 levels), G is ``verification_set_size``. With the root at position p, column i of level l sits at position p+l+i;
level 0 is stored without its column 0, which is the root itself.
"""

from collections.abc import Sequence


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
