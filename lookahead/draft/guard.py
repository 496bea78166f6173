"""Whether drafting pays by the clock, whatever the estimates say: what keeps the automatic mode from losing."""

from collections.abc import Sequence
from math import inf

from jacobi import Step

_VERDICTS = {8: 1.25, 16: 1.1, 24: 1.0}  # passes of a period of drafting: times plain decoding's pace, at most
_FIRST_REST, _LAST_REST = 8, 256  # passes without drafts after a period that has not paid
_ASKS = 8  # passes of such a rest, after which one may draft that promises much
_MUCH = 1.5  # times plain decoding's speed
_OUTLIER = 1.6  # times what a pass is expected to take; a slower one is counted as that slow


class Guard:
    """Compares periods of drafting with plain passes of the same calls.

    A period is judged by all that its passes took, for each token of the sequence furthest behind: a batch is done
    when that one is. What plain passes take meanwhile comes from the latency curve, which follows the machine::

        drafting 24 passes: 1.06 of plain's time a token      8 passes of rest      drafting 24 passes: 1.03 ...

    Each rest is twice as long as the one before, up to 256 passes, until a period pays or a draft in a rest does.
    """

    def __init__(self) -> None:
        self._spent = 0.0  # in this period, in plain passes
        self._passes = 0  # of this period, or left of this rest as a negative number
        self._rest = _FIRST_REST
        self._behind = 0  # tokens of the sequence furthest behind, when the period began
        self._written: list[int] = []  # in this call

    def begin(self, batch: int) -> None:
        """A call begins, with another text: what was learnt stays, and an unfinished period starts over."""
        self._written = [0] * batch
        if self._passes > 0:
            self._start()

    def _start(self) -> None:
        self._passes, self._spent = 0, 0.0
        self._behind = min(self._written, default=0)

    @property
    def rests(self) -> bool:
        """Whether the next pass is not to draft at all."""
        return self._passes < 0 and self._passes % _ASKS != 0

    @property
    def least_gain(self) -> float:
        """Times plain decoding's speed, that a draft has to promise."""
        return _MUCH if self._passes < 0 else 1.0

    def observe(self, step: Step, taken_ms: float, curve: Sequence[float], tries: bool) -> None:
        """Take in a pass: what it took in all, and what passes over 1, 2, ... nodes are expected to take; one that only
        ``tries`` a size does not count."""
        going, width = self._count(step), max(map(len, step.trees))
        if self._passes < 0:
            self._passes += 1
            paid = width > 1 and not tries and max(len(path.tokens) for path in step.paths) > 2
            if paid or not self._passes:
                self._start()
        elif not tries and going and width <= len(curve):
            self._passes += 1
            beside_ms = max(0.0, taken_ms - step.forward_ms)
            self._spent += (min(step.forward_ms, _OUTLIER * curve[width - 1]) + beside_ms) / curve[0]
            self._judge(min(going) - self._behind)

    def _count(self, step: Step) -> Sequence[int]:
        for row, path in enumerate(step.paths):
            self._written[row] += len(path.tokens)
        return [self._written[row] for row, path in enumerate(step.paths) if path.tokens]

    def _judge(self, advanced: int) -> None:
        if self._spent > _VERDICTS.get(self._passes, inf) * max(1, advanced):
            self._passes, self._rest = -self._rest, min(2 * self._rest, _LAST_REST)
        elif self._passes >= max(_VERDICTS):
            self._rest = _FIRST_REST
            self._start()
