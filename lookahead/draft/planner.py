"""How large the trees of a pass may be: expected tokens against the latency curve, for all sequences of a call."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from math import log2
from typing import Any
from weakref import WeakMethod

from jacobi import Step
from lookahead.draft.acceptance import Acceptance
from lookahead.draft.frontier import Growth, grown_together
from lookahead.draft.guard import GAIN, ExpensiveSources, Guard, Mode, Rest, Trials, reached
from lookahead.draft.latency import NODES, StepTimes
from lookahead.draft.pass_costs import Cut, ModelLimits, PassCosts
from lookahead.sources.draft_model import UsualTime


def shared_width(
    trees: Sequence[tuple[Sequence[float], int]], costs: Sequence[float], calibration: float, *, apart: bool = False
) -> int:
    """The nodes a tree that pay best for all sequences, one of the curve's sizes: each further size has kernels of its
    own, whose first pass is slow. ``trees`` have the values of a tree's nodes, and the tokens that its sequence has
    written; ``costs`` are those of passes over 1, 2, ... nodes.

    A batch is done when its slowest sequence is, so what counts is how far it comes (:func:`.reached`): those that are
    behind count more, and a long leap of one less than the same tokens for all, which count in full. Sequences that end
    ``apart``, each making room for another, are worth what they write.
    """
    most = min(len(costs), 1 + max((len(values) for values, _ in trees), default=0))
    if most < 2:
        return 1
    speeds = {}
    for size in (size for size in NODES if size <= most):
        gained: list[Any] = [1.0 + calibration * sum(values[: size - 1]) for values, _ in trees]
        if not apart:
            after = [before + more for (_, before), more in zip(trees, gained, strict=True)]
            gained = [reached(after) - reached([before for _, before in trees])]
        speeds[size] = sum(gained) / costs[size - 1]
    speeds[1] *= 1.0 + GAIN * (1.0 if apart else log2(max(2, len(trees))))  # the slowest's luck ends it
    return max(speeds, key=speeds.__getitem__)


_LEAST_VALUE = 0.002  # a candidate below is not worth handling, whatever a node costs


class Planner:
    """Chooses the size of every pass by what was learnt of drafts and of passes; one for all sequences of a call.

    Before each pass comes :meth:`open`, after it :meth:`learn` for each sequence that drafted, then :meth:`observe`.

    Args:
        most_nodes: the most drafted nodes of a sequence.
        nodes: draft exactly so many where there are candidates, whatever they cost; None = as many as pay.
        expensive, guard: what is known of sources that cost time, and of whether drafting pays by the clock.
        anew: finds the latency curve for passes as they are run from now on; None = it stays the same.
    """

    floor = _LEAST_VALUE

    def __init__(
        self,
        times: StepTimes,
        acceptance: Acceptance,
        *,
        limits: ModelLimits,
        batch: int,
        most_nodes: int,
        nodes: int | None = None,
        expensive: ExpensiveSources | None = None,
        guard: Guard | None = None,
        anew: Callable[[], StepTimes] | None = None,
    ) -> None:
        self.acceptance = acceptance
        self.mode = Mode.DRAFT if nodes is None else Mode.FIXED
        self.sizes = _flat(1)  # cost of a tree of 1, 2, ... nodes as far as it may go, and the least slope from each on
        self.gain = 1.0  # least gain of speed for which anything is drafted
        self.in_step = False  # drafts rest for long, so that sequences had better go on in step
        self.ask_ms = 0.0  # what it costs to ask the sources about one node, where ``sizes`` do not tell
        self.asks = 0  # nodes that they were asked about for this pass
        self.cut: Cut | None = None  # what it costs that a draft is cut short, where the tree is to pay for that
        self.expensive = expensive or ExpensiveSources()
        self.expensive_ms = 0.0  # what they took in this pass
        self.asked_ms: defaultdict[str, float] = defaultdict(float)  # what costly sources took, by name
        self._batch, self._nodes = batch, nodes
        self._refused = self._accepted = False  # some sequence's candidates were, all of them; some drafted token was
        self.costs = PassCosts(times, limits, anew, 1 + (most_nodes if nodes is None else nodes), batch)
        self._rows: list[WeakMethod[Callable[[], Growth[tuple[Sequence[float], int] | None]]]] = []
        self._width: int | None = None  # of this pass, once it is chosen
        self._guard = guard or Guard(batch)
        self._guard.begin(batch)
        self._rest = Rest(self.costs, self._guard.rested)
        self._trials = Trials(self.costs)
        self._asking = UsualTime()  # about one node

    @property
    def weighs(self) -> bool:
        """Whether this pass asks expensive sources only if they pay; if not, whenever anything is drafted. With a
        frozen curve they are always asked, because what they cost is measured."""
        return self.mode is Mode.DRAFT and self._batch == 1 and not self.costs.times.frozen

    def open(self, context: int) -> None:
        """Prepare the next pass, of which the longest sequence has ``context`` tokens in the KV cache."""
        self.expensive_ms, self.asks, self._width = 0.0, 0, None
        self._refused = self._accepted = False
        stale = self.costs.open(context)
        if stale:
            self.costs.read()
        if self._nodes is not None:
            self.sizes = _flat(1 + self._nodes)
            return
        if stale:
            self.costs.read_trees()
        self._choose()

    def _choose(self) -> None:
        """How the next pass is chosen: its mode, and the sizes among which its tree may stop."""
        costs, self.gain, self.ask_ms, self.cut = self.costs, 1.0, 0.0, None
        rests = self.in_step = self._guard.rests and not costs.times.frozen
        tried = self._trials.width if self._guard.wins else 0
        if tried:
            self.mode, self.sizes = Mode.TRY, _flat(tried)
        elif rests or self._rest.is_on or (self._batch > 1 and costs.single_is_due):
            self.mode, self.sizes = Mode.REST, _flat(1)
        elif costs.single_is_due:
            self.mode, self.sizes = Mode.MEASURE, _flat(1)
        elif self._batch > 1:
            self.mode = Mode.DRAFT
            beside_ms = costs.cut_ms + (0.0 if costs.times.frozen else self.expensive.time.ms)
            self.sizes = [costs.trees[0], *(cost + beside_ms for cost in costs.trees[1:])], costs.least
        else:
            self.mode, self.sizes = Mode.DRAFT, (costs.trees, costs.least)
            self.gain, self.cut = 1.0 + GAIN, costs.cut
            self.ask_ms = 0.0 if costs.times.frozen else self._asking.ms

    def share(self, grow_ahead: Callable[[], Growth[tuple[Sequence[float], int] | None]]) -> None:
        """One sequence of several has trees that are grown ahead: nodes' values, and tokens written so far."""
        self._rows.append(WeakMethod(grow_ahead))  # its owner holds the planner, and the planner the KV cache

    def share_anew(self) -> None:
        """Sequences have come or gone: those that :meth:`share` from now on are all there are."""
        self._rows.clear()
        self._width = None

    @property
    def shares(self) -> bool:
        """Whether this pass's trees are grown ahead: sources are asked together, and there is one width for all."""
        return self._batch > 1 and len(self.sizes[0]) > 1

    @property
    def width(self) -> int:
        """The nodes that trees of this pass have at most."""
        if self._width is None:
            rows = [grow_ahead for row in self._rows if (grow_ahead := row()) is not None]
            trees = [tree for tree in grown_together([grow_ahead() for grow_ahead in rows]) if tree is not None]
            costs = self.sizes[0]
            self._width = len(costs)
            if self.mode is Mode.DRAFT:
                calibration = self.acceptance.calibration
                self._width = shared_width(trees, costs, calibration, apart=self._guard.apart)
        return self._width

    def spend(self, source: str, ms: float) -> None:
        """Take in what it took to ask a costly source for a tree of this pass."""
        self.expensive_ms += ms
        self.asked_ms[source] += ms

    def learn(self, accepted: bool, refused: bool) -> None:
        """Take in one sequence's tree: was some token of it accepted, or none of its candidates worth a node?"""
        self._refused |= refused and self.mode is not Mode.MEASURE
        self._accepted |= accepted

    def observe(self, step: Step) -> None:
        """Take in a pass (not the prompt's): what it cost, and what its trees were worth."""
        width = max(map(len, step.trees))
        taken = step.draft_ms + step.forward_ms + step.verify_ms + step.keep_ms
        self.expensive.time.observe(self.expensive_ms)
        tokens = sum(len(path.tokens) for path in step.paths) / len(step.trees)
        if self._nodes is None and not self.costs.times.frozen:  # a frozen curve repeats passes, whatever they took
            plain = self.mode in (Mode.REST, Mode.MEASURE)
            was_faster = self._guard.observe(step, taken, self.costs.curve, plain, self.costs.comparable)
            if self._batch > 1:  # what some sequence accepts has not paid yet
                self._accepted &= was_faster
        self._trials.observe(self.mode is Mode.TRY, taken, tokens)
        self._asking.observe((step.draft_ms - self.expensive_ms) / self.asks if self.asks else 0.0)
        # Of a batch's passes the curve tells what drafting takes, too, unless it was in vain.
        beside_ms = step.draft_ms if width == 1 or self._batch == 1 else self.expensive_ms
        self.costs.observe(width, taken, beside_ms, tokens)
        self._rest.observe(self.mode, width > 1, self._refused, self._accepted)
        self._guard.rested = self._rest.passes


def _flat(count: int) -> tuple[list[float], list[float]]:
    return [1.0] * count, [0.0] * count
