"""How large the trees of a pass may be: expected tokens against the latency curve, for all sequences of a call."""

from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum

from jacobi import Step
from lookahead.draft.acceptance import Acceptance
from lookahead.draft.expensive_sources import ExpensiveSources
from lookahead.draft.latency import StepTimes
from lookahead.draft.pass_costs import ModelLimits, PassCosts
from lookahead.draft.replays import Cut
from lookahead.draft.tree_worth import TreeWorth, WindowColumns
from lookahead.sources.jacobi_window import WindowSource, window_nodes

_PROBE_NODES = 4
_PROBE_FIRST, _PROBE_LAST = 32, 512  # plain passes between two trials of a small draft, while none seems to pay
_PROBE_SHARE = 0.02  # of plain passes' time, that such trials may take
_RESTS = ((16, 8), (4, 4))  # after so many plain passes, only every so many-th still asks and feeds the sources
_LEAST_VALUE = 0.002  # a candidate below is not worth handling, whatever a node costs
_LEAST_GAIN = 1.05  # of speed, that a draft must promise: estimates err, and drafting costs a little by itself


class Mode(Enum):
    FIXED = "as many nodes as were asked for"
    DRAFT = "as many nodes as pay"
    MEASURE = "no node: the pass measures what one node costs"
    REST = "no node, and no source is asked: nothing has paid for a while"
    PROBE = "a few nodes, although none seems to pay"


class Rest:
    """How long nothing has paid, and what follows from that::

    plain passes            0 ... 3   4 ... 15          16 ...
    sources are asked       always    every 4th pass    every 8th pass
    a small draft is tried  -         -                 at 32, later at 64, 128, ... 512
    """

    def __init__(self) -> None:
        self.passes = 0  # plain ones since a draft paid, because none seemed to pay
        self._probe_after = _PROBE_FIRST

    @property
    def is_on(self) -> bool:
        """Whether a pass is to cost nothing beside the model."""
        every = next((every for passes, every in _RESTS if self.passes >= passes), 1)
        return self.passes % every > 0

    def tries(self, cost: float) -> bool:
        """Whether a small draft is due that makes a pass cost ``cost`` times as much, perhaps in vain."""
        return self.passes >= max(self._probe_after, (cost - 1.0) / _PROBE_SHARE)

    def observe(self, mode: Mode, drafted: bool, refused: bool, accepted: bool) -> None:
        """Take in a pass: was anything drafted; were some sequence's candidates all refused, some token accepted?"""
        if not drafted:
            self.passes += refused or mode is Mode.REST
            return
        if mode is Mode.PROBE:
            self._probe_after = min(2 * self._probe_after, _PROBE_LAST)
        elif accepted and self.passes:
            self._probe_after = _PROBE_FIRST
        if accepted:
            self.passes = 0
        elif mode is Mode.PROBE:  # a trial in vain does not end a rest
            self.passes = min(self.passes, _RESTS[0][0])


