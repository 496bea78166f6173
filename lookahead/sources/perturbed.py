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

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from math import exp
from operator import itemgetter

import numpy as np

Offer = list[tuple[int, int]]  # tokens and the bins of their shares, best first

BOUNDS = tuple(1.0 / (1.0 + exp(5.0 - 0.9 * step)) for step in range(11))  # shares at which the next bin begins
BINS = len(BOUNDS) + 1
LEAST_SHARE = BOUNDS[1]  # of a candidate, where the third bin begins: S without those below is the same
_LEAST_NOISE = 1e-30  # noise may be 0
_ALONE = np.ones((1, 1), np.float32)  # the votes of a single distribution


@dataclass(frozen=True, slots=True)
class Draw:
    """How a sequence's tokens are drawn, as far as drafts may know.

    Attributes:
        line: the noise ``[vocab]`` of each written token, by its index; None where it is not known.
        temperature, top_k, top_p, min_p: what happens to logits before; 0 or 1 where nothing does.
    """

    line: Callable[[int], np.ndarray | None]
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def warp(self) -> tuple[float, int, float, float]:
        """What happens to logits: all that :meth:`chances` depends on."""
        return self.temperature, self.top_k, self.top_p, self.min_p

    def chances(self, logits: np.ndarray) -> np.ndarray:
        """Chances, up to a factor, by the highest logits ``[..., rank]``, best first; 0 where a draw may not choose."""
        chances: np.ndarray = np.exp((logits - logits[..., :1]) * (1.0 / self.temperature))
        if self.top_k:
            chances[..., self.top_k :] = 0.0
        if self.min_p:
            chances[chances < self.min_p] = 0.0
        if self.top_p < 1.0:
            sums = chances.cumsum(-1)
            chances[..., 1:][sums[..., :-1] >= self.top_p * sums[..., -1:]] = 0.0
        return chances

    def best(self, tokens: np.ndarray, chances: np.ndarray, line: np.ndarray | None) -> Offer:
        """Of tokens with these chances q, up to a factor, those that the draw is most likely to choose under the noise
        of ``line`` (None = it is not known), best first, and the bins of their shares."""
        return offer(self.shares(tokens[None], chances[None], line))

    def shares(
        self, tokens: np.ndarray, chances: np.ndarray, line: np.ndarray | None, votes: np.ndarray = _ALONE
    ) -> dict[int, float]:
        """The shares of the tokens that count, by tokens and chances ``[distribution, rank]``. Each distribution is
        divided by the noise first, and then what it says has its part of the ``votes`` ``[distribution, 1]``: averaged
        before, what only one of them thinks likely would come first wherever its noise is small.
        """
        weights = chances if line is None else chances / np.maximum(line.take(tokens), _LEAST_NOISE)
        weights = weights * (votes / np.add.reduce(weights, 1, keepdims=True))
        places = (weights >= LEAST_SHARE).ravel().nonzero()[0]
        found: dict[int, float] = {}
        for token, share in zip(tokens.take(places).tolist(), weights.take(places).tolist(), strict=True):
            found[token] = found.get(token, 0.0) + share
        return found


def offer(shares: dict[int, float], first: int = 0, most: int = 8) -> Offer:
    """Tokens of the largest shares, best first, and their bins from ``first`` on; with 4 or 16, S is 1 to 4 % lower."""
    likely = sorted(shares.items(), key=itemgetter(1), reverse=True)[:most]
    return [(token, first + bisect_right(BOUNDS, share)) for token, share in likely]
