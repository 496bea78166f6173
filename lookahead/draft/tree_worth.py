"""What trees of a pass are worth for all sequences of a batch, and what columns of the lookahead window are."""

from collections.abc import Sequence
from math import log2

import numpy as np

from lookahead.draft.acceptance import Acceptance
from lookahead.draft.latency import NODES
from lookahead.sources.jacobi_window import columns_for, window_nodes

_FADE = 0.9  # of what trees were worth, from pass to pass
_BATCH_GAIN = 0.05  # speed a draft must promise for every doubling of a batch: the luck of its slowest row ends it
_HORIZON = 4.0  # tokens; a lead of so many counts e times less
_CHOICES = (2, 4, 8, 16)
_GAIN = 0.004  # tokens a pass that a column is taken to bring, before it has shown what it brings
_GAIN_PASSES = 256.0  # column-passes that this guess is worth
_HOLD = 64  # passes for which a choice stands, because a window pays late
_FIRST_HOLD = 16  # the same for a first choice; and passes before it, with a fixed number of nodes
_LEAST_GAIN = 1.05  # of speed, that columns must promise


def shared_width(
    trees: Sequence[tuple[Sequence[float], int]],
    costs: Sequence[float],
    calibration: float,
    least_gain: float = 1.0,
    *,
    apart: bool = False,
) -> int:
    """The nodes a tree that pay best for all sequences, one of the curve's sizes: each further size has kernels of its
    own, whose first pass is slow. ``trees`` have the values of a tree's nodes, and the tokens that its sequence has
    written; ``costs`` are those of passes over 1, 2, ... nodes. Drafts have to promise ``least_gain`` times the speed
    of none.

    A batch is done when its slowest sequence is. So what is left to write, with a horizon h, counts as h times the
    logarithm of the sum of ``exp(left / h)``: those that are behind count more, and a long leap of one less than the
    same tokens for all, which count in full.
    Sequences that end ``apart``, each making room for another, are worth what they write.
    """
    most = min(len(costs), 1 + max((len(values) for values, _ in trees), default=0))
    if most < 2:
        return 1
    left = np.array([-written for _, written in trees], float)
    values = np.zeros((len(trees), most))
    for row, (each, _) in enumerate(trees):
        values[row, 1 : 1 + len(each)] = each[: most - 1]
    if apart:
        speeds = (1.0 + calibration * values.cumsum(1)).sum(0) / np.asarray(costs[:most])
        speeds[0] *= least_gain
        return _best_size(speeds)
    weights = np.exp((left - left.max()) / _HORIZON)
    written = 1.0 + calibration * values.cumsum(1)
    nearer = -_HORIZON * np.log(weights @ np.exp(-written / _HORIZON) / weights.sum())  # tokens, to the batch's end
    speeds = nearer / np.asarray(costs[:most])
    speeds[0] *= max(least_gain, 1.0 + _BATCH_GAIN * log2(max(2, len(trees))))
    return _best_size(speeds)


def _best_size(speeds: np.ndarray) -> int:
    sizes = [size for size in NODES if size <= len(speeds)]
    return sizes[int(speeds[[size - 1 for size in sizes]].argmax())]


class TreeWorth:
    """The value of the first, second, ... drafted node of a sequence's tree, smoothed over passes."""

    def __init__(self, acceptance: Acceptance) -> None:
        self.nodes = 0.0  # of a tree, smoothed
        self._acceptance = acceptance
        self._values: list[float] = []

    def learn(self, values: Sequence[float], most: int) -> None:
        """Take in the values of one tree, which had room for ``most`` nodes."""
        count, known = len(values), self._values
        self.nodes += (1.0 - _FADE) * (count - self.nodes)
        worth = [old + (1.0 - _FADE) * (value - old) for old, value in zip(known, values, strict=False)]
        missing = [_FADE * old for old in known[count:most]]  # there was room, and no candidate
        self._values = [*worth, *values[len(known) :], *missing, *known[max(count, most) :]]

    def expected(self, nodes: int) -> float:
        """Tokens that trees of so many drafted nodes brought of late."""
        return self._acceptance.expected(self._values[:nodes])


class WindowColumns:
    """The number of the window's columns, by what a column has brought; a choice stands for a while. ``worth`` is that
    of the other sources' trees; ``alone`` says that there are none."""

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
            speed = (expected + gain * columns) / max(curve[count - 1 : total])  # a dip is as good for other nodes
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
