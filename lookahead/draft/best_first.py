"""One tree from all sources: growth from the most likely node down, as far as it pays.

The value of a node is the probability that the walk visits it: its own chance, given that its parent is visited, times
its parent's value. Nodes are taken in the order of their values, so no other tree of the same size is expected to be
accepted further::

    root 1.00 -+- cat 0.60 -- sat 0.48 -- on 0.43     taken in the order cat, sat, on, dog, ran
               +- dog 0.30 -- ran 0.12

EAGLE-2 (arXiv 2406.16858) and OPT-Tree (arXiv 2406.17276) do so with a draft model's probabilities; here they are
learnt from what was right.
"""

from array import array
from collections.abc import Callable, Sequence
from functools import reduce
from heapq import heappop, heappush, nsmallest
from itertools import repeat
from operator import add, call
from typing import Any

from jacobi import Path, TokenTree
from lookahead import _native
from lookahead.draft.acceptance import MOST_ODDS, SLOTS, Acceptance
from lookahead.draft.frontier import Ask, Frontier, Growth, grown
from lookahead.draft.pass_costs import Cut
from lookahead.sources.base import Candidate, CheckedSource, Source, is_batch

_WIDEST = 16  # nodes that wait beside one, about which a batch source is asked with it at most
_FOUND = 0.7  # chance that a batch source has a right candidate below a node, where others have none

Sizes = tuple[Sequence[float], Sequence[float]]  # cost of each, and the least slope to a larger one
Proposed = Sequence[Sequence[tuple[int, int]]]  # what each source proposes for a node; empty if none was asked

# A node is asked for candidates only if one as likely as itself, or of this chance, would find a place and would pay.
_LIKELY = 0.4


class _Best:
    """The fastest of the sizes that a tree had while it grew, in its time and what is ``spent`` whatever the size."""

    def __init__(self, expected: float, time: float, spent: float) -> None:
        self.count = 1
        self._expected, self._time, self._spent = expected, time, 0.0
        self.spend(spent)

    def spend(self, ms: float) -> None:
        self._spent += ms
        self.speed = self._expected / (self._time + self._spent)

    def compare(self, expected: float, time: float, count: int) -> None:
        speed = expected / (time + self._spent)
        if speed >= self.speed:
            self._expected, self._time, self.speed, self.count = expected, time, speed, count


