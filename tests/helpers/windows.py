"""The lookahead window written out slowly, from the papers' description."""

from collections.abc import Iterator, Sequence

Ngram = tuple[int, tuple[int, ...]]


class SlowWindow:
    """Every cell by its level and its position in the text; nothing is shifted, cells are looked up where they are.

    Level l of the pass rooted at position p holds the positions from p+l up to its right edge; level 0's own position
    p is the root. The window starts with positions 1 to W+N-3 of level 0 (the first root is at position 0), and a
    level's right edge is one further than that of the level it was computed from.
    """

    def __init__(self, window_size: int, ngram_size: int, fill: Sequence[int]) -> None:
        self.newest_allowed = ngram_size - 2
        self.edge = window_size + ngram_size - 3
        self.newest = 0
        self.cells = {(0, 1 + place): fill[place] for place in range(self.edge)}
        self.root_position = 0

    def level(self, level: int) -> list[int]:
        """The tokens of a level from column 0 on; level 0 without the root."""
        return [self.cells[level, position] for position in self.positions(level) if (level, position) in self.cells]

    def positions(self, level: int) -> range:
        # The newest level's right edge is `edge`; each older one ends one place before the next.
        first = self.root_position + level
        return range(first, self.edge - (self.newest - level) + 1)

    def advance(self, root: int, new: Sequence[int]) -> list[Ngram]:
        """``new[i]`` follows the newest level's i-th column, the root being level 0's first."""
        p, newest = self.root_position, self.newest
        self.cells[0, p] = root
        for position, token in zip(self.positions(newest), new, strict=True):
            self.cells[newest + 1, position + 1] = token
        self.edge += 1
        self.newest += 1
        harvest: list[Ngram] = []
        if newest == self.newest_allowed:
            for column in range(len(new)):
                diagonal = [self.cells[level, p + column + level] for level in range(newest + 2)]
                harvest.append((diagonal[0], tuple(diagonal[1:])))
            self.cells = {(level - 1, position): token for (level, position), token in self.cells.items() if level}
            self.newest -= 1
        self.root_position += 1
        self.cells.pop((0, self.root_position), None)  # from now on the root itself
        return harvest

    def levels(self) -> list[list[int]]:
        return [self.level(level) for level in range(self.newest + 1)]


def counter() -> Iterator[int]:
    """Different tokens, so that every cell can be told from every other."""
    yield from range(100, 100000)
