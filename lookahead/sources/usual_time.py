"""What something usually takes, by a clock that now and then shows what it does not."""

_FIRST_RUNS = 3
_OUTLIER = 2.0  # times the usual, as which a slower run counts
_NEWEST = 0.1  # of a run in the estimate


class UsualTime:
    """Milliseconds of a run: the fastest of the first three, because the very first is often slow, and then a smoothed
    mean, in which outliers count less. 0 = there was no run yet."""

    def __init__(self) -> None:
        self.ms = 0.0
        self._runs = 0

    def observe(self, ms: float) -> None:
        """Take in a run; one of no time was none."""
        if ms <= 0.0:
            return
        self._runs += 1
        if self._runs <= _FIRST_RUNS:
            self.ms = ms if self._runs == 1 else min(ms, self.ms)
        else:
            self.ms += _NEWEST * (min(ms, _OUTLIER * self.ms) - self.ms)
