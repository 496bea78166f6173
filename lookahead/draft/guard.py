"""Whether drafting pays by the clock, whatever the estimates say: what keeps the automatic mode from losing."""

from collections.abc import Sequence
from math import inf

from jacobi import Step
from lookahead.draft.tree_worth import progress

_VERDICTS = {8: 1.25, 16: 1.1, 24: 1.0}  # passes of a period of drafting: times plain decoding's pace, at most
_FIRST_REST, _LAST_REST = 8, 256  # passes without drafts after a period that has not paid
_ASKS = 8  # passes of such a rest, after which one may draft that promises much
_MUCH = 1.5  # times plain decoding's speed
_OUTLIER = 1.6  # times what a pass is expected to take; a slower one is counted as that slow


class Guard:
    """Compares periods of drafting with plain passes of the same calls.

    A period is judged by all that its passes took, for each token by which the end has come nearer: a batch is done
    when its slowest sequence is (:func:`.tree_worth.progress`). The first pass of a size does not count, because its
    kernels may be made for it. What plain passes take meanwhile comes from the latency curve, which follows the
    machine::

        drafting 24 passes: 1.06 of plain's time a token      8 passes of rest      drafting 24 passes: 1.03 ...

    Each rest is twice as long as the one before, up to 256 passes, until a period pays or a draft in a rest does.
    """

    def __init__(self) -> None:
        self._spent = 0.0  # in this period, in plain passes
        self._passes = 0  # of this period, or left of this rest as a negative number
        self._rest = _FIRST_REST
        self._advanced = 0.0  # tokens by which the end has come nearer in this period
        self._written: list[int] = []  # in this call
        self.rested = 0  # passes without a draft that paid, at the end of the last call

    def begin(self, batch: int) -> None:
        """A call begins, with another text: what was learnt stays, and an unfinished period starts over."""
        self._written = [0] * batch
        if self._passes > 0:
            self._start()

    def _start(self) -> None:
        self._passes, self._spent, self._advanced = 0, 0.0, 0.0

    @property
    def rests(self) -> bool:
        """Whether the next pass is not to draft at all."""
        return self._passes < 0 and self._passes % _ASKS != 0

    @property
    def least_gain(self) -> float:
        """Times plain decoding's speed, that a draft has to promise."""
        return _MUCH if self._passes < 0 else 1.0

    def observe(self, step: Step, taken_ms: float, curve: Sequence[float], counts: bool) -> bool:
        """Take in a pass: what it took in all, and what passes over 1, 2, ... nodes are expected to take. One that does
        not ``count`` tells nothing: it was not to draft what pays, or is the first of its size. Returns whether the
        pass was faster than plain ones."""
        advanced, width = self._advance(step), max(map(len, step.trees))
        if self._passes < 0:
            self._passes += 1
            if (counts and advanced > 2.0) or not self._passes:
                self._start()
        elif counts and advanced and width <= len(curve):
            self._passes += 1
            beside_ms = max(0.0, taken_ms - step.forward_ms)
            self._spent += (min(step.forward_ms, _OUTLIER * curve[width - 1]) + beside_ms) / curve[0]
            self._advanced += advanced
            self._judge()
        return advanced * curve[0] > taken_ms

    def _advance(self, step: Step) -> float:
        tokens = [len(path.tokens) for path in step.paths]
        going = [row for row, count in enumerate(tokens) if count]
        advanced = progress([self._written[row] for row in going], [tokens[row] for row in going]) if going else 0.0
        for row in going:
            self._written[row] += tokens[row]
        return advanced

    def _judge(self) -> None:
        if self._spent > _VERDICTS.get(self._passes, inf) * self._advanced:
            self._passes, self._rest = -self._rest, min(2 * self._rest, _LAST_REST)
        elif self._passes >= max(_VERDICTS):
            self._rest = _FIRST_REST
            self._start()
