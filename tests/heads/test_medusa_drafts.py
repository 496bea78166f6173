"""What Medusa's heads are worth, alone and beside other sources."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from helpers.automatic import STEEP, memory_of
from helpers.medusa import COMBINED, counting, fitted, random_heads
from helpers.models import VOCAB, fresh_model, prompts, run, same_as_plain, tiny_model

from lookahead import Lookahead
from lookahead.medusa import Medusa, choices_from

pytestmark = pytest.mark.usefixtures("augmented")


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("num_heads", [1, 3, 5])
def test_right_heads(num_heads: int, batch: int) -> None:
    """Every pass writes the whole depth of the tree and the carried token."""
    model, heads = counting(num_heads)
    strategy = Medusa(heads, [[0] * num_heads], stats="detailed")
    output = same_as_plain(model, prompts(batch), strategy, max_new_tokens=1 + 4 * (num_heads + 1))
    assert [record["tokens"] for record in output.stats.passes[1:]] == [[num_heads + 1] * batch] * 4
    assert output.stats.accepted == output.stats.drafted == 4 * num_heads * batch


def test_fitted_heads_are_worth_more_than_wrong_ones() -> None:
    model = tiny_model("gpt2")
    lengths = [
        same_as_plain(model, prompts(3), Medusa(heads), max_new_tokens=40).stats.mean_acceptance_length
        for heads in (random_heads(model), fitted(model))
    ]
    assert lengths[1] > lengths[0] + 0.5


def test_the_tree_has_the_published_shape() -> None:
    """63 nodes as long as there is room, cut by depth towards the end; a path is never deeper than what may follow."""
    model, heads = counting(4)
    sizes = [len([path for path in choices_from("mc_sim_7b_63").paths if len(path) <= depth]) for depth in range(5)]
    strategy = Medusa(heads, stats="detailed")
    output = same_as_plain(model, prompts(1), strategy, max_new_tokens=13)
    nodes = [record["nodes"][0] - 1 for record in output.stats.passes]
    written = [record["tokens"][0] for record in output.stats.passes]
    left = [13 - sum(written[:index]) - 1 for index in range(len(written))]
    assert nodes[1:] == [sizes[min(4, room)] for room in left[1:]]


def test_heads_run_once_a_pass_on_accepted_nodes_only(passes: Callable[[Any], list[int]]) -> None:
    """All rows together, and not for passes after which nothing is drafted."""
    model, heads = counting(3)
    shapes: list[tuple[int, ...]] = []
    heads.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
    same_as_plain(model, prompts(3), Medusa(heads), max_new_tokens=21)
    assert shapes == [(3, VOCAB)] * 5
    seen = passes(model)
    shapes.clear()
    run(model, prompts(3), lookahead_strategy=Medusa(heads), max_new_tokens=1)
    assert (seen, shapes) == ([12], [])


def test_heads_count_as_drafting() -> None:
    """A head that takes its time shows in the time of drafts, so that sizes are chosen with it."""
    model, heads = counting(3)
    heads.register_forward_hook(lambda *_: time.sleep(0.005))
    output = same_as_plain(model, prompts(1), Medusa(heads), max_new_tokens=21)
    assert output.stats.draft_ms >= 5.0 * (output.stats.steps - 1)


@pytest.mark.parametrize("batch", [1, 3])
def test_heads_get_the_credit(batch: int) -> None:
    """They are right from the first token on, where other sources know nothing yet; those go on where heads end."""
    model, heads = counting(3)
    alone = Medusa(heads, sources=("heads",), nodes=8, seed=0)
    stats = same_as_plain(model, prompts(batch), alone, max_new_tokens=33).stats
    assert stats.sources == {"heads": stats.accepted}
    strategy = Medusa(heads, sources=COMBINED, nodes=8, seed=0)
    stats = same_as_plain(model, prompts(batch), strategy, max_new_tokens=33).stats
    assert sum(stats.sources.values()) == stats.accepted
    assert stats.sources["heads"] > 0.4 * stats.accepted
    assert stats.mean_acceptance_length > 4
    assert "heads" in stats.explain()
    free = same_as_plain(model, prompts(batch), Lookahead(nodes=8, seed=0), max_new_tokens=33).stats
    assert free.mean_acceptance_length < stats.mean_acceptance_length


def test_what_heads_and_others_know_adds_up() -> None:
    """A text of which the heads know one half, and its own past the other: both are credited."""
    model, heads = counting(2, period=9)
    strategy = Medusa(heads, sources=("heads", "suffix"), nodes=16, seed=0)
    stats = same_as_plain(model, prompts(1), strategy, max_new_tokens=60).stats
    assert set(stats.sources) == {"heads", "suffix"}
    alone = same_as_plain(model, prompts(1), Medusa(heads, [[0, 0]]), max_new_tokens=60).stats
    assert stats.mean_acceptance_length > alone.mean_acceptance_length


def test_heads_rest_while_nothing_pays() -> None:
    """In a batch too: passes that draft nothing run no heads, and later ones go on from the right place."""
    for batch in (1, 3):
        model = tiny_model("llama")
        heads = random_heads(model)
        runs: list[int] = []
        heads.register_forward_pre_hook(lambda *_, runs=runs: runs.append(1))
        strategy = Medusa(heads, sources=("heads", "suffix"), tuning=STEEP, seed=0)
        stats = same_as_plain(model, prompts(batch), strategy, max_new_tokens=120).stats
        assert len(runs) < stats.steps / 2


def test_the_time_of_heads_is_no_part_of_the_curve() -> None:
    """They run in passes of any size, and plain lookahead reads the same curve."""
    model = fresh_model("llama")
    heads = random_heads(model)
    run(model, prompts(1), lookahead_strategy=Lookahead(), max_new_tokens=20)
    run(model, prompts(1), lookahead_strategy=Medusa(heads, sources=COMBINED), max_new_tokens=20)
    memory = memory_of(model)
    assert len(memory.times) == 1
    (expensive,) = memory.expensive.values()
    assert expensive.time.ms > 0.0
