"""What trees of a pass are worth for all sequences of a batch."""

from collections.abc import Sequence
from math import log2

import numpy as np

from lookahead.draft.latency import NODES

_BATCH_GAIN = 0.05  # speed a draft must promise for every doubling of a batch: the luck of its slowest row ends it
_HORIZON = 4.0  # tokens; a lead of so many counts e times less


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
