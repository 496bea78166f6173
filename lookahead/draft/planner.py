"""How large the trees of a pass may be: expected tokens against the step-time curve, for all rows of a call."""

from collections import Counter
from collections.abc import Callable, Sequence
from math import log2

from jacobi import Step
from lookahead.draft.acceptance import Acceptance
from lookahead.draft.expensive_sources import CostlySources
from lookahead.draft.latency import StepTimes
from lookahead.sources.jacobi_window import WindowSource, columns_for, window_nodes
from lookahead.sources.recycling import BEST

_REFRESH = 8  # passes that a computed curve serves
_LONGEST_REFRESH = 64  # the same, while nothing is drafted
_SINGLE_AFTER = (2, 8, 16)  # passes after which t(1) is measured, while it rests on none, one or two passes
_SINGLE_EVERY = 256  # and once it is known
_PROBE_FIRST, _PROBE_LAST = 32, 512  # plain passes between two trials of a small draft, while none seems to pay
_PROBE_NODES = 4
_PROBE_SHARE = 0.02  # of plain passes' time, that such trials may take
_LEAST_VALUE = 0.002  # a candidate below is not worth handling, whatever a node costs
_LEAST_GAIN = 1.05  # of speed, that a draft must promise: estimates err, and drafting costs a little by itself
_BATCH_GAIN = 0.075  # more for every doubling of a batch: out of step, rows need copies, and the slowest gains least
_RESTS = ((16, 8), (4, 4))  # after so many plain passes, only every so many-th still asks and feeds the sources
_FADE = 0.9  # of what a batch's trees were worth, from pass to pass
_COLUMN_GAIN = 0.004  # tokens a pass that a window column is taken to bring, before it has shown what it brings
_COLUMN_PASSES = 256.0  # column-passes that this guess is worth
_COLUMN_CHOICES = (2, 4, 8, 16)
_COLUMN_HOLD = 64  # passes for which a choice of columns stands, because a window pays late
_COLUMN_FIRST = 16  # the same for a first choice; and passes before it, with a fixed number of nodes
_AGAIN_COST = 1.5  # times a pass over two nodes: where feeding tokens again costs more, nothing is drafted on top
_AGAIN_FADE = 0.95  # of what drafted passes caused to be fed again, from pass to pass


