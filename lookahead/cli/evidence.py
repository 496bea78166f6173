"""Verdict on paired times of two methods: a gain, a loss, or too few texts to say."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, exp, log, sqrt
from statistics import fmean, stdev

from lookahead.stats import counted

_LEAST_TEXTS, _LEAST_TOKENS = 3, 96  # of fewer, not even the scatter is known
_LEVEL = log(1.05)  # of the logarithm of a ratio: less makes no difference
_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)  # 97.5 % quantiles, from 1 degree of freedom
LOADED = 0.8  # share of the time that a thread runs, below which others take the processors


@dataclass(frozen=True)
class Evidence:
    """The geometric mean of single texts' ratios, and its 95 % interval by Student's t over their logarithms; None =
    there was one text."""

    speedup: float
    interval: tuple[float, float] | None
    texts: int
    tokens: int
    needed: int  # texts that this scatter asks for

    @classmethod
    def of(cls, ratios: Sequence[float], tokens: int) -> "Evidence":
        """Verdict on ratios, one for each text, of ``tokens`` in all; above 1 is a gain."""
        logs, count = [log(ratio) for ratio in ratios], len(ratios)
        middle = fmean(logs)
        if count == 1:
            return cls(ratios[0], None, 1, tokens, _LEAST_TEXTS)
        spread = stdev(logs)
        quantile = _STUDENT[count - 2] if count - 2 < len(_STUDENT) else 2.0 + 2.2 / (count - 1)
        reach = quantile * spread / sqrt(count)
        needed = max(_LEAST_TEXTS, ceil((2.2 * spread / max(abs(middle), _LEVEL)) ** 2))
        return cls(exp(middle), (exp(middle - reach), exp(middle + reach)), count, tokens, needed)

    @property
    def verdict(self) -> str:
        seen = f"{counted(self.texts, 'text')} of {counted(self.tokens, 'token')}"
        if self.interval is None or self.texts < _LEAST_TEXTS or self.tokens < _LEAST_TOKENS:
            return f"too few to say ({seen}: at least {_LEAST_TEXTS} and {_LEAST_TOKENS} are needed)"
        low, high = self.interval
        if log(low) > -_LEVEL and log(high) < _LEVEL:
            return "no difference"
        if low > 1.0 or high < 1.0:
            return "a win" if low > 1.0 else "a loss"
        return f"too few to say ({seen}: ratios that scatter so ask for about {self.needed} such texts)"
