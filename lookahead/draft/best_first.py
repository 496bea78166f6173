"""One tree from all sources: growth from the most likely node down, as far as it pays.

The value of a node is the probability that the walk visits it: its own chance, given that its parent is visited, times
its parent's value. Nodes are taken in the order of their values, so no other tree of the same size is expected to be
accepted further::

    root 1.00 -+- cat 0.60 -- sat 0.48 -- on 0.43     taken in the order cat, sat, on, dog, ran
               +- dog 0.30 -- ran 0.12

EAGLE-2 (arXiv 2406.16858) and OPT-Tree (arXiv 2406.17276) do so with a draft model's probabilities; here they are
learnt from what was right.
"""

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush, nsmallest
from itertools import count
from typing import Any

from jacobi import Path, TokenTree
from lookahead.draft.acceptance import MOST_ODDS, SLOTS, Acceptance
from lookahead.draft.replays import Cut
from lookahead.sources.base import BatchSource, Candidate, Source, is_batch

Proposed = Sequence[Sequence[tuple[int, int]]]  # what each source proposes for a node; empty if none was asked

_SPARE = 16  # entries of the heap beyond twice as many as can be taken, at which it is cut


class Frontier:
    """A batch source that is asked like any other, but has made candidates before they are asked for.

    When node ``a`` is taken first of its level, the source is asked for all that wait beside it, best first::

        0.9 a   <- taken      expand([a, b, c])
        0.6 b   <- waits      b and c are served from the same answer,
        0.2 c   <- waits      if they are taken at all
    """

    def __init__(self, source: BatchSource) -> None:
        self.made: dict[Any, Sequence[Candidate]] = {}  # of this pass's tree, by state
        self.step = source.step
        self._source = source

    def root(self) -> Any:
        self.made.clear()
        return self._source.root()

    def expand(self, states: Iterable[Any]) -> None:
        asked = [state for state in dict.fromkeys(states) if state not in self.made]
        self.made.update(zip(asked, self._source.expand(asked), strict=True))

    def propose(self, state: Any) -> Sequence[Candidate]:
        return self.made[state]


