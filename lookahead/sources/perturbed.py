"""Drafts that see the noise: which candidates a draw will choose, where its random numbers are known.

``torch.multinomial(p, 1)`` is ``argmax(p / e)`` with a line e of exponential noise that depends on nothing but the
generator. So the next token is a function of p, as it is in greedy decoding, and what a source believes to be likely,
q, is divided by the same noise before it is believed::

            q     e     q / e   share of the sum
    cat   0.50  1.90     0.26   0.16
    dog   0.30  0.25     1.20   0.76    <- the draw will choose this one if q is about p
    fox   0.05  0.40     0.13   0.08

A candidate's *share* tells how likely it is right, whatever the temperature. (For one candidate the chance of a match
is at least (1 - TV) / (1 + TV), with TV the distance of p and q; Daliri, Musco and Suresh, arXiv 2408.07978.)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp

import numpy as np

Line = Callable[[int], np.ndarray | None]  # from a token's index to its noise [vocab]; None where it is not known

_ODDS = tuple(exp(0.9 * step - 5.0) for step in range(11))  # of a share, at which the next bin begins
BINS = len(_ODDS) + 1
_EDGES = np.array([odds / (1.0 + odds) for odds in _ODDS])  # the same as shares
_LEAST_NOISE = 1e-30  # noise may be 0


@dataclass(frozen=True, slots=True)
class Draw:
    """How a sequence's tokens are drawn, as far as drafts may know.

    Attributes:
        line: the noise of each written token, by its index.
        temperature, top_k, top_p, min_p: what happens to logits before; 0 or 1 where nothing does.
    """

    line: Line
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def chances(self, logits: np.ndarray) -> np.ndarray:
        """What the draw makes of the highest logits ``[rank]``, best first: chances up to a factor, of as many tokens
        as it may choose."""
        scaled = logits[: self.top_k] if self.top_k else logits
        chances: np.ndarray = np.exp((scaled - scaled[0]) * (1.0 / self.temperature))
        if self.min_p:
            chances = chances[chances >= self.min_p]
        if self.top_p < 1.0:
            sums = chances.cumsum()
            chances = chances[: 1 + int(np.searchsorted(sums, self.top_p * sums[-1]))]
        return chances

    def best(
        self, tokens: Sequence[int], logits: Sequence[float], index: int, most: int
    ) -> tuple[list[int], list[int]]:
        """Of candidates for the token ``index``, the likeliest first by a source, the ``most`` that the draw is most
        likely to choose, and the bins of their shares."""
        chances = self.chances(np.array(logits, np.float32))
        known = np.array(tokens[: len(chances)])
        places, bins = best_shares(perturbed(chances, known, self.line(index)), most)
        return known[places].tolist(), bins.tolist()


def perturbed(chances: np.ndarray, tokens: np.ndarray, line: np.ndarray | None) -> np.ndarray:
    """``q / e`` of tokens with these chances q; without a line, q."""
    return chances if line is None else chances / np.maximum(line[tokens], _LEAST_NOISE)


def best_shares(weights: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Of ``q / e``, the places of the ``most`` highest, best first, and the bins of their shares, 0 to ``BINS - 1``."""
    places = np.argpartition(weights, -most)[-most:] if most < len(weights) else np.arange(len(weights))
    places = places[np.argsort(-weights[places])]
    return places, np.searchsorted(_EDGES, weights[places] / weights.sum())
