"""Trees of drawn candidates: where tokens are drawn, and that rejection verifies them exactly, by enumeration of every
draw."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.distributions import Chance
from helpers.drafting import Told
from torch import Tensor

from jacobi import Path, TokenTree, chances_of, reject, walk
from lookahead.draft.drawn_trees import DrawnTree, Rates, Urn
from lookahead.heads.base import fixed_tree
from lookahead.heads.eagle.strategy import FIXED
from lookahead.sources.perturbed import Draw

DRAW = Draw(lambda index: None)
LETTERS, LENGTH = "abc", 3
Table = dict[Any, Any]


def tables(seed: int) -> tuple[dict[str, Tensor], Table]:
    """What the model says after each text of a vocabulary of three letters, and what a head does."""
    rng = np.random.default_rng(seed)
    target, said = {}, {}
    for depth in range(LENGTH + 1):
        for text in map("".join, itertools.product(LETTERS, repeat=depth)):
            target[text] = torch.from_numpy(rng.normal(size=3)).softmax(-1)
            logits = 0.6 * target[text].log().numpy() + rng.normal(size=3)
            ranks = np.argsort(-logits)
            said[tuple(text)] = ("".join(LETTERS[rank] for rank in ranks), tuple(logits[ranks]))
    return target, said


def spelt(tokens: list[int]) -> str:
    return "".join(map(chr, tokens))


def place(letter: int) -> int:
    return letter - ord("a")


def numbered(tree: TokenTree) -> TokenTree:
    """The same tree with tokens 0 to 2 in place of letters."""
    made = TokenTree.from_parents([0, *map(place, tree.tokens[1:])], tree.parents)
    drawn = tree.drawn_from or {}
    made.drawn_from = {node: {place(token): chance for token, chance in drawn[node].items()} for node in drawn}
    return made


def by_rejection(tree: TokenTree, probabilities: Callable[[int], Tensor]) -> Path:
    def choose(node: int) -> int:
        chances = probabilities(node)
        return reject(chances, list(tree.children[node]), drawn_from=chances_of(tree, node, chances))

    return walk(tree, choose, lambda token: False)


def error(monkeypatch: pytest.MonkeyPatch, grow: Callable[[Table], TokenTree], seed: int) -> float:
    """How far three written tokens are from the model's distribution at most: over every tree that can be drawn, and
    every decision about it."""
    target, said = tables(seed)

    def one() -> str:
        tree = numbered(grow(said))
        text = [LETTERS[token] for token in tree.tokens]

        def probabilities(node: int) -> Tensor:
            return target["".join(text[above] for above in tree.path(node)[1:])]

        return "".join(LETTERS[token] for token in by_rejection(tree, probabilities).tokens)

    found = Chance(monkeypatch).outcomes(one)
    assert sum(found.values()) == pytest.approx(1.0)
    furthest = 0.0
    for text in map("".join, itertools.product(LETTERS, repeat=LENGTH)):
        steps = [float(target[text[:end]][place(ord(text[end]))]) for end in range(LENGTH)]
        ours = 0.0
        for written, chance in found.items():
            common = min(len(written), LENGTH)
            if written[:common] == text[:common]:
                ours += chance * float(np.prod(steps[common:]))
        furthest = max(furthest, abs(ours - float(np.prod(steps))))
    return furthest


def best_places(nodes: int) -> Callable[[Table], TokenTree]:
    return lambda said: DrawnTree(DRAW, nodes).grow(0, Told(said), room=LENGTH)


def two_and_one(said: Table) -> TokenTree:
    """Of a fixed shape: two tokens, and below the first of them one."""
    tree = fixed_tree(FIXED, 0, Told(said), room=2, draw=DRAW)
    keep = [node for node in range(len(tree)) if not node or shape_of(tree, node) in ((0,), (1,), (0, 0))]
    assert keep == sorted(keep)
    made = TokenTree(0)
    nodes = {0: 0}
    for node in keep[1:]:
        nodes[node] = made.add(nodes[tree.parents[node]], tree.tokens[node])
    made.drawn_from = {nodes[node]: (tree.drawn_from or {})[node] for node in keep if made.children[nodes[node]]}
    return made


def shape_of(tree: TokenTree, node: int) -> tuple[int, ...]:
    """The ranks of a node and of those above it, among their siblings."""
    nodes = tree.path(node)
    return tuple(list(tree.children[above].values()).index(below) for above, below in itertools.pairwise(nodes))


@pytest.mark.parametrize("seed", range(3))
def test_three_tokens_have_the_models_distribution(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for grow in (best_places(1), best_places(3), best_places(4)):
        assert error(monkeypatch, grow, seed) < 1e-12


def test_trees_of_fixed_shape_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert error(monkeypatch, two_and_one, 0) < 1e-12


def test_a_path_is_accepted_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of p(the) = 0.5 and q(the) = 0.8 comes 5/8; the token behind it, likelier to the model than to q, is taken."""
    tree = TokenTree.chain(9, [0, 1])
    tree.drawn_from = {0: {0: 0.8, 2: 0.2}, 1: {1: 0.5, 2: 0.5}}
    target = [torch.tensor(line).double() for line in ([0.5, 0.3, 0.2], [0.05, 0.9, 0.05], [0.0, 0.0, 1.0])]
    accepted = Chance(monkeypatch).outcomes(lambda: len(by_rejection(tree, target.__getitem__).tokens) - 1)
    assert accepted == pytest.approx({0: 3 / 8, 2: 5 / 8})


