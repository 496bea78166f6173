"""What trees were worth of late, and the size that pays best for all sequences of a batch."""

from collections.abc import Sequence
from math import log2

from lookahead.draft.acceptance import Acceptance

_FADE = 0.9  # of what trees were worth, from pass to pass
_BATCH_GAIN = 0.075  # speed a draft must promise for every doubling of a batch: out of step, sequences need copies
_FIRST_NODES = 4  # drafted before anything is known


class TreeWorth:
    """The value of the first, second, ... drafted node of a sequence's tree, smoothed over passes.

    A batch is done when its slowest sequence is, so of its trees only those of the sequences furthest behind count.

    Attributes:
        nodes: of a tree, smoothed.
    """

    def __init__(self, acceptance: Acceptance) -> None:
        self.nodes = 0.0
        self._acceptance = acceptance
        self._values: list[float] = []
        self._last: list[tuple[int, Sequence[float]]] = []  # of the last pass: tokens written, values

    def learn(self, values: Sequence[float], written: int) -> None:
        """Take in the values of one tree, whose sequence has ``written`` tokens by now."""
        self.nodes += (1.0 - _FADE) * (len(values) - self.nodes)
        self._last.append((written, values))

    def close(self, most: int) -> None:
        """End a pass in which a tree could have ``most`` drafted nodes."""
        trees, self._last = self._last, []
        least = min((written for written, _ in trees), default=0)
        for written, values in trees:
            if written == least:
                self._weigh(values, most)

    def _weigh(self, values: Sequence[float], most: int) -> None:
        worth = self._values
        for place, value in enumerate(values):
            if place < len(worth):
                worth[place] += (1.0 - _FADE) * (value - worth[place])
            else:
                worth.append(value)
        for place in range(len(values), min(len(worth), most)):
            worth[place] *= _FADE  # there was room, and no candidate

    def expected(self, nodes: int) -> float:
        """Tokens that trees of so many drafted nodes brought of late."""
        return self._acceptance.expected(self._values[:nodes])

    def batch_size(self, costs: Sequence[float], batch: int) -> int:
        """The number of nodes that pays best for all sequences, at these costs of trees of 1, 2, ... nodes."""
        worth = self._values
        if not worth:
            return 1 + _FIRST_NODES
        best, size, expected = (1.0 + _BATCH_GAIN * log2(batch)) / costs[0], 1, 1.0
        calibration, last = self._acceptance.calibration, worth[-1] * len(worth)
        for count in range(1, len(costs)):
            value = worth[count - 1] if count <= len(worth) else last / count
            expected += value * calibration
            if expected / costs[count] > best:
                best, size = expected / costs[count], count + 1
        return size
