"""Whether drafting and asking pay, whatever the estimates say: what keeps the automatic mode from losing. A ledger by
the clock; rests while nothing pays, and trials of sizes little known; and whether sources that cost time are asked."""

from bisect import bisect_right
from collections.abc import Sequence
from enum import Enum
from math import exp, log

from jacobi import Step
from lookahead.draft.latency import NODES, OUTLIER
from lookahead.draft.pass_costs import PassCosts
from lookahead.sources.draft_model import UsualTime

_SHARE = 0.01  # of the time, that drafts may lose, and trials
_STAKE = 1.5  # plain passes that they may lose before they have won any
_MOST = 16.0  # plain passes won that may be lost again
_LEAST = -1.0  # plain passes: a pass that seems to lose more than leads here was held up
_LEAD = 2.0  # tokens: a lead of so many counts e times less, since a sequence that is ahead may leave others behind
_RESTS = ((16, 8), (4, 4))  # after so many plain passes, only every so many-th still asks and feeds the sources
_LINEAR_RESTS = ((16, 32), (2, 8))  # the same where it is counted what would have been drafted rightly
_PAPER_SHARE = 0.1  # of what drafts would have saved, the same where that is counted
_WIDTHS = NODES[2:-1:2]  # 4 to 64 nodes: of passes that are tried, where none of the size was seen for a while
_BETWEEN = 8  # passes from trial to trial
_STEPS = (0.3, 1.0, 2.5)  # tokens expected of the other sources' tree at which the next level begins
_HOPED, _HOPES = 1.2, 4  # gain at a level before any was seen, and the trials that this is worth
_FIRST_PAUSE, _LONGEST_PAUSE = 4, 32  # passes at a level that does not pay, after which it is tried again
GAIN = 0.05  # of speed, that drafts and expensive sources must promise: estimates err, and drafting costs a little
_FADE = 0.9  # of earlier gains, once a level is judged


class Guard:
    """Keeps a ledger of what a batch's drafts have won and lost, in plain passes, from call to call.

    Every pass earns a hundredth of a plain one. A pass that asks or drafts is charged what it took beyond plain passes
    for as many tokens; one that took less earns the difference. Nothing is asked or drafted while the ledger is
    overdrawn::

        drafts      two tokens in 1.3 plain passes     + 0.7     1.5 -> 2.2
        drafts      one token in 1.4                   - 0.4     2.2 -> 1.8

    So calls together never lose much more than a hundredth of the time, whatever texts they write, and where drafts win
    they go on. What plain passes take comes from the latency curve, which follows the machine. A single sequence's
    drafts are not ruled by the ledger. Sequences that end ``apart`` come nearer to it by what they write on average.
    """

    def __init__(self, batch: int = 2, *, apart: bool = False) -> None:
        self._alone = batch == 1
        self.apart = apart
        self._balance = _STAKE
        self._written: list[int] = []  # in this call
        self._reached = 0.0  # by all sequences of this call
        self.rested = 0  # passes without a draft that paid, at the end of the last call

    def begin(self, batch: int) -> None:
        """A call of so many sequences begins."""
        self._written = [0] * batch
        self._reached = 0.0

    @property
    def rests(self) -> bool:
        """Whether the next pass is neither to ask nor to draft. A single sequence's drafts are sized by estimates
        alone: what they lose at first, while passes are slow for other reasons, they win back."""
        return not self._alone and self._balance < 0.0

    @property
    def wins(self) -> bool:
        """Whether drafts have won more than they have lost; taken for granted of a single sequence's."""
        return self._alone or self._balance > _STAKE

    def observe(self, step: Step, taken_ms: float, curve: Sequence[float], plain: bool, counts: bool) -> bool:
        """Take in a pass: what it took in all, and what passes over 1, 2, ... nodes are expected to take. A ``plain``
        one neither asked nor drafted; one that does not ``count`` took what passes do not take. Returns whether the
        pass was faster than plain ones."""
        advanced, width = self._advance(step), max(map(len, step.trees))
        if counts and width <= len(curve):
            usual_ms, beside_ms = curve[width - 1], max(0.0, taken_ms - step.forward_ms)
            if width == 1:  # what was asked in vain is all that such a pass took beyond plain ones
                counted_ms = usual_ms + (0.0 if plain else step.draft_ms)
            else:
                counted_ms = beside_ms + min(step.forward_ms, OUTLIER * usual_ms)
            won = advanced - counted_ms / curve[0]
            self._balance = min(_MOST, max(_LEAST, self._balance + _SHARE + won))
        return advanced * curve[0] > taken_ms

    def _advance(self, step: Step) -> float:
        """By how many tokens of all sequences the batch has come nearer to its end."""
        tokens = [len(path.tokens) for path in step.paths]
        going = [row for row, count in enumerate(tokens) if count]
        if not going or self.apart:
            return sum(tokens) / max(1, len(tokens))
        before = reached([self._written[row] for row in going])
        for row in going:
            self._written[row] += tokens[row]
        after = reached([self._written[row] for row in going])
        advanced = after - max(before, self._reached)
        self._reached = after
        return advanced


