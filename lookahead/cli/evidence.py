"""Verdict on paired times of two methods: a gain, a loss, or too few texts to say."""

from collections.abc import Sequence
from math import ceil, exp, log, sqrt
from statistics import fmean, stdev

from lookahead.stats import counted

_LEAST_TEXTS, _LEAST_TOKENS = 3, 96  # of fewer, not even the scatter is known
_LEVEL = log(1.05)  # of the logarithm of a ratio: less makes no difference
_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)  # 97.5 % quantiles, from 1 degree of freedom


def evidence(ratios: Sequence[float], tokens: int) -> tuple[float, tuple[float, float] | None, str]:
    """The geometric mean of ratios, one for each text, of ``tokens`` in all; above 1 is a gain. Its 95 % interval by
    Student's t over their logarithms; None = there was one text. And the verdict."""
    logs, count = [log(ratio) for ratio in ratios], len(ratios)
    middle, seen = fmean(logs), f"{counted(count, 'text')} of {counted(tokens, 'token')}"
    verdict = f"too few to say ({seen}: at least {_LEAST_TEXTS} and {_LEAST_TOKENS} are needed)"
    if count == 1:
        return ratios[0], None, verdict
    spread = stdev(logs)
    quantile = _STUDENT[count - 2] if count - 2 < len(_STUDENT) else 2.0 + 2.2 / (count - 1)
    reach = quantile * spread / sqrt(count)
    low, high = middle - reach, middle + reach
    if count >= _LEAST_TEXTS and tokens >= _LEAST_TOKENS:
        needed = max(_LEAST_TEXTS, ceil((2.2 * spread / max(abs(middle), _LEVEL)) ** 2))
        verdict = f"too few to say ({seen}: ratios that scatter so ask for about {needed} such texts)"
        if low > -_LEVEL and high < _LEVEL:
            verdict = "no difference"
        elif low > 0.0 or high < 0.0:
            verdict = "a win" if low > 0.0 else "a loss"
    return exp(middle), (exp(low), exp(high)), verdict
