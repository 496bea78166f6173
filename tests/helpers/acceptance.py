"""Rules of acceptance, written slowly."""

import math
from collections.abc import Callable, Sequence

Accepts = Callable[[Sequence[float], int], bool]


def softmax(scores: Sequence[float]) -> list[float]:
    odds = [math.exp(score) for score in scores]
    return [each / sum(odds) for each in odds]


def slow_typical(epsilon: float, delta: float) -> Accepts:
    def accepts(chances: Sequence[float], token: int) -> bool:
        entropy = -sum(chance * math.log(chance) for chance in chances if chance)
        return chances[token] > min(epsilon, delta * math.exp(-entropy))

    return accepts


def slow_nucleus(top_p: float) -> Accepts:
    def accepts(chances: Sequence[float], token: int) -> bool:
        before = 0.0
        for other in sorted(range(len(chances)), key=lambda each: -chances[each]):
            if other == token:
                return before < top_p and chances[token] > 0
            before += chances[other]
        raise AssertionError

    return accepts
