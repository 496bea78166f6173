"""ReDrafter's beams, against examples worked out by hand and against a search over all branches."""

import itertools
from typing import Any

import numpy as np
from helpers.drafting import Told

from lookahead.heads.redrafter.strategy import CANDIDATES, beam_search


def drawn(tree: Any) -> list[str]:
    """The tree's leaves, spelt."""
    leaves = [node for node, below in enumerate(tree.children) if not below]
    return sorted("".join(chr(tree.tokens[node]) for node in tree.path(leaf)[1:]) for leaf in leaves)


def log(*chances: float) -> tuple[float, ...]:
    return tuple(float(np.log(chance)) for chance in chances)


SAID = {
    (): ("ax", log(0.9, 0.1)),
    ("a",): ("be", log(0.6, 0.4)),
    ("x",): ("y", log(1.0)),
    ("a", "b"): ("cd", log(0.7, 0.3)),
    ("a", "e"): ("fg", log(0.8, 0.2)),
    ("x", "y"): ("z", log(1.0)),
}


def test_what_beams_begin_with_is_merged() -> None:
    """After one token a 0.9, x 0.1; after two ab 0.54, ae 0.36, xy 0.1; then abc 0.378, aef 0.288, abd 0.162."""
    passes = Told(SAID)
    tree = beam_search(0, passes, room=9, width=3, length=4)
    assert drawn(tree) == ["abc", "abd", "aef"]
    assert len(tree) == 1 + 6, "nine tokens of three beams are six nodes"
    assert passes.asked == [[""], ["a", "x"], ["ab", "ae", "xy"]], "the first step starts from one beam"


def test_scores_are_of_likely_tokens_alone() -> None:
    """Logits count from the best one, and the first fifty are all there are: two alike have one half each."""
    few = {(): ("ab", (7.0, 7.0)), ("a",): ("c", (-3.0,)), ("b",): ("de", (9.0, 9.0))}
    assert drawn(beam_search(0, Told(few), room=9, width=1, length=3)) == ["ac"]
    many = "".join(chr(300 + place) for place in range(60))
    tree = beam_search(0, Told({(): (many, (0.0,) * 60)}), room=9, width=60, length=2)
    assert len(tree) == 1 + CANDIDATES


def test_a_tree_is_as_deep_as_there_is_room() -> None:
    assert drawn(beam_search(0, Told(SAID), room=1, width=3, length=4)) == ["a", "x"]
    assert len(beam_search(0, Told(SAID), room=0, width=10, length=5)) == 1
    assert len(beam_search(0, Told({}), room=5, width=10, length=5)) == 1
    assert drawn(beam_search(0, Told(SAID), room=9, chain=True, width=3, length=4)) == ["abc"]


def test_wide_beams_find_the_likeliest_of_all_branches() -> None:
    rng = np.random.default_rng(0)
    table: dict[Any, Any] = {}
    for depth in range(3):
        for branch in itertools.product("abcd", repeat=depth):
            logits = np.sort(rng.normal(size=4))[::-1]
            table[branch] = ("".join(rng.permutation(list("abcd"))), tuple(logits - np.log(np.exp(logits).sum())))
    sums = {
        word: sum(dict(zip(*table[tuple(word[:end])], strict=True))[word[end]] for end in range(3))
        for word in map("".join, itertools.product("abcd", repeat=3))
    }
    best = sorted(sums, key=lambda word: -sums[word])[:16]
    assert drawn(beam_search(0, Told(table), room=9, width=16, length=4)) == sorted(best)
