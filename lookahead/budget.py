"""One tree from all sources: learnt acceptance, and growth from the most likely node down, as far as it pays.

The value of a node is the probability that the walk visits it: its own chance to be right, given that its parent is
visited, times its parent's value. Nodes are taken in the order of their values, so that whatever their number, no other
choice of as many candidates is expected to be accepted further (EAGLE-2, arXiv 2406.16858, and OPT-Tree,
arXiv 2406.17276, do so with a draft model's probabilities; here they are counted).
"""

import copy
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Any, Self

from jacobi import LookaheadError, Path, TokenTree
from lookahead.sources.base import Source

_VOTES = 3  # one source, two, or more say so
_DEPTHS = 2  # below the root, or deeper
_SLOTS = _VOTES * _DEPTHS
_AGREEMENT = (1.0, 2.2, 3.0)  # how many times likelier a candidate is not to be wrong, by votes (as a power)
_PRIOR_TRIALS = 6.0  # how many trials a prior is worth
_HORIZON = 400.0  # trials after which old ones fade
_GAIN_TRIALS = 8.0  # accepted tokens that the calibration's prior is worth
_GAIN_HORIZON = 60.0


class Acceptance:
    """How often candidates of each kind were right, learnt from every visited node; older trials fade.

    The candidates of a node are judged in order, and one is only tried where all before it were wrong. Estimates are
    therefore chances given that, and those of a node's candidates multiply to a proper distribution.

    Args:
        sources: in their order; each brings its kinds and their priors.
        trust: how far the priors are believed at first: accepted tokens for each expected one.

    Attributes:
        rates: the current estimate for each slot; a kind has one for each number of sources that agree, and for
            candidates below the root and deeper ones.
        offsets: the first slot of each source.
        names: of the sources.
    """

    def __init__(self, sources: Sequence[Source], trust: float = 1.0) -> None:
        self.names = [source.name for source in sources]
        self.offsets: list[int] = []
        self.rates: list[float] = []
        for source in sources:
            self.offsets.append(len(self.rates))
            for prior in source.priors:
                if not 0.0 < prior < 1.0:
                    raise LookaheadError(
                        f"Source {source.name!r} has the prior {prior}: expected a share above 0 and below 1."
                    )
                for slot in range(_SLOTS):
                    self.rates.append(1.0 - (1.0 - min(0.97, prior)) ** _AGREEMENT[slot % _VOTES])
        self._right = [_PRIOR_TRIALS * rate for rate in self.rates]
        self._tried = [_PRIOR_TRIALS] * len(self.rates)
        self._expected = _GAIN_TRIALS
        self._accepted = _GAIN_TRIALS * trust

    @property
    def calibration(self) -> float:
        """Tokens accepted for each one expected, of late: how far the values of whole trees can be believed."""
        return self._accepted / self._expected

    def count(self, slot: int, right: bool) -> None:
        """Take in one trial."""
        tried = self._tried[slot] + 1.0
        hits = self._right[slot] + right
        if tried > _HORIZON:
            hits *= _HORIZON / tried
            tried = _HORIZON
        self._tried[slot] = tried
        self._right[slot] = hits
        self.rates[slot] = hits / tried

    def count_tree(self, expected: float, accepted: int) -> None:
        """Take in how many drafted tokens a pass was expected to keep, and how many it kept."""
        self._expected += expected
        self._accepted += accepted
        if self._expected > _GAIN_HORIZON:
            fade = _GAIN_HORIZON / self._expected
            self._expected *= fade
            self._accepted *= fade

    def copy(self, trust: float) -> Self:
        """The same estimates, to go on from separately, believed as far as ``trust``."""
        other = copy.copy(self)
        other._expected, other._accepted = _GAIN_TRIALS, _GAIN_TRIALS * trust
        other.rates, other._right, other._tried = list(self.rates), list(self._right), list(self._tried)
        return other


