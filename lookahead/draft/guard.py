"""Whether drafting pays by the clock, whatever the estimates say: what keeps the automatic mode from losing."""

from collections.abc import Sequence
from math import exp, log

from jacobi import Step
from lookahead.draft.latency import OUTLIER

SHARE = 0.01  # of the time, that drafts may lose, and trials
_STAKE = 1.5  # plain passes that they may lose before they have won any
_MOST = 16.0  # plain passes won that may be lost again
_LEAST = -1.0  # plain passes: a pass that seems to lose more than leads here was held up
_LEAD = 2.0  # tokens: a lead of so many counts e times less, since a sequence that is ahead may leave others behind


class Guard:
    """Keeps a ledger of what a batch's drafts have won and lost, in plain passes, from call to call.

    Every pass earns a hundredth of a plain one. A pass that asks or drafts is charged what it took beyond plain passes
    for as many tokens; one that took less earns the difference. Nothing is asked or drafted while the ledger is
    overdrawn::

        drafts      two tokens in 1.3 plain passes     + 0.7     1.5 -> 2.2
        drafts      one token in 1.4                   - 0.4     2.2 -> 1.8

    So calls together never lose much more than a hundredth of the time, whatever texts they write, and where drafts win
    they go on. What plain passes take comes from the latency curve, which follows the machine. A single sequence's
    drafts are not ruled by the ledger. Sequences that end ``apart`` come nearer to their ends by what they write on
    average.
    """

    def __init__(self, batch: int = 2, *, apart: bool = False) -> None:
        self._alone = batch == 1
        self._apart = apart
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
            self._balance = min(_MOST, max(_LEAST, self._balance + SHARE + won))
        return advanced * curve[0] > taken_ms

    def _advance(self, step: Step) -> float:
        """By how many tokens of all sequences the batch has come nearer to its end."""
        tokens = [len(path.tokens) for path in step.paths]
        going = [row for row, count in enumerate(tokens) if count]
        if not going or self._apart:
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
