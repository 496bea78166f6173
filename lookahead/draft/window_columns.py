"""How many columns of the lookahead window a pass carries."""

from collections.abc import Sequence

from lookahead.draft.tree_worth import TreeWorth
from lookahead.sources.jacobi_window import columns_for, window_nodes

_CHOICES = (2, 4, 8, 16)
_GAIN = 0.004  # tokens a pass that a column is taken to bring, before it has shown what it brings
_GAIN_PASSES = 256.0  # column-passes that this guess is worth
_HOLD = 64  # passes for which a choice stands, because a window pays late
_FIRST_HOLD = 16  # the same for a first choice; and passes before it, with a fixed number of nodes
_LEAST_GAIN = 1.05  # of speed, that columns must promise


class WindowColumns:
    """The number of columns, by what a column has brought; a choice stands for a while.

    Args:
        worth: of the other sources' trees.
        alone: there are no other sources.

    Attributes:
        count: columns of this pass.
    """

    def __init__(self, worth: TreeWorth, alone: bool) -> None:
        self.count = 0
        self._worth = worth
        self._alone = alone
        self._until = 0  # the pass until which the choice stands
        self._tokens = _GAIN * _GAIN_PASSES
        self._passes = _GAIN_PASSES

    def learn(self, columns: int, accepted: int) -> None:
        """Take in a pass with so many columns, of whose n-grams ``accepted`` tokens were accepted."""
        self._passes += columns
        self._tokens += accepted

    def choose(self, passed: int, curve: Sequence[float], most: int) -> None:
        """Choose what pays beside trees like those of late (at most ``most`` nodes), for pass number ``passed``."""
        if passed < self._until:
            return
        count, gain = min(most, 1 + round(self._worth.nodes)), self._tokens / self._passes
        expected = 1.0 + self._worth.expected(count - 1)
        best, chosen = _LEAST_GAIN * expected / curve[count - 1], 0
        for columns in _CHOICES:
            total = count + window_nodes(columns)
            if total > len(curve):
                break
            speed = (expected + gain * columns) / curve[total - 1]
            if speed > best:
                best, chosen = speed, columns
        if chosen:  # at first for a short while: that may show that they bring nothing
            self._until = passed + (_HOLD if self.count else _FIRST_HOLD)
        self.count = chosen

    def choose_of(self, nodes: int, passed: int) -> None:
        """Choose what brings more than the candidates whose place it takes among ``nodes`` nodes."""
        if passed < self._until:
            return
        self._until = passed + (_HOLD if passed > 1 else _FIRST_HOLD)
        if self._alone:
            self.count = columns_for(max(nodes // 2, min(nodes, window_nodes(1))))
        elif passed > 1:
            gain = self._tokens / self._passes
            self.count = max(
                (0, *(columns for columns in _CHOICES if window_nodes(columns) <= nodes)),
                key=lambda columns: self._worth.expected(nodes - window_nodes(columns)) + gain * columns,
            )
