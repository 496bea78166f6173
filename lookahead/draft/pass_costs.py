"""How the trees of a call have to pay for its passes, by the latency curve, and what it costs that a linear draft is
cut short: the next pass replays its accepted tokens (`runtime.linear`)::

    | replayed ... | root | draft ... |

A draft that is kept whole costs nothing beside its pass, so the cost is charged by the chance that it is cut short.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

from lookahead.draft.latency import StepTimes

_NODES = 16  # a replayed token costs what one more node does in passes over up to so many
_REFRESH = 16  # passes that a computed curve serves
_SINGLE_AFTER = (1, 2, 8, 256)  # passes after which t(1) is measured, while it rests on none, one, two, and more
_FIRST_NODES, _STRIDE = 8, 4  # drafted by all sequences together at first; then, times the largest size measured
_FADE = 0.95  # of what passes took, wrote and caused to be replayed, from pass to pass


@dataclass(frozen=True, slots=True)
class Cut:
    """What it costs if a pass's draft is cut short: ``token_ms`` for each token that it has kept, and ``again_ms``
    besides, because tokens that the pass replays itself are replayed once more."""

    token_ms: float
    again_ms: float

    def cost(self, expected: float, whole: float, nodes: int) -> float:
        """On average, if ``expected`` of ``nodes`` are written, the root included, and all with chance ``whole``."""
        return self.token_ms * max(0.0, expected - whole * nodes) + self.again_ms * (1.0 - whole)


class Replays:
    """How often drafts were cut short of late, how much was replayed, and whether the next pass drafted again."""

    def __init__(self) -> None:
        self._drafts, self._cuts, self._tokens = 1.0, 0.0, 0.0
        self._replays, self._alone = 1.0, 0.0  # passes that replayed, and those of them that drafted nothing behind

    def observe(self, width: int, replayed: int, waiting: int) -> None:
        """Take in a pass over ``width`` nodes behind ``replayed`` tokens, after which so many wait for their replay."""
        if replayed:
            self._replays = _FADE * self._replays + 1.0
            self._alone = _FADE * self._alone + (width == 1)
        if width > 1:
            self._drafts = _FADE * self._drafts + 1.0
            self._cuts = _FADE * self._cuts + (waiting > 0)
            self._tokens = _FADE * self._tokens + waiting

    def cut(self, curve: Sequence[float], replayed: int) -> Cut:
        """What a cut costs in a pass that replays so many tokens; ``curve`` has the costs of 1, 2, ... nodes."""
        last = min(len(curve) - 1, _NODES)
        token_ms = max(0.0, curve[last] - curve[1]) / (last - 1) if last > 1 else 0.0
        # Where one token alone takes another kernel than several, a replay costs that much if nothing comes behind it.
        alone = self._alone / self._replays
        again_ms = curve[replayed] - curve[0] if replayed else alone * (curve[min(1, last)] - curve[0])
        return Cut(token_ms, max(0.0, again_ms))

    def mean_ms(self, cut: Cut) -> float:
        """What the cuts of late cost a draft."""
        return (cut.token_ms * self._tokens + cut.again_ms * self._cuts) / self._drafts


class ModelLimits(Protocol):
    """What drafts need to know of the model as this call runs it."""

    def bucket(self, nodes: int) -> int:
        """The number of nodes that a pass over ``nodes`` nodes really computes."""

    @property
    def typical(self) -> bool:
        """Whether the last pass took what passes of its size take."""

    @property
    def again(self) -> int:
        """Tokens that the next pass replays before its tree, as `runtime.linear` does."""

    @property
    def replays(self) -> bool:
        """Whether the accepted tokens of a draft that is cut short are replayed."""

    @property
    def repeated(self) -> int | None:
        """Tokens written so far that a look-up would have drafted rightly; None = nobody counts them."""

    @property
    def in_a_row(self) -> int:
        """How many of them the text ends with."""

    @property
    def plain_ms(self) -> float | None:
        """Milliseconds of the model's own pass over one node, where this call's are faster; None = they are not."""


class PassCosts:
    """What the passes of a call cost, in milliseconds. The replay of a draft that was cut short (:class:`Replays`) is
    charged to the drafts that cause it (``cut``), and not to the tree behind it. ``anew`` finds the curve again once
    passes are run in another way; a tree has at most ``most`` nodes with its root."""

    def __init__(
        self, times: StepTimes, limits: ModelLimits, anew: Callable[[], StepTimes] | None, most: int, batch: int
    ) -> None:
        self.times = times
        self.curve: list[float] = []  # cost of a pass over 1, 2, ... nodes; empty until it is read
        self.trees: list[float] = []  # the same of a tree
        self.least: list[float] = []  # the least slopes of ``trees``
        self.cut: Cut | None = None  # what it costs that this pass's draft is cut short; None = nothing
        self.single_ms = 0.0  # what the passes so far would have taken as plain decoding, as far as is known
        self.own_ms = 0.0  # what they would have taken over one node, run as they are
        self.timed_ms = 0.0  # what they took
        self.limits = limits
        self._anew = anew
        self._most = most
        self._first = max(2, 1 + _FIRST_NODES // batch)
        # A batch has more to lose: t(1), by which drafts are judged, is known first.
        self._single_after = _SINGLE_AFTER if batch == 1 else (0, *_SINGLE_AFTER[1:])
        self._context = 0
        self._served = 0  # passes since the curve was read
        self._since_single = 0  # passes since one had a single node
        self.replayed = 0  # tokens that this pass replays
        self._width = 1  # of the last pass
        self._news = 0  # of the curve, when it was read
        self._late_ms = self._late_tokens = self._late_passes = 0.0  # of passes, fading
        self._replays = Replays()

    def open(self, context: int) -> bool:
        """Prepare for a pass behind ``context`` tokens: is the curve to be read?"""
        self._context = context
        self._served += 1
        self._since_single += 1
        before, self.replayed = self.replayed, self.limits.again
        self._replays.observe(self._width, before, self.replayed)
        news = self.times.news != self._news
        return not self.curve or news or self._served >= _REFRESH or self.replayed != before

    def read(self) -> None:
        self._served, self._news = 0, self.times.news
        sizes = [self.limits.bucket(count) for count in range(1, self._most + self.replayed + 1)]
        knots = self.times.curve(self._context, max(sizes))
        self.curve = [knots[size - 1] for size in sizes]

    def read_trees(self) -> None:
        """Work out what trees cost, apart from the replay before them."""
        # The draft that was cut short has paid for the replay: without it, one node would take t(1).
        paid = self.curve[self.replayed] - self.curve[0]
        self.trees = [cost - paid for cost in self.curve[self.replayed :]]
        self.cut = self._replays.cut(self.curve, self.replayed) if self.limits.replays else None
        del self.trees[max(self._first, _STRIDE * self.times.largest) :]
        self.least = least_slopes(self.trees)

    @property
    def cut_ms(self) -> float:
        """What drafts that are cut short cost a draft, on the average of late."""
        return 0.0 if self.cut is None else self._replays.mean_ms(self.cut)

    @property
    def single_is_due(self) -> bool:
        known = min(int(self.times.weight(1, self._context)), len(_SINGLE_AFTER) - 1)
        return not self.times.frozen and self._since_single > self._single_after[known]

    @property
    def comparable(self) -> bool:
        """Whether the last pass took what passes of its size take, and it is known what one over a single node does."""
        return self.times.knows_single and self.limits.typical

    def is_stale(self, width: int) -> bool:
        """Whether no pass over about ``width`` nodes has told for long what it takes."""
        return self.times.is_stale(self.limits.bucket(width + self.replayed), self._context)

    @property
    def repeats(self) -> bool:
        """Whether as many tokens have repeated, up to the last one, as a draft has to bring to be worth its pass."""
        run = self.limits.in_a_row
        return run > 0 and (len(self.trees) < 2 or (1 + run) * self.trees[0] >= self.trees[1])

    @property
    def pace_ms(self) -> float:
        """Milliseconds that a token of each sequence has taken of late."""
        return self._late_ms / self._late_tokens if self._late_tokens else inf

    @property
    def usual_ms(self) -> float:
        """Milliseconds that a pass has taken of late."""
        return self._late_ms / self._late_passes if self._late_passes else 0.0

    def renew(self, spent_ms: float) -> None:
        """Passes are run in another way from now on; the change itself took ``spent_ms``."""
        self.timed_ms += spent_ms
        if self._anew is not None:
            self.times, self.curve = self._anew(), []

    def observe(self, width: int, taken_ms: float, beside_ms: float, tokens: float) -> None:
        """Take in a pass over ``width`` nodes, of whose time the curve knows nothing of ``beside_ms``, and in which the
        sequences wrote so many tokens on average."""
        self._late_ms = _FADE * self._late_ms + taken_ms
        self._late_tokens = _FADE * self._late_tokens + tokens
        self._late_passes = _FADE * self._late_passes + 1.0
        if self.limits.typical:
            known = self.times.knows_single
            self.times.add(self.limits.bucket(width + self.replayed), self._context, taken_ms - beside_ms)
            if known and self.curve:
                self.timed_ms += taken_ms
                self.own_ms += self.curve[0]
                self.single_ms += max(self.curve[0], self.limits.plain_ms or 0.0)
        self._width = width
        if width == 1 and not self.replayed:
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