def log(*chances: float) -> tuple[float, ...]:
    return tuple(float(np.log(chance)) for chance in chances)


SAID = {(): ("cdx", log(0.6, 0.36, 0.04)), ("c",): ("st", log(0.5, 0.5)), ("c", "s"): ("u", (0.0,))}


def test_places_are_drawn_for_in_the_order_of_their_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the docstring: with 0.7 and 0.4, cat, sat, below that one more, and then beside cat."""
    passes = Told(SAID)
    monkeypatch.setattr(torch, "multinomial", lambda weights, count: weights.argmax()[None])
    monkeypatch.setattr(Rates, "rate", lambda self, place, chance=None: 0.4 if place else 0.7)
    drawn = DrawnTree(DRAW, 4)
    tree = drawn.grow(0, passes, room=9)
    assert (spelt(tree.tokens[1:]), tree.parents) == ("csud", [-1, 0, 1, 2, 0])
    assert passes.asked == [[""], ["c"], ["cs"], ["csu"]]
    assert tree.drawn_from is not None
    assert {node: len(chances) for node, chances in tree.drawn_from.items()} == {0: 3, 1: 2, 2: 1}
    assert spelt(drawn.grow(0, passes, room=2).tokens[1:]) == "csdt"
    assert spelt(drawn.grow(0, passes, room=9, chain=True).tokens[1:]) == "csu"
    assert len(drawn.grow(0, passes, room=0)) == 1
    assert len(drawn.grow(0, Told({}), room=3)) == 1


def test_rates_are_learnt_from_what_was_accepted() -> None:
    """Of the root's children the second, of 0.36 / 0.4, is accepted 20 times; nothing stands below it."""
    tree = TokenTree.from_paths(0, [[1], [2], [3]])
    tree.drawn_from = {0: {1: 0.6, 2: 0.36, 3: 0.04}}
    rates = Rates()
    before = rates.rate(0, 0.6), rates.rate(1, 0.9), rates.rate(2, 0.9)
    for _ in range(20):
        rates.learn(tree, Path([0, 2], [2, 9]))
    assert rates.rate(0, 0.6) == pytest.approx(before[0] * 4 / 24)
    assert rates.rate(1, 0.9) == pytest.approx((before[1] * 4 + 20) / 24)
    assert rates.rate(1, 0.5) == before[1], "of another chance"
    assert rates.rate(2, 0.9) == before[2], "never tried"
    assert rates.rate(0) < before[0]
    assert rates.rate(1) > before[1]


def test_processors_rule_what_can_be_drawn() -> None:
    urn = Urn((np.array([4, 7, 9]), np.array([2.0, 1.0, 0.0])), Draw(lambda index: None, temperature=0.5, top_k=2))
    assert urn.chances == pytest.approx({4: 1 / (1 + np.exp(-2.0)), 7: 1 / (1 + np.exp(2.0))})
    taken = [urn.take(), urn.take(), urn.take()]
    assert {each[0] for each in taken if each} == {4, 7}
    assert taken[1] is not None
    assert taken[1][1] == 1.0
    assert taken[2] is None
