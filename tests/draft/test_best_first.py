"""Learnt acceptance and trees of the best size, against brute force over all trees and all sizes."""

import copy
import math
from collections.abc import Sequence
from itertools import combinations
from typing import Any
from unittest import mock

import pytest
from helpers.drafting import SLOTS, TableSource
from helpers.toy import examples, seeded
from hypothesis import given
from hypothesis import strategies as st

from jacobi import Path, TokenTree
from lookahead.draft import best_first
from lookahead.draft.acceptance import Acceptance
from lookahead.draft.best_first import BestFirstTree
from lookahead.draft.pass_costs import least_slopes

Table = dict[tuple[int, ...], list[tuple[int, int]]]  # by path: candidates, each a token and its kind
Draft = tuple[Table, list[float]]  # with the rates of the kinds


def with_rates(sources: Sequence[Any], rates: Sequence[float]) -> Acceptance:
    """Known chances of lone candidates, one for each kind of all sources in order, agreeing or not."""
    acceptance = Acceptance(sources)
    acceptance.weights = [logit(rate) for rate in rates for _ in range(SLOTS)]
    return acceptance


def logit(rate: float) -> float:
    return math.log(rate / (1 - rate))


def flat(count: int) -> tuple[list[float], list[float]]:
    return [1.0] * count, [0.0] * count


@st.composite
def drafts(draw: st.DrawFn, most: int = 9) -> Draft:
    """A random tree of candidates, each with a kind of its own, and the kinds' rates."""
    table: Table = {}
    paths: list[tuple[int, ...]] = [()]
    for kind in range(draw(st.integers(1, most))):
        above = paths[draw(st.integers(0, len(paths) - 1))]
        siblings = table.setdefault(above, [])
        siblings.append((len(siblings), kind))
        paths.append((*above, len(siblings) - 1))
    rates = draw(st.lists(st.integers(1, 19), min_size=len(paths) - 1, max_size=len(paths) - 1))
    return table, [rate / 20 for rate in rates]