def reached(written: Sequence[int | float]) -> float:
    """How far a batch has come whose sequences have ``written`` so many tokens. A batch is done when its slowest
    sequence is, but the slower ones may catch up::

        written  20 20    20.0        written  21 25    22.1
    """
    least = min(written)
    return least - _LEAD * log(sum(exp((least - each) / _LEAD) for each in written) / len(written))


class Mode(Enum):
    """What a pass drafts."""

    FIXED = "as many nodes as were asked for"
    DRAFT = "as many nodes as pay"
    MEASURE = "no node: the pass measures what one node costs"
    REST = "no node, and no source is asked: nothing has paid for a while"
    TRY = "as many nodes as no pass has had for long: what do they cost?"


class Rest:
    """How long nothing has paid, and what follows from that::

    plain passes       0 ... 3   4 ... 15          16 ...
    sources are asked  always    every 4th pass    every 8th pass

    Where it is counted what would have been drafted rightly, that calls for sources; else they are asked more seldom.
    Of the passes ``rested`` at the end of the call before, as many count as begin a rest.
    """

    def __init__(self, costs: PassCosts, rested: int = 0) -> None:
        self.passes = min(rested, _RESTS[-1][0])  # plain ones since a draft paid, because none seemed to pay
        self._costs = costs

    @property
    def is_on(self) -> bool:
        """Whether a pass is to cost nothing beside the model."""
        rests = _RESTS if self._costs.limits.repeated is None else _LINEAR_RESTS
        every = next((every for passes, every in rests if self.passes >= passes), 1)
        return self.passes % every > 0 and not self._costs.repeats

    def observe(self, mode: Mode, drafted: bool, refused: bool, accepted: bool) -> None:
        """Take in a pass: was anything drafted, were all of a sequence's candidates refused, was a token accepted?"""
        if not drafted:
            self.passes += refused or mode is Mode.REST
        elif accepted and mode is not Mode.TRY:
            self.passes = 0


class Trials:
    """Passes of sizes of which too little is known, although nothing else speaks for them. All of them together lose
    at most a hundredth of the time that calls with the same latency curve take; where it is counted what would have
    been drafted rightly, a tenth of what that would have saved."""

    def __init__(self, costs: PassCosts) -> None:
        self._costs = costs
        self._repeated = 0  # tokens that would have been drafted rightly, and have been counted
        self._since = 0  # passes since the last trial

    @property
    def width(self) -> int:
        """Nodes of the pass that is to be tried now; 0 = none is."""
        costs = self._costs
        self._since += 1
        broke = costs.limits.repeated is not None and costs.times.spare_ms <= 0.0
        if costs.times.frozen or self._since <= _BETWEEN or broke:
            return 0
        affordable = costs.usual_ms + costs.times.spare_ms
        for width in _WIDTHS:
            if width > len(costs.trees) or costs.trees[width - 1] > affordable:
                return 0
            if costs.is_stale(width):
                return width
        return 0

    def observe(self, tried: bool, taken_ms: float, tokens: float) -> None:
        """Take in a pass, in which sequences wrote so many tokens on average."""
        costs, times = self._costs, self._costs.times
        if costs.limits.repeated is None:
            times.spare_ms += _SHARE * taken_ms
        else:
            times.spare_ms += _PAPER_SHARE * (costs.limits.repeated - self._repeated) * costs.usual_ms
            self._repeated = costs.limits.repeated
        if tried or (self._since == 1 and costs.replayed):  # a trial, or what it has left to be replayed
            times.spare_ms -= max(0.0, taken_ms - tokens * costs.pace_ms)
        if tried:
            self._since = 0


class ExpensiveSources:
    """Whether sources that cost time are worth asking, from how good the tree of the others is. Where the others expect
    much, more candidates add little; where they have nothing, the same candidates may be all there is. So the gain
    (speed with the expensive sources over speed without them, as the latency curve and the trees' values say) is learnt
    apart for four levels of what the others' tree is expected to write. A level that does not pay is tried again after
    4, 8, 16 passes, and then after every 32."""

    def __init__(self) -> None:
        self.time = UsualTime()  # of asking them, in a pass
        self._gains = [_HOPED] * (len(_STEPS) + 1)
        self._trials = [_HOPES] * (len(_STEPS) + 1)
        self._pauses = [_FIRST_PAUSE] * (len(_STEPS) + 1)
        self._skipped = [0] * (len(_STEPS) + 1)

    def pay(self, expected: float) -> bool:
        """Whether to ask them, where the others' tree is expected to write ``expected`` drafted tokens."""
        level = bisect_right(_STEPS, expected)
        if self._gains[level] > 1.0 + GAIN:
            self._pauses[level] = _FIRST_PAUSE
            return True
        self._skipped[level] += 1
        if self._skipped[level] <= self._pauses[level]:
            return False
        self._skipped[level], self._pauses[level] = 0, min(2 * self._pauses[level], _LONGEST_PAUSE)
        return True

    def learn(self, expected: float, gain: float) -> None:
        """Take in the gain of a tree with them, where the others' was expected to write ``expected`` tokens."""
        level = bisect_right(_STEPS, expected)
        trials = self._trials[level] = self._trials[level] + 1
        self._gains[level] += max(1.0 / trials, 1.0 - _FADE) * (gain - self._gains[level])