class BestFirstTree:
    """Grows one sequence's trees from its sources and learns from what became of them; a ``chain`` has one branch."""

    def __init__(self, sources: Sequence[Source], acceptance: Acceptance, chain: bool = False) -> None:
        self._acceptance = acceptance
        self._chain = chain
        self._all = list(sources)
        self._views = [Frontier(source) if is_batch(source) else source for source in sources]
        self.use(self._all)
        self._offered: list[Proposed] = []
        self.asks = 0  # nodes about which sources were asked for the tree grown last
        self.asked_ms = 0.0  # what batch sources were asked for it takes, as far as they know
        self._uncounted: list[tuple[Sequence[int], Proposed, int]] = []  # at visited nodes, and the token written there

    def use(self, sources: Sequence[Source]) -> None:
        used = [place for place, source in enumerate(self._all) if source in sources]
        views = [self._views[place] for place in used]
        self._used = [self._all[place] for place in used]
        self._offsets = tuple(self._acceptance.offsets[place] for place in used)
        asks: list[Any] = [
            _stripped(view.propose) if isinstance(source, CheckedSource) else view.propose
            for source, view in zip(self._used, views, strict=True)
        ]
        for limit in (source.allowed for source in self._used if hasattr(source, "allowed")):
            asks = [lambda state, ask=ask, limit=limit: limit(ask(state)) for ask in asks]
        self._proposers = tuple(asks)
        self._steps = tuple(view.step for view in views)
        self._roots = [view.root for view in views]
        self._frontiers = [(part, view) for part, view in enumerate(views) if isinstance(view, Frontier)]

    @property
    def asked(self) -> bool:
        """Whether there was any candidate for the root of the tree grown last."""
        return bool(self._offered and any(self._offered[0]))

    def grow(self, *args: Any, **settings: Any) -> tuple[TokenTree, list[float]]:
        """Do what :meth:`growing` says, for one sequence alone."""
        return grown(self.growing(*args, **settings))

    def growing(
        self,
        root: int,
        room: int,
        times: Sequence[float],
        least: Sequence[float],
        floor: float = 0.0,
        gain: float = 1.0,
        cut: Cut | None = None,
        ask_ms: float = 0.0,
        beside_ms: float = 0.0,
    ) -> Growth[tuple[TokenTree, list[float]]]:
        """Grow the tree that writes the most tokens per unit of time; with it come its nodes' values, falling.

        Args:
            room: greatest depth.
            times: cost of a pass over 1, 2, ... nodes: as many as the tree may have. Equal costs make it as large.
            least: for each size, the least slope of ``times`` to a larger one (:func:`.pass_costs.least_slopes`).
            floor: candidates of less value are left out.
            gain: of speed over drafting nothing, that a tree has to promise.
            cut: what it costs that a chain is not kept whole; None = nothing.
            ask_ms: what it costs to ask about one node; 0 where ``times`` tell of it, too.
            beside_ms: what sources cost that are asked whatever the tree; what others take is added as they are asked.
        """
        calibration, odds, tree = self._acceptance.calibration, self._acceptance.odds, TokenTree(root)
        self.asks, self.asked_ms = 0, 0.0
        if _native.speedups is not None and not self._frontiers:
            return self._grow_in_c(tree, (times, least), room, cut, (floor, gain, ask_ms, beside_ms))
        kinds = [(odds[offset::SLOTS], odds[offset + 1 :: SLOTS]) for offset in self._offsets]
        depths, most, heap = tree.depths, len(times), list[Any]()
        offered, values, states = list[Proposed](), list[float](), [start() for start in self._roots]
        cheapest = min(least)  # a candidate that pays at no size is not even kept; one may pay once others carry a jump
        value = chance = expected = 1.0  # the chance of the node, where its parent is visited
        node, token, rest, look = 0, root, 0.0, most  # no place is left for less than rest; look: when to see anew
        best = _Best(gain * expected, times[0], beside_ms)
        while True:
            proposed: Proposed = ()
            worth = max(floor, best.speed * cheapest / calibration, rest)  # a candidate that is kept is worth more
            pays = best.speed * (least[node] + ask_ms) / calibration  # the least value of a further node
            if depths[node] < room and (not node or (value > worth and value * max(chance, _LIKELY) > max(pays, rest))):
                states = list(map(call, self._steps, states, repeat(token))) if node else states
                proposed = list(map(call, self._proposers, states))
                self.asks += 1
                best.spend(ask_ms)
                if self._frontiers:
                    rate = best.speed / calibration if node and times[-1] > times[0] else 0.0
                    level = [entry for entry in heap if depths[entry[1]] + 1 == depths[node]]
                    yield from self._expand(states, proposed, kinds, value, level, most - len(depths), rate, best)
                found = _odds(proposed, kinds)
                share = value / (1.0 + reduce(add, found.values(), 0.0))  # as in C; Python's sum rounds less since 3.12
                for place, (candidate, each) in enumerate(found.items()):
                    if each * share > worth:
                        heappush(heap, (-each * share, node, place, candidate, states))
            offered.append(proposed)
            left = most - len(depths)
            if not heap or left <= 0:
                break
            if left <= look and left <= len(heap) and not self._chain:
                heap.sort()
                del heap[left:]
                rest, look = -float(heap[-1][0]), left // 2
            loss, parent, _, token, states = heappop(heap)
            if self._chain:
                heap.clear()
            value, chance = -loss, -loss / (values[parent - 1] if parent else 1.0)
            if value * calibration <= best.speed * least[node]:
                break
            node = tree.add(parent, token)
            values.append(value)
            expected += value * calibration
            time = times[node] + (cut.cost(expected, min(1.0, value * calibration), node + 1) if cut else 0.0)
            best.compare(expected, time, node + 1)
        tree.truncate(best.count)
        self._offered = offered[: best.count]
        return tree, values[: best.count - 1]

    def _grow_in_c(
        self, tree: TokenTree, sizes: Sizes, room: int, cut: Cut | None, settings: tuple[float, float, float, float]
    ) -> tuple[TokenTree, list[float]]:
        """What :meth:`growing` does, with sources of which none is asked about many nodes at once."""
        known = self._acceptance
        states, (times, least) = tuple(start() for start in self._roots), (array("d", each) for each in sizes)
        costs = (cut.token_ms, cut.again_ms) if cut else (0.0, 0.0)
        numbers, rules = (*settings, known.calibration, MOST_ODDS, _LIKELY, *costs), (room, self._chain)
        ask, step, offsets = self._proposers, self._steps, self._offsets
        found = _native.speedups.grow(
            tree.tokens[0], states, ask, step, offsets, known.odds, times, least, numbers, rules
        )
        self.asks, tree.tokens, tree.parents, tree.depths, tree.children, values, self._offered = found
        return tree, values

    def _expand(
        self,
        states: list[Any],
        proposed: list[Any],
        kinds: Sequence[tuple[Sequence[float], Sequence[float]]],
        value: float,
        level: list[Any],
        room: int,
        rate: float,
        best: _Best,
    ) -> Growth[None]:
        """Ask batch sources about a node and the best of those that wait on its ``level``, while there is ``room``; put
        what they say of the node beside what others have ``proposed``.

        They are asked where that promises more drafted tokens, beyond those that others know, than its time is worth at
        ``rate`` tokens a millisecond; and in passing only about nodes that promise their part of it.
        """
        missed = _FOUND / (1.0 + sum(_odds(proposed, kinds).values()))
        for part, frontier in self._frontiers:
            if states[part] in frontier.made:
                continue
            price = rate * frontier.ask_ms / missed
            waiting = nsmallest(min(room, _WIDEST), (entry for entry in level if -entry[0] * _WIDEST >= price))
            asked = [states[part], *(frontier.step(above[part], token) for _, _, _, token, above in waiting)]
            if value - sum(entry[0] for entry in waiting) < price:
                frontier.made.update(dict.fromkeys(asked, ()))
            else:
                yield Ask(frontier, [state for state in dict.fromkeys(asked) if state not in frontier.made])
                self.asked_ms += frontier.ask_ms
                best.spend(frontier.ask_ms)
            proposed[part] = self._proposers[part](states[part])

    def learn(self, tree: TokenTree, path: Path, values: Sequence[float]) -> list[str]:
        """Learn from the path kept of the tree grown last, and name the source of each accepted token."""
        self.catch_up()
        offered, accepted, credited = self._offered, len(path.tokens) - 1, []
        expected, right = sum(values), 0.0
        for place, (node, token) in enumerate(zip(path.nodes, path.tokens, strict=True)):
            if node >= len(offered):
                break
            proposed = offered[node]
            self._uncounted.append((self._offsets, proposed, token))
            source = self._first(proposed, token)
            if not values:  # nothing was drafted: what could have been says how far the estimates can be believed
                expected = sum(self._acceptance.chances(_votes(self._offsets, proposed)))
                right = float(source is not None)
            elif source is not None:
                right += token in tree.children[node]
                if place < accepted:
                    credited.append(source.name)
        self._acceptance.count_tree(expected, right)
        return credited

    def sources_of(self, tree: TokenTree) -> list[str]:
        """The first source that has proposed each node of the tree grown last; empty where none has."""
        offered = [self._offered[parent] if parent < len(self._offered) else () for parent in tree.parents[1:]]
        found = map(self._first, offered, tree.tokens[1:])
        return ["", *("" if source is None else source.name for source in found)]

    def _first(self, proposed: Proposed, token: int) -> Source | None:
        """The first source that has proposed a token."""
        pairs = zip(self._used, proposed, strict=False)
        return next((source for source, candidates in pairs if any(each == token for each, _ in candidates)), None)

    def catch_up(self) -> None:
        """Learn which candidates of the last pass's nodes were right; the next tree can do without."""
        for offsets, proposed, token in self._uncounted:
            candidates = _votes(offsets, proposed)
            self._acceptance.count(candidates, [float(candidate == token) for candidate in candidates])
        self._uncounted.clear()