class Planner:
    """Chooses the size of every pass by what was learnt of drafts and of passes; one for all sequences of a call.

    Before each pass comes :meth:`open`, after it :meth:`learn` for each sequence that drafted, then :meth:`observe`.

    Args:
        most_nodes: the most drafted nodes of a sequence.
        nodes: draft exactly so many where there are candidates, whatever they cost; None = as many as pay.
        window: some of the sources is a window; ``window_only``: there is no other source.
        expensive: what is known of sources that cost time; None = there are none.
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
        window: bool = False,
        window_only: bool = False,
        expensive: ExpensiveSources | None = None,
        anew: Callable[[], StepTimes] | None = None,
    ) -> None:
        self.acceptance = acceptance
        self.mode = Mode.DRAFT if nodes is None else Mode.FIXED
        self.sizes = _flat(1)  # cost of a tree of 1, 2, ... nodes as far as it may go, and the least slope from each on
        self.gain = 1.0  # least gain of speed for which anything is drafted
        self.cut: Cut | None = None  # what it costs that a draft is cut short, where the tree is to pay for that
        self.expensive = expensive or ExpensiveSources()
        self.expensive_ms = 0.0  # what they took in this pass
        self.credited: Counter[str] = Counter()  # accepted tokens by source
        self._batch, self._nodes = batch, nodes
        self._most = 1 + (most_nodes if nodes is None else nodes)
        self._passes = 0
        self._refused = False  # some sequence had candidates, and none was worth a node
        self._accepted = False  # some drafted token was
        self.costs = PassCosts(times, limits, anew, self._most)
        self._worth = TreeWorth(acceptance)
        self._columns = WindowColumns(self._worth, window_only) if window else None
        self._rest = Rest()

    @property
    def columns(self) -> int:
        """Columns of the window to add to each tree, unless the pass measures what one node costs."""
        return 0 if self._columns is None else self._columns.count

    @property
    def weighs(self) -> bool:
        """Whether this pass asks expensive sources only if they pay; if not, whenever anything is drafted. With a
        frozen curve they are always asked, because what they cost is measured."""
        return self.mode is Mode.DRAFT and self._batch == 1 and not self.costs.times.frozen

    def open(self, context: int) -> None:
        """Prepare the next pass, of which the longest sequence has ``context`` tokens in the KV cache."""
        self._passes += 1
        self.expensive_ms = 0.0
        self._refused = self._accepted = False
        stale = self.costs.open(context, self._rest.passes)
        if self._nodes is not None:
            if self._columns is not None:
                self._columns.choose_of(self._nodes, self._passes)
            self.sizes = _flat(1 + self._nodes - window_nodes(self.columns))
            return
        if stale:
            self.costs.read()
            if self._columns is not None:
                self._columns.choose(self._passes, self.costs.curve, self._most)
            self.costs.read_trees(window_nodes(self.columns))
        self.mode = self._choose_mode()
        self._choose_sizes()

    def _choose_mode(self) -> Mode:
        costs = self.costs
        if self._rest.tries(costs.trees[min(len(costs.trees) - 1, _PROBE_NODES)] / costs.curve[0]):
            return Mode.PROBE
        if self._rest.is_on:
            return Mode.REST
        return Mode.MEASURE if costs.single_is_due else Mode.DRAFT

    def _choose_sizes(self) -> None:
        costs, self.gain, self.cut = self.costs, 1.0, None
        if self.mode in (Mode.MEASURE, Mode.REST):
            self.sizes = _flat(1)
        elif self.mode is Mode.PROBE:
            self.sizes = _flat(min(len(costs.trees), 1 + _PROBE_NODES))
        elif self._batch > 1:
            beside_ms = costs.cut_ms + (0.0 if costs.times.frozen else self.expensive.ms)
            drafted = [cost + beside_ms for cost in costs.trees[1:]]
            size = self._worth.batch_size([costs.trees[0], *drafted], self._batch)
            self.sizes = _flat(min(len(costs.trees), size))
        else:
            self.sizes, self.gain, self.cut = (costs.trees, costs.least), _LEAST_GAIN, costs.cut

    def learn(
        self, values: Sequence[float], credited: Sequence[str], columns: int, refused: bool, written: int
    ) -> None:
        """Take in one sequence's tree: its values, each accepted token's source, the window's columns in it.
        ``refused``: there were candidates, and none was worth a node; ``written``: tokens of the sequence so far."""
        self._refused |= refused and self.mode is not Mode.MEASURE
        self._accepted |= bool(credited)
        self.credited.update(credited)
        if columns and self._columns is not None:
            self._columns.learn(columns, credited.count(WindowSource.name))
        if self._batch > 1 or self._columns is not None:
            self._worth.learn(values, written)

    def observe(self, step: Step) -> None:
        """Take in a pass (not the prompt's): what it cost, and what its trees were worth."""
        self._worth.close(len(self.sizes[0]) - 1)
        width = max(map(len, step.trees))
        taken = step.draft_ms + step.forward_ms + step.keep_ms
        if self._batch > 1:  # sequences choose tokens together depth by depth, so here a longer path costs more
            taken += step.verify_ms
        self.expensive.spent(self.expensive_ms)
        # Nor are drafts that were looked for in vain a part of what one node costs.
        self.costs.observe(width, taken, step.draft_ms if width == 1 else self.expensive_ms)
        self._rest.observe(self.mode, width > 1, self._refused, self._accepted)


def _flat(count: int) -> tuple[list[float], list[float]]:
    return [1.0] * count, [0.0] * count
