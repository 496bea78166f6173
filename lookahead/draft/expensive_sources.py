"""Sources whose candidates cost time to make, such as heads: asked where their candidates have been worth it."""

from bisect import bisect_right
from collections.abc import Sequence

from lookahead.sources import Source

_STEPS = (0.3, 1.0, 2.5)  # tokens expected of the other sources' tree at which the next level begins
_TRIALS, _HOPE = 2, 0.9  # at a level, before it is judged, unless the first gain is lower than this
_SKIPPED = 32  # passes at a level that does not pay, after which it is tried again
_LEAST_GAIN = 1.05  # of speed: estimates err
_FADE = 0.8  # of earlier gains, once a level is judged
_FIRST_RUNS = 3  # the fastest of them is what asking is taken to cost; the very first is often slow
_OUTLIER = 2.0  # times the usual cost, as which a slower run counts
_SLOWNESS = 0.1  # of a run in the estimate of the cost


def is_expensive(source: Source) -> bool:
    return hasattr(source, "spent_ms")


class ExpensiveSources:
    """Whether sources that cost time are worth asking, from how good the tree of the others is. Where the others expect
    much, more candidates add little; where they have nothing, the same candidates may be all there is. So the gain
    (speed with the expensive sources over speed without them, as the latency curve and the trees' values say) is learnt
    apart for four levels of what the others' tree is expected to write."""

    def __init__(self) -> None:
        self.ms = 0.0  # what asking them takes in a pass
        self._runs = 0
        self._gains = [0.0] * (len(_STEPS) + 1)
        self._trials = [0] * (len(_STEPS) + 1)
        self._skipped = [0] * (len(_STEPS) + 1)

    def pay(self, expected: float) -> bool:
        """Whether to ask them, where the others' tree is expected to write ``expected`` drafted tokens."""
        level = bisect_right(_STEPS, expected)
        trials, gain = self._trials[level], self._gains[level]
        if not trials or gain > (_HOPE if trials < _TRIALS else _LEAST_GAIN):
            return True
        self._skipped[level] = (self._skipped[level] + 1) % _SKIPPED
        return self._skipped[level] == 0

    def learn(self, expected: float, gain: float) -> None:
        """Take in the gain of a tree with them, where the others' was expected to write ``expected`` tokens."""
        level = bisect_right(_STEPS, expected)
        trials = self._trials[level] = self._trials[level] + 1
        self._gains[level] += max(1.0 / trials, 1.0 - _FADE) * (gain - self._gains[level])

    def spent(self, ms: float) -> None:
        if ms <= 0.0:
            return
        self._runs += 1
        if self._runs <= _FIRST_RUNS:
            self.ms = ms if self._runs == 1 else min(ms, self.ms)
        else:
            self.ms += _SLOWNESS * (min(ms, _OUTLIER * self.ms) - self.ms)


def spent_ms(sources: Sequence[Source]) -> float:
    return sum(getattr(source, "spent_ms", 0.0) for source in sources)
