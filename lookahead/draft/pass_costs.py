"""What a pass costs: the latency curve as trees have to pay for it, with what is replayed."""

from collections.abc import Callable, Sequence
from typing import Protocol

from lookahead.draft.latency import StepTimes

_REFRESH = 8  # passes that a computed curve serves
_LONGEST_REFRESH = 64  # the same, while nothing is drafted
_SINGLE_AFTER = (2, 8, 16)  # passes after which t(1) is measured, while it rests on none, one or two passes
_SINGLE_EVERY = 256  # and once it is known
_REPLAY_COST = 1.5  # times a pass over two nodes: where replaying costs more, nothing is drafted on top
_REPLAY_FADE = 0.95  # of what drafted passes caused to be replayed, from pass to pass


class ModelLimits(Protocol):
    """What drafts need to know of the model as this call runs it."""

    def bucket(self, nodes: int) -> int:
        """The number of nodes that a pass over ``nodes`` nodes really computes."""

    @property
    def again(self) -> int:
        """Tokens that the next pass replays before its tree, as `runtime.linear` does."""

    @property
    def plain_ms(self) -> float | None:
        """Milliseconds of the model's own pass over one node, where this call's are faster; None = they are not."""


class PassCosts:
    """What the passes of a call cost, in milliseconds.

    A linear draft that is cut short has its accepted tokens replayed by the next pass, which may hold::

        | replayed ... | root | tree ... | window ... |

    The replay is charged to the drafts that cause it, and not to the tree behind it. ``anew`` finds the curve again
    once passes are run in another way; a tree has at most ``most`` nodes with its root.
    """

    def __init__(self, times: StepTimes, limits: ModelLimits, anew: Callable[[], StepTimes] | None, most: int) -> None:
        self.times = times
        self.curve: list[float] = []  # cost of a pass over 1, 2, ... nodes; empty until it is read
        self.trees: list[float] = []  # the same of a tree, beside the window
        self.least: list[float] = []  # the least slopes of ``trees``
        self.single_ms = 0.0  # what the passes so far would have taken as plain decoding, as far as is known
        self.timed_ms = 0.0  # what they took
        self._limits = limits
        self._anew = anew
        self._most = most
        self._context = 0
        self._served = 0  # passes since the curve was read
        self._since_single = 0  # passes since one had a single node
        self._replayed = 0  # tokens that this pass replays
        self._replay_ms = 0.0  # what replays cost of late, and how many drafted passes caused them
        self._replay_passes = 1.0

    def open(self, context: int, resting: int) -> bool:
        """Prepare for a pass behind ``context`` tokens, after ``resting`` plain passes: is the curve to be read?"""
        self._context = context
        self._served += 1
        self._since_single += 1
        before, self._replayed = self._replayed, self._limits.again
        serves = max(_REFRESH, min(resting, _LONGEST_REFRESH))
        return not self.curve or self._served >= serves or self._replayed != before

    def read(self) -> None:
        """Read the curve for this context."""
        self._served = 0
        sizes = [self._limits.bucket(count) for count in range(1, self._most + self._replayed + 1)]
        knots = self.times.curve(self._context, max(sizes))
        self.curve = [knots[size - 1] for size in sizes]

    def read_trees(self, window: int) -> None:
        """Work out what trees cost beside a window of so many nodes."""
        # The draft that was cut short has paid for the replay: without it, one node would take t(1).
        paid = self._replay_cost
        self.trees = [cost - paid for cost in self.curve[window + self._replayed :]]
        if self._replay_ms:  # a draft that is cut short will have to be paid for once more
            later = self._replay_ms / self._replay_passes
            self.trees[1:] = [cost + later for cost in self.trees[1:]]
        self.least = least_slopes(self.trees)

    @property
    def _replay_cost(self) -> float:
        """What the replay adds to a pass over one node."""
        return self.curve[self._replayed] - self.curve[0]

    @property
    def replay_is_expensive(self) -> bool:
        """Whether this pass replays so much that nothing is to be drafted behind it."""
        return bool(self._replayed) and self.curve[self._replayed] > _REPLAY_COST * self.curve[1]

    @property
    def single_is_due(self) -> bool:
        """Whether it is time to measure t(1)."""
        known = int(self.times.weight(1, self._context))
        after = _SINGLE_AFTER[known] if known < len(_SINGLE_AFTER) else _SINGLE_EVERY
        return not self.times.frozen and self._since_single > after

    def renew(self, spent_ms: float) -> None:
        """Passes are run in another way from now on; the change itself took ``spent_ms``."""
        self.timed_ms += spent_ms
        if self._anew is not None:
            self.times, self.curve = self._anew(), []

    def observe(self, width: int, taken_ms: float, beside_ms: float) -> None:
        """Take in a pass over ``width`` nodes, of whose time the curve knows nothing of ``beside_ms``."""
        self.times.add(self._limits.bucket(width + self._replayed), self._context, taken_ms - beside_ms)
        if self.times.knows_single:
            self.timed_ms += taken_ms
            single_ms = self.curve[0] if self.curve else self.times.ms(1, self._context)
            self.single_ms += max(single_ms, self._limits.plain_ms or 0.0)
        if self._replayed or self._replay_ms:
            self._replay_ms *= _REPLAY_FADE
            self._replay_passes *= _REPLAY_FADE
            if self.curve:
                self._replay_ms += self._replay_cost
        if width > 1:
            self._replay_passes += 1
        elif not self._replayed:
            self._since_single = 0


def least_slopes(curve: Sequence[float]) -> list[float]:
    """For each size, the least cost per further node to any larger size: the lower convex hull's slope; inf at last."""
    slopes = [float("inf")] * len(curve)
    hull = [len(curve) - 1]  # of the sizes to the right, nearest last
    for size in range(len(curve) - 2, -1, -1):
        while len(hull) > 1:
            near, next_one = hull[-1], hull[-2]
            if (curve[near] - curve[size]) * (next_one - size) < (curve[next_one] - curve[size]) * (near - size):
                break
            hull.pop()
        slopes[size] = (curve[hull[-1]] - curve[size]) / (hull[-1] - size)
        hull.append(size)
    return slopes
