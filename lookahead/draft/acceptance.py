"""How likely candidates are to be right, learnt from every node that a walk has visited."""

import copy
from array import array
from collections.abc import Mapping, Sequence
from math import exp, log, prod
from typing import Self

from lookahead.sources.base import Source, runs_a_model

SLOTS = 2  # weights of a kind: where its source is the first to propose the token, and where it agrees with another
_AGREEMENT = (0.8, 0.5)  # a supporting vote starts with so much, and this share of what it would count on its own
_UNSAID = 1.0  # of a weight, that candidates of later sources are worth less if a model did not propose them
_INFORMATION = 2.0  # that a prior is worth; a trial of a candidate with chance p brings p(1-p), at most a quarter
_HORIZON = 40.0  # of a weight's information, and of expected tokens: past it older ones fade
_STRONGEST = 30.0  # weight: what is worth more is as good as certain, and products of odds stay finite
MOST_ODDS = exp(_STRONGEST)
_GAIN_TRIALS = 8.0  # accepted tokens that the calibration's prior is worth

Offered = Mapping[int, Sequence[int]]  # the candidates of a node: token to the slots of those who propose it


class Acceptance:
    """How likely candidates are to be right, learnt from every visited node.

    The candidates of a node compete: with strengths s, candidate c is right with chance exp(s_c) / (1 + sum exp(s)),
    and none is with the rest (a conditional logit model; McFadden, 1974). A candidate's strength is the sum of the
    weights of those who propose it, so it counts less where another source contradicts it, and more where one agrees::

        proposed by       strength                      odds  chance
        cat  suffix       w(suffix)             =  0.4   1.5   0.27
        dog  suffix, pool w(suffix) + w'(pool)  =  1.1   3.0   0.55
        none                                             1.0   0.18

    ``weights`` hold w and w' of each kind, source by source from its place in ``offsets``, and ``odds`` exp(w). A lone
    candidate's chance is its prior; ``trust`` is how many tokens are accepted at first for each one expected.
    """

    def __init__(self, sources: Sequence[Source], trust: float = 1.0) -> None:
        self.offsets: list[int] = []
        weights: list[float] = []
        unsaid = 0.0
        for source in sources:
            self.offsets.append(len(weights))
            for prior in source.priors:
                weight = log(prior / (1.0 - prior))
                weights += [weight - unsaid, max(0.0, _AGREEMENT[0] + _AGREEMENT[1] * weight)]
            if runs_a_model(source):
                unsaid = _UNSAID
        self.weights = weights
        self._information = [_INFORMATION] * len(weights)
        self._expected = _GAIN_TRIALS
        self._accepted = _GAIN_TRIALS * trust

    @property
    def weights(self) -> list[float]:
        return self._weights

    @weights.setter
    def weights(self, weights: list[float]) -> None:
        self._weights = weights
        self.odds = array("d", [exp(min(_STRONGEST, weight)) for weight in weights])  # which C reads

    @property
    def calibration(self) -> float:
        """Tokens accepted for each one expected, of late: how far the values of whole trees can be believed."""
        return self._accepted / self._expected

    def expected(self, values: Sequence[float]) -> float:
        """Drafted tokens that a tree whose nodes have these values is expected to write."""
        return sum(values) * self.calibration

    def chances(self, offered: Offered) -> list[float]:
        """The chance of each candidate of a node to be right, in their order; they sum to less than 1."""
        odds = [min(MOST_ODDS, prod([self.odds[slot] for slot in slots])) for slots in offered.values()]
        every = 1.0 + sum(odds)
        return [each / every for each in odds]

    def count(self, offered: Offered, truth: Sequence[float]) -> None:
        """Learn from the model's probability of each candidate (of an argmax 1 or 0), by a diagonal Newton step."""
        weights, information = self._weights, self._information
        for slots, chance, share in zip(offered.values(), self.chances(offered), truth, strict=True):
            error = (share - chance) / len(slots)
            gained = chance * (1.0 - chance)
            for slot in slots:
                information[slot] = min(_HORIZON, information[slot] + gained)
                weights[slot] += error / information[slot]
                self.odds[slot] = exp(min(_STRONGEST, weights[slot]))

    def count_tree(self, expected: float, accepted: float) -> None:
        """Take in how many drafted tokens a pass was expected to keep, and how many it kept, or was going to."""
        self._expected += expected
        self._accepted += accepted
        if self._expected > _HORIZON:
            fade = _HORIZON / self._expected
            self._expected, self._accepted = self._expected * fade, self._accepted * fade

    def copy(self, trust: float) -> Self:
        """The same estimates, to go on from separately, believed as far as ``trust``."""
        other = copy.copy(self)
        other._expected, other._accepted = _GAIN_TRIALS, _GAIN_TRIALS * trust
        other.weights, other._information = list(self.weights), list(self._information)
        return other