def _votes(offsets: Sequence[int], proposed: Proposed) -> dict[int, list[int]]:
    """Who proposes which token, from each source's candidates and first slot: token to slots."""
    votes: dict[int, list[int]] = {}
    for offset, candidates in zip(offsets, proposed, strict=False):
        for token, kind in candidates:
            slots = votes.setdefault(token, [])
            slots.append(offset + kind * SLOTS + bool(slots))
    return votes


def _stripped(ask: Callable[[Any], Sequence[Candidate]]) -> Callable[[Any], list[tuple[int, int]]]:
    """The proposals of a caller's own source without the probabilities that it may give, too."""
    return lambda state: [candidate[:2] for candidate in ask(state)]


def _odds(proposed: Proposed, kinds: Sequence[tuple[Sequence[float], Sequence[float]]]) -> dict[int, float]:
    """The odds of a node's candidates, of which :meth:`.Acceptance.chances` makes chances. ``kinds`` has the odds of
    each source's kinds: for the first source to propose a token, and for others."""
    odds: dict[int, float] = {}
    for place, candidates in enumerate(proposed):
        first, agreeing = kinds[place]
        if not odds:
            odds = {token: first[kind] for token, kind in candidates}
            continue
        for token, kind in candidates:
            known = odds.get(token)
            odds[token] = first[kind] if known is None else min(MOST_ODDS, known * agreeing[kind])
    return odds
