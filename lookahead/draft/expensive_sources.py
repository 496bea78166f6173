"""Sources whose candidates cost time to make, such as heads: asked where their candidates have been worth it."""

from bisect import bisect_right
from typing import Any

from lookahead.sources.draft_model import UsualTime

_STEPS = (0.3, 1.0, 2.5)  # tokens expected of the other sources' tree at which the next level begins
_HOPED, _HOPES = 1.2, 4  # gain at a level before any was seen, and the trials that this is worth
_FIRST_PAUSE, _LONGEST_PAUSE = 4, 32  # passes at a level that does not pay, after which it is tried again
_LEAST_GAIN = 1.03  # of speed: estimates err
_FADE = 0.9  # of earlier gains, once a level is judged


def is_expensive(source: Any) -> bool:
    return hasattr(source, "spent_ms")


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
        if self._gains[level] > _LEAST_GAIN:
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