class Planner:
    """Chooses the size of every pass, by what was learnt of drafts and of passes; one for all rows of a call.

    Args:
        times: the step-time curve; learns from the passes unless it is frozen.
        acceptance: the estimates that the rows share.
        batch: number of rows.
        most_nodes: the most drafted nodes of a row.
        nodes: draft exactly so many where there are candidates, whatever they cost; None = as many as pay.
        window: some of the sources is a window.
        window_only: there is no other source.
        costly: what is known of those that cost time; None = there are none.
        anew: finds the step-time curve for passes as they are run from now on; None = it stays the same.

    Attributes:
        bucket: number of nodes that a pass over so many really computes; to be set by who knows the model.
        again: number of tokens that the next pass feeds once more before its tree (see `runtime.linear`); to be
            set by who knows the model.
        untraced_ms: what transformers' own pass over one node takes where this call's are faster; to be set by who
            knows the model, None = the same.
        columns: window columns to add to each row's tree, but in a ``single`` pass.
        single: this pass measures what one node costs, so nothing is to be drafted.
        sizes: for this pass, cost of a tree of 1, 2, ... nodes as far as it may go, and the least slope from each on.
        floor: least value of a candidate.
        gain: least gain of speed for which anything is drafted.
        costly: what is known of sources that cost time.
        costly_ms: what they took in this pass.
        credited: accepted tokens by source.
        single_ms: what the passes observed so far would have taken with one node each and as transformers runs them,
            as far as is known.
        timed_ms: what they took.
    """

    def __init__(
        self,
        times: StepTimes,
        acceptance: Acceptance,
        *,
        batch: int,
        most_nodes: int,
        nodes: int | None = None,
        window: bool = False,
        window_only: bool = False,
        costly: CostlySources | None = None,
        anew: Callable[[], StepTimes] | None = None,
    ) -> None:
        self.bucket: Callable[[int], int] = lambda count: count
        self.again: Callable[[], int] = lambda: 0
        self.untraced_ms: float | None = None
        self.columns = 0
        self.costly = costly or CostlySources()
        self.costly_ms = 0.0
        self.credited: Counter[str] = Counter()
        self.single_ms = 0.0
        self.timed_ms = 0.0
        self._times = times
        self._anew = anew
        self._acceptance = acceptance
        self._batch = batch
        self._nodes = nodes
        self._most = 1 + (most_nodes if nodes is None else nodes)
        self._window = window
        self._window_only = window_only
        self._context = 0
        self._passes = 0
        self._since_single = 0
        self._quiet = 0  # plain passes since a draft paid, because none seemed to pay
        self._refused = False  # there were candidates, and none was worth a node
        self._accepted = False  # a drafted token was
        self._probe_after = _PROBE_FIRST
        self._probing = False
        self._curve: list[float] = []  # cost of a pass over 1, 2, ... nodes
        self._grown: list[float] = []  # cost of a pass over a tree of 1, 2, ... nodes and the window
        self._least: list[float] = []  # least extra cost of a node of a tree, from each size on
        self._read_at = 0
        self._again = 0  # nodes of this pass that are fed once more
        self._again_ms = 0.0  # what such nodes cost of late, and by how many drafted passes they were caused
        self._again_passes = 1.0
        self._worth: list[float] = []  # of the n-th drafted node of a row, smoothed
        self._trees: list[tuple[int, Sequence[float]]] = []  # of the last pass: tokens written, values
        self._column_tokens = _COLUMN_GAIN * _COLUMN_PASSES
        self._column_passes = _COLUMN_PASSES
        self._columns_until = 0
        self._drafted = 0.0  # nodes of the sources' trees, smoothed
        self.single = False
        self.sizes: tuple[Sequence[float], Sequence[float]] = ([1.0], [0.0])
        self.floor = _LEAST_VALUE
        self.gain = 1.0

    @property
    def resting(self) -> bool:
        """Whether the pass is to cost nothing beside the model: most of them, while no draft pays."""
        if self._probing or self._nodes is not None:
            return False
        every = next((every for quiet, every in _RESTS if self._quiet >= quiet), 1)
        return self._quiet % every > 0

    @property
    def harvest(self) -> int:
        """How many best next tokens to gather in the next pass."""
        return 0 if self.resting else BEST

    @property
    def weighs(self) -> bool:
        """Whether this pass asks costly sources only if they pay; if not, whenever anything is drafted.

        With a frozen curve they are always asked, because what they cost is measured.
        """
        measures = self._probing or self.single or self._times.frozen
        return self._nodes is None and self._batch == 1 and not measures

    def renew(self, spent_ms: float) -> None:
        """From now on passes are run in another way, and take another time.

        Args:
            spent_ms: what the change itself has taken.
        """
        self.timed_ms += spent_ms
        if self._anew is not None:
            self._times = self._anew()
            self._curve = []

    def open(self, context: int) -> None:
        """Prepare the next pass; to be called once before the rows draft.

        Args:
            context: tokens of history of the longest row.
        """
        self._passes += 1
        self._since_single += 1
        self._refused = self._accepted = False
        self.costly_ms = 0.0
        self._context = context
        again, self._again = self._again, self.again()
        if self._nodes is not None:
            self._open_fixed(self._nodes)
            return
        serves = max(_REFRESH, min(self._quiet, _LONGEST_REFRESH))
        if not self._curve or self._passes - self._read_at >= serves or self._again != again:
            self._read_curve()
        self._probing = self._quiet >= self._probe_at()
        self.single = not self._probing and self._measure_single()
        self.gain = 1.0
        if self._again and self._curve[self._again] > _AGAIN_COST * self._curve[1]:
            self.sizes = self._curve[:1], [0.0]
        elif self._probing or (self._batch > 1 and not self.single):
            most = min(len(self._grown), 1 + _PROBE_NODES if self._probing else self._common_size())
            self.sizes = [1.0] * most, [0.0] * most
        elif self.single:
            self.sizes = self._curve[:1], [0.0]
        else:
            self.sizes, self.gain = (self._grown, self._least), _LEAST_GAIN

    def _open_fixed(self, nodes: int) -> None:
        """All nodes for the sources, but those that are worth more as columns of the window."""
        if self._window and self._passes >= self._columns_until:
            self._columns_until = self._passes + (_COLUMN_HOLD if self._passes > 1 else _COLUMN_FIRST)
            if self._window_only:
                self.columns = columns_for(max(nodes // 2, min(nodes, window_nodes(1))))
            elif self._passes > 1:
                self.columns = max(
                    (0, *(columns for columns in _COLUMN_CHOICES if window_nodes(columns) <= nodes)),
                    key=lambda columns: self._expected(nodes - window_nodes(columns)) + self._column_gain * columns,
                )
        most = 1 + nodes - window_nodes(self.columns)
        self.sizes = [1.0] * most, [0.0] * most

    def _read_curve(self) -> None:
        self._read_at = self._passes
        sizes = [self.bucket(count) for count in range(1, self._most + self._again + 1)]
        knots = self._times.curve(self._context, max(sizes))
        self._curve = [knots[size - 1] for size in sizes]
        if self._window and self._passes >= self._columns_until:
            self._choose_columns()
        spent = window_nodes(self.columns) + self._again
        # What is fed again has been paid for by the draft that was cut short: without it, one node would take t(1).
        paid = self._again_cost()
        self._grown = [cost - paid for cost in self._curve[spent:]]  # of a tree of 1, 2, ... nodes beside the window's
        if self._again_ms:  # a draft that is cut short has to be paid for once more
            later = self._again_ms / self._again_passes
            self._grown[1:] = [cost + later for cost in self._grown[1:]]
        self._least = least_slopes(self._grown)

    def _again_cost(self) -> float:
        """What feeding tokens again adds to a pass over one node."""
        return self._curve[self._again] - self._curve[0]

    def _choose_columns(self) -> None:
        """As many columns as pay beside the trees of late; a choice stands for a while, because a window pays late."""
        curve = self._curve
        count = min(self._most, 1 + round(self._drafted))
        expected = 1.0 + self._expected(count - 1)
        best, chosen = _LEAST_GAIN * expected / curve[count - 1], 0
        for columns in _COLUMN_CHOICES:
            total = count + window_nodes(columns)
            if total > len(curve):
                break
            speed = (expected + self._column_gain * columns) / curve[total - 1]
            if speed > best:
                best, chosen = speed, columns
        if chosen:  # at first for a short while: that may show that they bring nothing
            self._columns_until = self._passes + (_COLUMN_HOLD if self.columns else _COLUMN_FIRST)
        self.columns = chosen

    @property
    def _column_gain(self) -> float:
        """Tokens a pass that a column has brought."""
        return self._column_tokens / self._column_passes

    def _expected(self, nodes: int) -> float:
        """Tokens that the sources' trees of so many nodes brought of late."""
        return self._acceptance.expected(self._worth[:nodes])

    def _probe_at(self) -> float:
        """After how many plain passes a draft is tried: seldom enough for what it takes, all of it in vain."""
        probe = self._grown[min(len(self._grown) - 1, _PROBE_NODES)]
        return max(self._probe_after, (probe / self._curve[0] - 1.0) / _PROBE_SHARE)

    def _measure_single(self) -> bool:
        if self._times.frozen:
            return False
        known = int(self._times.weight(1, self._context))
        return self._since_single > (_SINGLE_AFTER[known] if known < len(_SINGLE_AFTER) else _SINGLE_EVERY)

    def _common_size(self) -> int:
        """The size that pays best for all rows together, by what their trees were worth of late."""
        if not self._worth:
            return 1 + _PROBE_NODES
        curve = self._grown
        best, size, expected = (1.0 + _BATCH_GAIN * log2(self._batch)) / curve[0], 1, 1.0
        worth, calibration = self._worth, self._acceptance.calibration
        last = worth[-1] * len(worth)
        beside_ms = 0.0 if self._times.frozen else self.costly.ms
        for count in range(1, len(curve)):
            value = worth[count - 1] if count <= len(worth) else last / count
            expected += value * calibration
            if expected / (curve[count] + beside_ms) > best:
                best, size = expected / (curve[count] + beside_ms), count + 1
        return size

    def learnt(
        self, values: Sequence[float], credited: Sequence[str], columns: int, refused: bool, written: int
    ) -> None:
        """Take in what became of one row's tree.

        Args:
            values: of its nodes.
            credited: the source of each accepted token.
            columns: of the window in it.
            refused: there were candidates, and none was worth a node.
            written: tokens of the row so far.
        """
        self._refused |= refused and not self.single
        self._accepted |= bool(credited)
        self.credited.update(credited)
        if columns:
            self._column_passes += columns
            self._column_tokens += sum(name == WindowSource.name for name in credited)
        self._drafted += (1.0 - _FADE) * (len(values) - self._drafted)
        if self._batch > 1 or self._window:
            self._trees.append((written, values))

    def _weigh_trees(self) -> None:
        """Take in what the last pass's trees were worth: of a batch, those of the rows that are furthest behind.

        A batch is done when its slowest row is; what other rows gain shortens nothing.
        """
        trees, self._trees = self._trees, []
        least = min((written for written, _ in trees), default=0)
        for written, values in trees:
            if written == least:
                self._weigh(values)

    def _weigh(self, values: Sequence[float]) -> None:
        """Take in the values of one tree."""
        worth = self._worth
        for place, value in enumerate(values):
            if place < len(worth):
                worth[place] += (1.0 - _FADE) * (value - worth[place])
            else:
                worth.append(value)
        for place in range(len(values), min(len(worth), len(self.sizes[0]) - 1)):
            worth[place] *= _FADE  # there was room, and no candidate

    def observe(self, step: Step) -> None:
        """Take in a pass (not the prompt's): what it cost, and what its trees were worth."""
        self._weigh_trees()
        width = max(map(len, step.trees))
        fed = width + self._again
        taken = step.draft_ms + step.forward_ms + step.keep_ms
        if self._batch > 1:  # rows choose tokens together depth by depth, so here a longer path costs more
            taken += step.verify_ms
        self.costly.spent(self.costly_ms)
        # Nor are drafts that were looked for in vain a part of what one node costs.
        beside = step.draft_ms if width == 1 else self.costly_ms
        self._times.add(self.bucket(fed), self._context, taken - beside)
        if self._times.knows_single:
            self.timed_ms += taken
            single_ms = self._curve[0] if self._curve else self._times.ms(1, self._context)
            self.single_ms += max(single_ms, self.untraced_ms or 0.0)
        if self._again or self._again_ms:
            self._again_ms *= _AGAIN_FADE
            self._again_passes *= _AGAIN_FADE
            if self._curve:
                self._again_ms += self._again_cost()
        self._again_passes += width > 1
        if width > 1:
            if self._probing:
                self._probe_after = min(2 * self._probe_after, _PROBE_LAST)
            elif self._accepted and self._quiet:
                self._probe_after = _PROBE_FIRST
            if self._accepted:
                self._quiet = 0
            elif self._probing:  # a trial in vain does not end a rest
                self._quiet = min(self._quiet, _RESTS[0][0])
            return
        if self._refused or self.resting:
            self._quiet += 1
        if not self._again:
            self._since_single = 0


def least_slopes(curve: Sequence[float]) -> list[float]:
    """For each size, the least extra cost per node with which any larger size can be reached.

    It is the slope of the lower convex hull to the right of that size.

    Args:
        curve: cost of a pass over 1, 2, ... nodes.

    Returns:
        As many numbers; the last is infinite, because nothing lies beyond it.
    """
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