class BestFirstTree:
    """Grows one sequence's trees from its sources and learns from what became of them; a ``chain`` has one branch."""

    def __init__(self, sources: Sequence[Source], acceptance: Acceptance, chain: bool = False) -> None:
        self._acceptance = acceptance
        self._chain = chain
        self._all = list(sources)
        self._views = [Frontier(source) if is_batch(source) else source for source in sources]
        self.use(self._all)
        self._owners = [index for index, source in enumerate(sources) for _ in range(len(source.priors) * SLOTS)]
        self._offered: list[Proposed] = []

    def use(self, sources: Sequence[Source]) -> None:
        used = [place for place, source in enumerate(self._all) if source in sources]
        views, offsets = [self._views[place] for place in used], self._acceptance.offsets
        self._parts = [(view.propose, view.step, offsets[place]) for place, view in zip(used, views, strict=True)]
        self._roots = [view.root for view in views]
        self._frontiers = [(part, view) for part, view in enumerate(views) if isinstance(view, Frontier)]

    @property
    def asked(self) -> bool:
        """Whether there was any candidate for the root of the tree grown last."""
        return bool(self._offered and any(self._offered[0]))

    def grow(
        self,
        root: int,
        room: int,
        times: Sequence[float],
        least: Sequence[float],
        floor: float = 0.0,
        gain: float = 1.0,
        cut: Cut | None = None,
    ) -> tuple[TokenTree, list[float]]:
        """Grow the tree that writes the most tokens per unit of time; with it come its nodes' values, falling.

        Args:
            room: greatest depth.
            times: cost of a pass over 1, 2, ... nodes: as many as the tree may have. Equal costs make it as large.
            least: for each size, the least slope of ``times`` to a larger one (:func:`.pass_costs.least_slopes`).
            floor: candidates of less value are left out.
            gain: of speed over drafting nothing, that a tree has to promise.
            cut: what it costs that a chain is not kept whole; None = nothing.
        """
        calibration = self._acceptance.calibration
        odds, parts = self._acceptance.odds, self._parts
        steps = [step for _, step, _ in parts]
        kinds = [(odds[offset::SLOTS], odds[offset + 1 :: SLOTS]) for _, _, offset in parts]
        tree = TokenTree(root)
        depths, most = tree.depths, len(times)
        heap: list[Any] = []
        order = count()  # tells entries of the heap apart
        offered: list[Proposed] = []
        values: list[float] = []
        states: list[Any] = [start() for start in self._roots]
        cheapest = min(least)  # a candidate that pays at no size is not even kept; one may pay once others carry a jump
        value, node, expected = 1.0, 0, 1.0
        best, best_count = gain * expected / times[0], 1
        rest = 0.0  # what is worth no more has no place among the nodes that are still to be taken
        while True:
            proposed: Proposed = ()
            worth = max(floor, best * cheapest / calibration)
            if depths[node] < room and (value > worth or not node):
                if self._frontiers:
                    self._expand(states, heap, depths, node, most)
                proposed = _proposed(parts, states)
                for token, chance in _chances(proposed, kinds, value, max(worth, rest)):
                    heappush(heap, (-chance, next(order), node, token, states))
            offered.append(proposed)
            left = most - len(depths)
            if not heap or left <= 0:
                break
            if len(heap) > 2 * left + _SPARE and not self._chain:
                heap = nsmallest(left, heap)
                rest = -heap[-1][0]
            loss, _, parent, token, states = heappop(heap)
            if self._chain:
                heap.clear()
            value = -loss
            if value * calibration <= best * least[node]:
                break
            node = tree.add(parent, token)
            values.append(value)
            expected += value * calibration
            whole = min(1.0, value * calibration)
            rate = expected / (times[node] + (cut.cost(expected, whole, node + 1) if cut else 0.0))
            if rate >= best:
                best, best_count = rate, node + 1
            states = [step(state, token) for step, state in zip(steps, states, strict=True)]
        tree.truncate(best_count)
        del values[best_count - 1 :]
        self._offered = offered[:best_count]
        return tree, values

    def _expand(self, states: list[Any], heap: list[Any], depths: list[int], node: int, most: int) -> None:
        for part, frontier in self._frontiers:
            if states[part] not in frontier.made:
                level = (entry for entry in heap if depths[entry[2]] + 1 == depths[node])
                waiting = nsmallest(most - len(depths), level)
                beside = [frontier.step(above[part], token) for _, _, _, token, above in waiting]
                frontier.expand([states[part], *beside])

    def learn(self, tree: TokenTree, path: Path, values: Sequence[float]) -> list[str]:
        """Learn from the path kept of the tree grown last, and name the source of each accepted token."""
        acceptance, offered, accepted = self._acceptance, self._offered, len(path.tokens) - 1
        credited = []
        expected, right = sum(values), 0.0
        for place, (node, token) in enumerate(zip(path.nodes, path.tokens, strict=True)):
            if node >= len(offered):
                break
            candidates = _votes(self._parts, offered[node])
            truth = [float(candidate == token) for candidate in candidates]
            if not values:  # nothing was drafted: what could have been says how far the estimates can be believed
                expected, right = sum(acceptance.chances(candidates)), sum(truth)
            else:
                drafted = tree.children[node]
                right += sum(share for candidate, share in zip(candidates, truth, strict=True) if candidate in drafted)
            acceptance.count(candidates, truth)
            if place < accepted and token in candidates:
                credited.append(acceptance.names[self._owners[candidates[token][0]]])
        acceptance.count_tree(expected, right)
        return credited


def _proposed(parts: Sequence[tuple[Any, Any, int]], states: Sequence[Any]) -> Proposed:
    proposed = []
    for (propose, _, _), state in zip(parts, states, strict=True):
        candidates = propose(state)
        if candidates and len(candidates[0]) == 3:
            candidates = [candidate[:2] for candidate in candidates]
        proposed.append(candidates)
    return proposed


def _votes(parts: Sequence[tuple[Any, Any, int]], proposed: Proposed) -> dict[int, list[int]]:
    """Who proposes which token, from each source's candidates and first slot: token to slots."""
    votes: dict[int, list[int]] = {}
    for (_, _, offset), candidates in zip(parts, proposed, strict=False):
        for token, kind in candidates:
            slots = votes.get(token)
            if slots is None:
                votes[token] = [offset + kind * SLOTS]
            else:
                slots.append(offset + kind * SLOTS + 1)
    return votes


def _chances(
    proposed: Proposed, kinds: Sequence[tuple[Sequence[float], Sequence[float]]], value: float, least: float
) -> list[tuple[int, float]]:
    """The candidates of a node that is worth ``value``, and what each is worth, if that is more than ``least``. That is
    :meth:`.Acceptance.chances` by odds of each kind: for the first source to propose a token, and for others."""
    odds: dict[int, float] = {}
    for candidates, (first, agreeing) in zip(proposed, kinds, strict=True):
        if not odds:
            odds = {token: first[kind] for token, kind in candidates}
            continue
        for token, kind in candidates:
            known = odds.get(token)
            odds[token] = first[kind] if known is None else min(MOST_ODDS, known * agreeing[kind])
    share = value / (1.0 + sum(odds.values()))
    least /= share
    return [(token, each * share) for token, each in odds.items() if each > least]
