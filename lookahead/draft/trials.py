"""Passes that draft less or more than seems to pay: rests while nothing does, and trials of sizes little known."""

from enum import Enum

from lookahead.draft.guard import SHARE
from lookahead.draft.latency import NODES
from lookahead.draft.pass_costs import PassCosts

_RESTS = ((16, 8), (4, 4))  # after so many plain passes, only every so many-th still asks and feeds the sources
_LINEAR_RESTS = ((16, 32), (2, 8))  # the same where it is counted what would have been drafted rightly
_PAPER_SHARE = 0.1  # of what drafts would have saved, the same where that is counted
_WIDTHS = NODES[2:-1:2]  # 4 to 64 nodes: of passes that are tried, where none of the size was seen for a while
_BETWEEN = 8  # passes from trial to trial


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
            times.spare_ms += SHARE * taken_ms
        else:
            times.spare_ms += _PAPER_SHARE * (costs.limits.repeated - self._repeated) * costs.usual_ms
            self._repeated = costs.limits.repeated
        if tried or (self._since == 1 and costs.replayed):  # a trial, or what it has left to be replayed
            times.spare_ms -= max(0.0, taken_ms - tokens * costs.pace_ms)
        if tried:
            self._since = 0