def chances(table: Table, rates: Sequence[float]) -> dict[tuple[int, ...], float]:
    """The chance of each path to be visited, as its share of the odds among its rivals at every step."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    waiting: list[tuple[int, ...]] = [()]
    while waiting:
        path = waiting.pop()
        siblings = table.get(path, [])
        every = 1.0 + sum(rates[kind] / (1 - rates[kind]) for _, kind in siblings)
        for token, kind in siblings:
            found[(*path, token)] = found[path] * rates[kind] / (1 - rates[kind]) / every
            waiting.append((*path, token))
    del found[()]
    return found


def grow(
    table: Table,
    rates: Sequence[float],
    times: Sequence[float],
    least: Sequence[float],
    room: int = 99,
    floor: float = 0.0,
    *,
    chain: bool = False,
    likely: float = 1.0,
) -> tuple[TokenTree, list[float]]:
    """A tree for which every node is asked that could still have a child in it, or only one with a ``likely`` child."""
    sources = [TableSource("one", table, [0.5] * len(rates))]
    with mock.patch.object(best_first, "_LIKELY", likely):
        return BestFirstTree(sources, with_rates(sources, rates), chain).grow(7, room, times, least, floor)


def paths_of(tree: TokenTree) -> list[tuple[int, ...]]:
    return [tuple(tree.tokens[above] for above in tree.path(node)[1:]) for node in range(1, len(tree))]


@examples(150)
@given(drafts(), st.integers(0, 9), st.integers(0, 5))
def test_no_other_tree_of_the_size_is_expected_to_be_accepted_further(draft: Draft, nodes: int, room: int) -> None:
    """Against all subtrees of the candidates."""
    known = {path: chance for path, chance in chances(*draft).items() if len(path) <= room}
    tree, values = grow(*draft, *flat(1 + nodes), room=room)
    grown = paths_of(tree)
    size = min(nodes, len(known))
    assert len(grown) == size
    assert values == pytest.approx([known[path] for path in grown])
    best = max(
        sum(known[path] for path in chosen)
        for chosen in combinations(known, size)
        if all(path[:-1] in chosen or len(path) == 1 for path in chosen)
    )
    assert sum(values) == pytest.approx(best)


@examples(150)
@given(drafts(20), st.integers(1, 20), st.sampled_from([0.5, 0.8]))
def test_what_is_not_asked_for_is_hardly_worth_more_than_what_is_taken(draft: Draft, nodes: int, likely: float) -> None:
    """Nodes with little value are not asked, so the tree is nearly the best one, and as large."""
    known = chances(*draft)
    tree, values = grow(*draft, *flat(1 + nodes), likely=likely)
    grown = paths_of(tree)
    assert len(grown) == min(nodes, len(known))
    assert values == pytest.approx([known[path] for path in grown])
    assert all(chance * likely <= min(values) + 1e-9 for path, chance in known.items() if path not in grown)


@examples(100)
@given(drafts(20), st.integers(0, 6))
def test_values_fall_and_a_larger_tree_holds_the_smaller(draft: Draft, room: int) -> None:
    before: list[tuple[int, ...]] = []
    for nodes in range(22):
        tree, values = grow(*draft, *flat(1 + nodes), room=room)
        assert values == sorted(values, reverse=True)
        grown = paths_of(tree)
        assert grown[: len(before)] == before
        assert all(len(path) <= room for path in grown)
        assert len(values) == len(tree) - 1 <= nodes
        before = grown


@examples(60)
@given(drafts(20), st.integers(0, 9), st.integers(0, 5))
def test_a_chain_follows_the_likeliest_candidate(draft: Draft, nodes: int, room: int) -> None:
    known = chances(*draft)
    tree, values = grow(*draft, *flat(1 + nodes), room=room, chain=True)
    assert tree.parents == list(range(-1, len(tree) - 1))
    assert len(values) == len(tree) - 1 <= min(nodes, room)
    below: tuple[int, ...] = ()
    for path in paths_of(tree):
        assert path[:-1] == below
        below = path
        rivals = [known[other] for other in known if other[:-1] == path[:-1]]
        assert known[path] == max(rivals)
    assert len(tree) - 1 in (nodes, room) or not [other for other in known if other[:-1] == below]


@examples(60)
@given(drafts(20), st.floats(0.0, 1.0))
def test_floor_leaves_out_the_worthless(draft: Draft, floor: float) -> None:
    tree, values = grow(*draft, *flat(30), floor=floor)
    assert sorted(paths_of(tree)) == sorted(path for path, chance in chances(*draft).items() if chance > floor)
    assert all(value > floor for value in values)


def best_rate(known: dict[tuple[int, ...], float], times: Sequence[float], calibration: float = 1.0) -> float:
    """Most expected tokens per time over all sizes; candidates in the order of their chances."""
    ordered = sorted(known.values(), reverse=True)[: len(times) - 1]
    return max((1.0 + calibration * sum(ordered[:size])) / times[size] for size in range(len(ordered) + 1))


CONVEX = st.lists(st.floats(0.0, 0.5), min_size=1, max_size=12).map(
    lambda steps: [1.0 + sum(sorted(steps)[:count]) for count in range(len(steps) + 1)]
)
ANY = st.lists(st.floats(0.5, 3.0), min_size=1, max_size=13)
STEPS = st.lists(st.sampled_from([0.0, 0.05, 0.1, 0.4, 0.8]), min_size=1, max_size=12).map(
    lambda steps: [1.0 + sum(steps[:count]) for count in range(len(steps) + 1)]
)


@examples(900)
@given(drafts(12), CONVEX | ANY | STEPS, st.floats(0.2, 2.0))
def test_the_size_that_pays_best(draft: Draft, curve: list[float], trust: float) -> None:
    """On convex curves, on those with steps, and on those that jump and fall too."""
    table, rates = draft
    sources = [TableSource("one", table, [0.5] * len(rates))]
    acceptance = with_rates(sources, rates).copy(trust)
    with mock.patch.object(best_first, "_LIKELY", 1.0):
        tree, values = BestFirstTree(sources, acceptance).grow(7, 99, curve, least_slopes(curve))
    assert len(tree) <= len(curve)
    assert len(values) == len(tree) - 1
    reached = (1.0 + trust * sum(values)) / curve[len(tree) - 1]
    assert reached == pytest.approx(best_rate(chances(table, rates), curve, trust))


@pytest.mark.parametrize(("ask_ms", "asked"), [(0.0, [(), (1,), (1, 2)]), (0.05, [(), (1,)]), (0.5, [()])])
def test_a_node_is_asked_for_candidates_if_one_as_likely_as_itself_would_pay(
    ask_ms: float, asked: list[tuple[int, ...]]
) -> None:
    """Each node of a branch has a candidate of chance 0.6, so that they are worth 0.6, 0.36, 0.216 and 0.13. A pass
    writes up to 1.7 tokens a millisecond, and a further node takes 0.1: it pays from 0.17 on, more if it is to be asked
    for."""
    source = TableSource("one", {(): [(1, 0)], (1,): [(2, 0)], (1, 2): [(3, 0)], (1, 2, 3): [(4, 0)]})
    curve = [1.0 + 0.1 * nodes for nodes in range(8)]
    trees = BestFirstTree([source], with_rates([source], [0.6]))
    tree, _ = trees.grow(7, 99, curve, least_slopes(curve), ask_ms=ask_ms)
    assert source.asked == asked
    assert trees.asks == len(asked)
    assert len(tree) <= 1 + len(asked)


@examples(200)
@given(st.lists(st.floats(0.1, 5.0), min_size=1, max_size=20))
def test_least_slopes(curve: list[float]) -> None:
    slopes = least_slopes(curve)
    assert slopes[-1] == float("inf")
    for size in range(len(curve) - 1):
        expected = min((curve[later] - curve[size]) / (later - size) for later in range(size + 1, len(curve)))
        assert slopes[size] == pytest.approx(expected, abs=1e-9)


def test_agreement_is_one_candidate_credited_to_the_first() -> None:
    """A token that several sources have is one node, with a vote of each."""
    one = TableSource("one", {(): [(1, 0), (2, 0)]})
    two = TableSource("two", {(): [(2, 0), (3, 0)]})
    three = TableSource("three", {(): [(2, 0), (3, 0)]})
    sources = [one, two, three]
    acceptance = Acceptance(sources)
    trees = BestFirstTree(sources, acceptance)
    tree, values = trees.grow(7, 1, *flat(9))
    assert sorted(tree.tokens[1:]) == [1, 2, 3]
    expected = acceptance.chances({1: [0], 2: [0, SLOTS + 1, 2 * SLOTS + 1], 3: [SLOTS, 2 * SLOTS + 1]})
    assert [tree.tokens[1:][values.index(value)] for value in sorted(values)] == [1, 3, 2]
    assert sorted(values) == pytest.approx(sorted(expected))
    assert trees.learn(tree, Path([0, tree.children[0][2]], [2, 9]), values) == ["one"]


def test_only_used_sources_are_asked() -> None:
    one, two = TableSource("one", {(): [(1, 0)]}), TableSource("two", {(): [(2, 0)], (2,): [(3, 0)]})
    sources = [one, two]
    trees = BestFirstTree(sources, Acceptance(sources))
    trees.use([two])
    tree, values = trees.grow(7, 9, *flat(9))
    assert tree.tokens == [7, 2, 3]
    assert not one.asked
    assert trees.learn(tree, Path([0, 1, 2], [2, 3, 4]), values) == ["two", "two"]


class Counted(Acceptance):
    """Remembers what it was told."""

    def __init__(self, sources: Sequence[Any]) -> None:
        super().__init__(sources)
        self.nodes: list[tuple[dict[int, list[int]], int | None]] = []  # candidates, and which of them was right
        self.trees: list[tuple[float, float]] = []

    def count(self, offered: Any, truth: Sequence[float]) -> None:
        right = next((token for token, share in zip(offered, truth, strict=True) if share), None)
        self.nodes.append((dict(offered), right))
        super().count(offered, truth)

    def count_tree(self, expected: float, accepted: float) -> None:
        self.trees.append((expected, accepted))
        super().count_tree(expected, accepted)


BRANCHES = {(): [(1, 0), (2, 1), (3, 2)], (2,): [(4, 0), (5, 1)], (2, 5): [(6, 3)]}


def counted() -> tuple[BestFirstTree, Counted]:
    sources = [TableSource("one", BRANCHES, [0.5, 0.4, 0.3, 0.2])]
    acceptance = Counted(sources)
    return BestFirstTree(sources, acceptance), acceptance


def slots(*candidates: tuple[int, int]) -> dict[int, list[int]]:
    """Candidates of a single source, as they are counted."""
    return {token: [kind * SLOTS] for token, kind in candidates}


def test_a_carried_token_that_was_offered_is_right_but_not_credited() -> None:
    """A tree cut short: the text goes on with a candidate that found no room in it."""
    trees, acceptance = counted()
    tree, values = trees.grow(7, 9, *flat(2))
    assert tree.tokens == [7, 1]
    assert trees.learn(tree, Path([0], [3]), values) == []
    trees.catch_up()
    assert acceptance.nodes == [(slots((1, 0), (2, 1), (3, 2)), 3)]
    assert acceptance.trees == [(pytest.approx(sum(values)), 0)]


def test_nothing_drafted_still_tells_how_far_estimates_hold() -> None:
    trees, acceptance = counted()
    tree, values = trees.grow(7, 9, [1.0], [float("inf")])
    assert len(tree) == 1
    odds = 0.5 / 0.5 + 0.4 / 0.6 + 0.3 / 0.7
    right = odds / (1 + odds)
    assert trees.learn(tree, Path([0], [2]), values) == []
    assert acceptance.trees == [(pytest.approx(right), 1)]
    trees, acceptance = counted()
    trees.grow(7, 9, [1.0], [float("inf")])
    trees.learn(tree, Path([0], [9]), [])
    assert acceptance.trees == [(pytest.approx(right), 0)]


def test_no_candidates_teach_nothing() -> None:
    sources = [TableSource("one", {})]
    acceptance = Counted(sources)
    trees = BestFirstTree(sources, acceptance)
    tree, values = trees.grow(7, 9, *flat(5))
    weights, calibration = list(acceptance.weights), acceptance.calibration
    assert trees.learn(tree, Path([0], [3]), values) == []
    assert acceptance.weights == weights
    assert acceptance.calibration == calibration


def test_nodes_of_others_are_not_taken_for_its_own() -> None:
    """A tree cut back to the size that pays, to which a window then adds: its nodes have no candidates here."""
    sources = [TableSource("one", {(): [(1, 0)], (1,): [(2, 1)]}, [0.6, 0.05])]
    acceptance = Counted(sources)
    trees = BestFirstTree(sources, acceptance)
    curve = [1.0, 1.7, 1.8]
    tree, values = trees.grow(7, 9, curve, least_slopes(curve))
    assert tree.tokens == [7], "a node was tried, and did not pay"
    other = tree.add(0, 8)
    assert trees.learn(tree, Path([0, other], [8, 2]), values) == []
    trees.catch_up()
    assert acceptance.nodes == [(slots((1, 0)), None)]


@examples(60)
@given(drafts(15), st.integers(0, 15), st.integers(0, 10**6))
def test_learning_a_random_walk(draft: Draft, nodes: int, seed: int) -> None:
    """One credit for each accepted token; every visited node is counted with all its candidates, and no other."""
    table, rates = draft
    sources = [TableSource("one", table, [0.5] * len(rates))]
    acceptance = Counted(sources)
    trees, rng = BestFirstTree(sources, acceptance), seeded(seed)
    tree, values = trees.grow(7, 99, *flat(1 + nodes))
    node, path, expected = 0, Path(), []
    while True:
        path.nodes.append(node)
        above = tuple(tree.tokens[at] for at in tree.path(node)[1:])
        token = rng.choice([*tree.children[node], 99, *(token for token, _ in table.get(above, []))])
        path.tokens.append(token)
        offered = slots(*table.get(above, []))
        expected.append((offered, token if token in offered else None))
        if token not in tree.children[node]:
            break
        node = tree.children[node][token]
    before = copy.deepcopy(tree.tokens)
    assert trees.learn(tree, path, values) == ["one"] * (len(path.tokens) - 1)
    assert tree.tokens == before
    trees.catch_up()
    # Where no child could find a place any more, nobody was asked for candidates.
    assert acceptance.nodes[:-1] == expected[:-1]
    assert acceptance.nodes[-1] in (expected[-1], ({}, None))
    assert not values or acceptance.trees == [(pytest.approx(sum(values)), len(path.tokens) - 1)]
