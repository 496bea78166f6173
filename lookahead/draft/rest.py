"""What happens while no draft pays: passes without drafts, and now and then a trial."""

from enum import Enum

_PROBE_FIRST, _PROBE_LAST = 32, 512  # plain passes between two trials of a small draft, while none seems to pay
_PROBE_SHARE = 0.02  # of plain passes' time, that such trials may take
_RESTS = ((16, 8), (4, 4))  # after so many plain passes, only every so many-th still asks and feeds the sources


class Mode(Enum):
    """What a pass is for."""

    FIXED = "as many nodes as were asked for"
    DRAFT = "as many nodes as pay"
    MEASURE = "no node: the pass measures what one node costs"
    REST = "no node, and no source is asked: nothing has paid for a while"
    PROBE = "a few nodes, although none seems to pay"


class Rest:
    """How long nothing has paid, and what follows from that.

    ::

        plain passes            0 ... 3   4 ... 15          16 ...
        sources are asked       always    every 4th pass    every 8th pass
        a small draft is tried  -         -                 at 32, later at 64, 128, ... 512

    Attributes:
        passes: plain passes since a draft paid, because none seemed to pay.
    """

    def __init__(self) -> None:
        self.passes = 0
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
