"""EAGLE's published trees, against the examples worked out by hand."""

from typing import Any

import pytest
from helpers.drafting import Told
from helpers.eagle import random_network
from helpers.models import fresh_model, prompts, same_as_plain

from jacobi import LookaheadError
from lookahead.eagle import Eagle, EagleHead
from lookahead.heads.base import fixed_tree
from lookahead.heads.eagle.strategy import FIXED, ranked_again

SAID = {
    (): ("AB", (-0.2, -1.7)),
    ("A",): ("CD", (-0.5, -1.0)),
    ("B",): ("EF", (-0.1, -2.5)),
    ("A", "C"): ("GH", (-0.3, -1.4)),
    ("A", "D"): ("IJ", (-0.2, -1.9)),
}
SIZES = {"top_k": 2, "depth": 2, "total_tokens": 6}


def test_the_example_worked_out_by_hand() -> None:
    passes = Told(SAID)
    tree = ranked_again(0, passes, room=9, **SIZES)
    assert "".join(map(chr, tree.tokens[1:])) == "ACDGI"
    assert tree.parents[1:] == [0, 1, 1, 2, 3]
    assert tree.depths[1:] == [1, 2, 2, 3, 3]
    assert passes.asked == [[""], ["A", "B"], ["AC", "AD"]]


def test_a_tree_is_as_deep_as_there_is_room() -> None:
    tree = ranked_again(0, Told(SAID), room=1, **SIZES)
    assert tree.depths == [0, 1, 1]
    assert len(ranked_again(0, Told({}), room=5, **SIZES)) == 1
    chain = ranked_again(0, Told(SAID), room=9, chain=True, **SIZES)
    assert "".join(map(chr, chain.tokens[1:])) == "ACG"


def test_of_equals_the_one_made_first_is_kept() -> None:
    """A child that is certain is worth as much as its parent, which has to be in the tree with it."""
    said = {(): ("AB", (-1.0, -1.0)), ("A",): ("C", (0.0,)), ("B",): ("D", (0.0,))}
    tree = ranked_again(0, Told(said), room=9, top_k=2, depth=1, total_tokens=4)
    assert "".join(map(chr, tree.tokens[1:])) == "ABC"


def test_the_fixed_tree() -> None:
    assert len(FIXED) == 25
    assert {ranks[:-1] for ranks in FIXED if len(ranks) > 1} <= set(FIXED)
    tree = fixed_tree(FIXED, 0, Told(SAID), room=2)
    assert "".join(map(chr, tree.tokens[1:])) == "ABCDEF"
    assert tree.parents[1:] == [0, 0, 1, 1, 2, 2]
    chain = fixed_tree(FIXED, 0, Told(SAID), room=9, chain=True)
    assert "".join(map(chr, chain.tokens[1:])) == "ACG"


@pytest.mark.usefixtures("augmented")
@pytest.mark.parametrize("tree", ["eagle-1", "eagle-2"])
def test_texts_do_not_change(tree: Any) -> None:
    model = fresh_model("llama", num_hidden_layers=5)
    for version in (1, 3):
        head = EagleHead(random_network(version, feature_layers=(2, 3, 4) if version == 3 else ()))
        strategy = Eagle(head, tree=tree, top_k=3, depth=2, total_tokens=12)
        for batch, sample in ((1, version == 3), (3, version == 1)):
            output = same_as_plain(model, prompts(batch), strategy, max_new_tokens=20, do_sample=sample)
            assert output.stats.drafted > 20


def test_settings() -> None:
    head = EagleHead(random_network(1))
    for settings, match in (
        ({"tree": "eagle-4"}, "tree=.* must be one of 'eagle-1', 'eagle-2'"),
        ({"tree": "eagle-2", "nodes": 4}, "nodes=.* belongs to the automatic mode: got tree='eagle-2'"),
        ({"top_k": 0}, "top_k=.* must be at least 1"),
        ({"total_tokens": 1}, "total_tokens=.* must be at least 2"),
    ):
        with pytest.raises(LookaheadError, match=match):
            Eagle(head, **settings)  # type: ignore[arg-type]
