"""Medusa's heads read hidden states of passes with static shapes."""

import pytest
from helpers.graphs import StandIn, waiting
from helpers.medusa import SMALL, counting
from helpers.models import VOCAB, prompts, run, same_as_plain

from lookahead import Lookahead
from lookahead.medusa import Medusa
from lookahead.runtime.tree import TreeModel

pytestmark = pytest.mark.usefixtures("augmented")
SAMPLED = [{}, {"do_sample": True}, {"do_sample": True, "temperature": 0.5, "top_k": 8}]


@pytest.mark.parametrize("batch", [1, 3])
def test_static_shapes(batch: int, made: list[TreeModel]) -> None:
    """Hidden states are cut to the nodes of the tree, whatever the bucket; buffers wait for the next call."""
    model, heads = counting(3)
    strategy = Medusa(heads, SMALL, static=True)
    for settings in SAMPLED:
        output = same_as_plain(model, prompts(batch), strategy, max_new_tokens=25, **settings)
        assert made[-1].route == "static"
        dynamic = same_as_plain(
            model, prompts(batch), Medusa(heads, SMALL, static=False), max_new_tokens=25, **settings
        )
        assert output.stats.histogram == dynamic.stats.histogram
    assert len(waiting(model)) == 1


def test_graphs_keep_hidden_states(monkeypatch: pytest.MonkeyPatch, made: list[TreeModel]) -> None:
    """A replay overwrites what its capture returned, logits and hidden states alike; the next tree is made of those."""
    model, heads = counting(3)
    monkeypatch.setattr(StandIn, "shape", (1, 8, VOCAB))
    monkeypatch.setattr(StandIn, "hidden", VOCAB)
    strategy = Medusa(heads, [[0, 0, 0], [1], [2], [0, 1], [0, 0, 1]], static=True)  # a bucket of 8
    stand_in = StandIn(monkeypatch)
    output = same_as_plain(model, prompts(1), strategy, max_new_tokens=61)
    assert output.stats.steps == 16
    assert made[-1].route == "cuda graphs"
    assert stand_in.captured == 1
    assert stand_in.replayed > 10


def test_graphs_outlive_other_strategies(monkeypatch: pytest.MonkeyPatch, made: list[TreeModel]) -> None:
    """The hook does not make another model of it: both kinds of graphs wait side by side."""
    model, heads = counting(3)
    for _ in range(2):
        run(model, prompts(1), lookahead_strategy=Medusa(heads, SMALL, static=True), max_new_tokens=9)
        run(model, prompts(1), lookahead_strategy=Lookahead(window_size=3, static=True), max_new_tokens=9)
    assert len(waiting(model)) == 2