class BudgetedTree:
    """Grows one row's trees from its sources, and learns from what became of them.

    Args:
        sources: of one row.
        acceptance: may be shared by rows.
    """

    def __init__(self, sources: Sequence[Source], acceptance: Acceptance) -> None:
        self._acceptance = acceptance
        self._all = list(sources)
        self.use(self._all)
        self._owners = [index for index, source in enumerate(sources) for _ in range(len(source.priors) * _SLOTS)]
        self._offered: list[Sequence[tuple[int, int]]] = []

    def use(self, sources: Sequence[Source]) -> None:
        """Take candidates from these of the sources only."""
        self._parts = [
            (source.propose, source.step, offset)
            for source, offset in zip(self._all, self._acceptance.offsets, strict=True)
            if source in sources
        ]
        self._roots = [source.root for source in self._all if source in sources]

    @property
    def asked(self) -> bool:
        """Whether there was any candidate for the root of the tree grown last."""
        return bool(self._offered and self._offered[0])

    def grow(
        self, root: int, room: int, times: Sequence[float], least: Sequence[float], floor: float = 0.0
    ) -> tuple[TokenTree, list[float]]:
        """Grow a tree that writes the most tokens per unit of time.

        Args:
            root: the last written token.
            room: greatest depth.
            times: cost of a pass over 1, 2, ... nodes; the tree has no more nodes than it has entries. All equal: the
                tree is as large as that.
            least: for each size, the least extra cost of a node with which any larger one can be reached (see
                :func:`least_slopes`).
            floor: candidates of less value than this are left out.

        Returns:
            The tree, and the value of each node but the root in order: chances of being visited, falling.
        """
        acceptance = self._acceptance
        rates, calibration, parts = acceptance.rates, acceptance.calibration, self._parts
        tree = TokenTree(root)
        depths, most = tree.depths, len(times)
        heap: list[Any] = []
        offered: list[Sequence[tuple[int, int]]] = []
        values: list[float] = []
        states: list[Any] = [start() for start in self._roots]
        cheapest = min(least)  # a candidate that pays at no size is not even kept; one may pay once others carry a jump
        value, node, order = 1.0, 0, 0
        expected = 1.0
        best, best_count = expected / times[0], 1
        while True:
            candidates: Sequence[tuple[int, int]] = ()
            worth = max(floor, best * cheapest / calibration)
            if depths[node] < room and (value > worth or not node):
                votes: dict[int, int] = {}
                for (propose, _, offset), state in zip(parts, states, strict=True):
                    for token, kind in propose(state):
                        slot = votes.get(token)
                        if slot is None:
                            votes[token] = offset + kind * _SLOTS
                        elif slot % _VOTES < _VOTES - 1:
                            votes[token] = slot + 1
                deeper = _VOTES if node else 0
                left = value
                candidates = [(token, slot + deeper) for token, slot in votes.items()]
                for token, slot in candidates:
                    rate = rates[slot]
                    chance = left * rate
                    if chance > worth:
                        heappush(heap, (-chance, order, node, token, states))
                        order += 1
                    left -= chance
            offered.append(candidates)
            if not heap or len(depths) >= most:
                break
            chance, _, parent, token, states = heappop(heap)
            value = -chance
            if value * calibration <= best * least[node]:
                break
            node = tree.add(parent, token)
            values.append(value)
            expected += value * calibration
            rate = expected / times[node]
            if rate >= best:
                best, best_count = rate, node + 1
            states = [step(state, token) for (_, step, _), state in zip(parts, states, strict=True)]
        if best_count < len(tree):
            tree.truncate(best_count)
            del values[best_count - 1 :]
        self._offered = offered[:best_count]
        return tree, values

    def learn(self, path: Path, values: Sequence[float]) -> list[str]:
        """Learn from the path kept of the tree grown last.

        Args:
            path: as verified.
            values: as :meth:`grow` returned them; empty where nothing was drafted.

        Returns:
            The source credited with each accepted token.
        """
        acceptance, offered = self._acceptance, self._offered
        expected = sum(values)
        if not values:  # nothing was drafted: what could have been says how far the estimates can be believed
            wrong = 1.0
            for _, slot in offered[0]:
                wrong *= 1.0 - acceptance.rates[slot]
            expected = 1.0 - wrong
        count, names, owners = acceptance.count, acceptance.names, self._owners
        credited = []
        known = len(offered)
        accepted = len(path.tokens) - 1
        for place, (node, token) in enumerate(zip(path.nodes, path.tokens, strict=True)):
            if node >= known:
                break
            for candidate, slot in offered[node]:
                if candidate == token:
                    count(slot, True)
                    if place < accepted:
                        credited.append(names[owners[slot]])
                    break
                count(slot, False)
        hits = len(credited) if values else any(candidate == path.tokens[0] for candidate, _ in offered[0])
        acceptance.count_tree(expected, hits)
        return credited
