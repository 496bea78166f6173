"""The automatic mode, whole: plain decoding's text whatever is drafted, and passes as large as pays."""

import copy
import gc
import itertools
import json
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path as FilePath
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.models import VOCAB, counting_model, fresh_model, prompts, run, same_as_plain, tiny_model
from helpers.toy import examples
from hypothesis import given
from hypothesis import strategies as st
from transformers import GenerationConfig

from jacobi import LookaheadError, Path, Successors, TokenTree
from lookahead import DecodingStats, Lookahead, LookaheadOutput
from lookahead.draft import memory
from lookahead.draft.best_first import Acceptance
from lookahead.draft.latency import NODES, StepTimes
from lookahead.draft.planner import Planner
from lookahead.sources import SuffixSource
from lookahead.strategies.base import RowContext
from lookahead.strategies.lookahead import strategy_from
from lookahead.tuning import describe

pytestmark = pytest.mark.usefixtures("augmented")

NAMES = ("recycling", "suffix", "pool", "window")
EACH = [(name,) for name in NAMES]


def curve(slope: float, first: float = 1.0, step: float = 0.0) -> StepTimes:
    """A straight curve, well known; more than one node may cost a step more."""
    times = StepTimes()
    for nodes in NODES:
        for _ in range(3):
            times.add(nodes, 64, first + slope * (nodes - 1) + step * (nodes > 1))
    return times


FLAT = curve(0.0)
STEEP = curve(3.0)
USUAL = curve(0.03)


class Oracle:
    """A source of the user's own: knows the text of ``counting_model``, and says that it is nearly sure."""

    name = "oracle"
    priors = (0.9,)

    def __init__(self, row: RowContext) -> None:
        self.row = row
        self.last = 0
        self.passes = 0

    def start(self, prompt: Sequence[int], successors: Successors | None) -> None:
        assert list(prompt) == list(self.row.prompt)
        self.last = prompt[-1]

    def root(self) -> int:
        return self.last

    def step(self, state: int, token: int) -> int:
        return token

    def propose(self, state: int) -> list[tuple[int, int]]:
        return [(state % 7 + 1, 0)]

    def learn(self, tree: TokenTree, path: Path, successors: Successors | None) -> None:
        self.passes += 1
        self.last = path.tokens[-1]


def nodes_of(stats: DecodingStats) -> list[list[int]]:
    """Drafted nodes of each pass after the prompt's, by row."""
    return [[nodes - 1 for nodes in record["nodes"]] for record in stats.passes[1:]]


def drafted(model: Any, strategy: Lookahead, batch: int = 1, **settings: Any) -> DecodingStats:
    """What a call does, its text checked."""
    output = same_as_plain(model, prompts(batch), strategy, **{"max_new_tokens": 36} | settings)
    assert isinstance(output, LookaheadOutput)
    assert output.stats is not None
    return output.stats


# --- the text ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("sampled", [{}, {"do_sample": True}, {"do_sample": True, "temperature": 0.5, "top_k": 8}])
@pytest.mark.parametrize("strategy", [Lookahead(), Lookahead(nodes=12), Lookahead(sources=NAMES, tuning=FLAT)])
def test_plain_decodings_text(batch: int, sampled: dict[str, Any], strategy: Lookahead) -> None:
    """Chaotic and repetitive, batched with padding."""
    for model in (tiny_model("llama"), counting_model(sharpness=6.0)):
        drafted(model, strategy, batch, max_new_tokens=24, **sampled)


@pytest.mark.parametrize("sources", EACH, ids=str)
@pytest.mark.parametrize(("nodes", "batch"), [(1, 1), (5, 3), (40, 1), (None, 1), (None, 3)])
def test_each_source_alone(sources: tuple[str, ...], nodes: int | None, batch: int) -> None:
    strategy = Lookahead(sources=sources, nodes=nodes, tuning=None if nodes else FLAT, seed=1)
    stats = drafted(counting_model(), strategy, batch)
    assert set(stats.sources) <= set(sources)
    if batch == 1:
        drafted(tiny_model("llama"), strategy, do_sample=True, max_new_tokens=24)


@pytest.mark.parametrize("name", ["gpt2", "mistral", "qwen2_mixed", "gemma3", "llama4"])
def test_other_models(name: str) -> None:
    drafted(tiny_model(name), Lookahead(nodes=20), 3, max_new_tokens=20)
    drafted(tiny_model(name), Lookahead(tuning=FLAT, sources=NAMES), 1, max_new_tokens=20)


@pytest.mark.parametrize("batch", [1, 3])
def test_rows_that_end(batch: int) -> None:
    for strategy in (Lookahead(), Lookahead(nodes=9), Lookahead(tuning=FLAT)):
        drafted(tiny_model("llama"), strategy, batch, eos_token_id=list(range(1, 8)))


@examples(8)
@given(
    st.lists(st.floats(0.05, 20.0), min_size=len(NODES), max_size=len(NODES)),
    st.sampled_from([1, 2, 3]),
    st.booleans(),
    st.integers(0, 99),
)
def test_the_text_never_depends_on_tuning(ms: list[float], batch: int, sample: bool, seed: int) -> None:
    times = StepTimes()
    for nodes, value in zip(NODES, ms, strict=True):
        times.add(nodes, 64, value)
    for model in (tiny_model("llama"), counting_model(sharpness=6.0)):
        drafted(model, Lookahead(tuning=times, sources=NAMES, seed=seed), batch, do_sample=sample, max_new_tokens=25)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("nodes", [None, 6])
def test_a_source_of_the_users_own(batch: int, nodes: int | None) -> None:
    made: list[Oracle] = []

    def oracle(row: RowContext) -> Oracle:
        made.append(Oracle(row))
        return made[-1]

    strategy = Lookahead(sources=(oracle, "suffix"), nodes=nodes, tuning=FLAT if nodes is None else None)
    stats = drafted(counting_model(), strategy, batch, max_new_tokens=200 if nodes is None else 40)
    assert len(made) == batch and all(source.passes for source in made)
    assert set(stats.sources) == {"oracle"}
    assert stats.mean_acceptance_length > 4
    drafted(tiny_model("llama"), strategy, batch, do_sample=True)


def test_a_source_that_is_always_wrong_is_soon_left_alone() -> None:
    """It asks for eight tokens a node and keeps none; on a curve that costs, nothing of it is drafted in the end."""

    class Wrong(Oracle):
        name = "wrong"
        priors = (0.3,) * 8

        def propose(self, state: int) -> list[tuple[int, int]]:
            return [(VOCAB - 1 - rank, rank) for rank in range(8)]

    stats = drafted(counting_model(), Lookahead(sources=(Wrong,), tuning=USUAL, stats="detailed"), max_new_tokens=120)
    assert stats.accepted == 0
    tail = nodes_of(stats)[-30:]
    assert sum(map(sum, tail)) <= 8


# --- how much is drafted -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [1, 5, 40])
@pytest.mark.parametrize(
    "sources",
    [None, ("suffix",), ("recycling", "pool"), NAMES, ("window",)],
    ids=["default", "suffix", "two", "all", "window"],
)
def test_nodes_bounds_the_tree(sources: tuple[str, ...] | None, nodes: int) -> None:
    for model, batch in ((counting_model(), 1), (tiny_model("llama"), 1), (tiny_model("llama"), 3)):
        strategy = Lookahead(nodes=nodes, sources=sources, seed=0, stats="detailed")
        assert max(map(max, nodes_of(drafted(model, strategy, batch, max_new_tokens=24)))) <= nodes


@pytest.mark.parametrize("most", [1, 7, 30])
def test_max_nodes_bounds_the_tree_without_a_window(most: int) -> None:
    strategy = Lookahead(max_nodes=most, sources=("recycling", "suffix"), tuning=FLAT, stats="detailed")
    counts = nodes_of(drafted(tiny_model("llama"), strategy, max_new_tokens=80))
    assert max(map(max, counts)) == most


@pytest.mark.parametrize("most", [4, 64])
def test_max_nodes_bounds_the_tree(most: int) -> None:
    strategy = Lookahead(max_nodes=most, tuning=FLAT, stats="detailed", seed=0)
    counts = nodes_of(drafted(tiny_model("llama"), strategy, max_new_tokens=80))
    assert max(map(max, counts)) <= most


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("sources", [None, ("recycling", "suffix")])
def test_an_expensive_curve_means_plain_decoding(batch: int, sources: tuple[str, ...] | None) -> None:
    strategy = Lookahead(tuning=STEEP, sources=sources, stats="detailed", seed=0)
    counts = nodes_of(drafted(tiny_model("llama"), strategy, batch, max_new_tokens=100))
    width = [max(nodes) for nodes in counts]
    assert sum(width) <= 4 * 4, "the odd probe"
    assert width[0] == 0 or batch > 1


@pytest.mark.parametrize("batch", [1, 3])
def test_a_flat_curve_means_many_nodes(batch: int) -> None:
    strategy = Lookahead(tuning=FLAT, sources=("recycling", "suffix"), stats="detailed", seed=0)
    counts = nodes_of(drafted(tiny_model("llama"), strategy, batch, max_new_tokens=80))
    assert max(map(max, counts)) > 60
    assert sum(map(sum, counts[-20:])) > 20 * 15 * batch


def test_what_is_certain_is_drafted_at_any_usual_price() -> None:
    """On a curve of 3% a node, a text that repeats itself is written several tokens a pass; a chaotic one is not."""
    sure = drafted(counting_model(), Lookahead(tuning=USUAL, seed=0), max_new_tokens=100)
    assert sure.mean_acceptance_length > 3
    chaotic = drafted(tiny_model("llama"), Lookahead(tuning=USUAL, seed=0, remember=False), max_new_tokens=60)
    assert chaotic.drafted / chaotic.row_steps < sure.drafted / sure.row_steps


def test_window_columns_come_with_a_flat_curve_only() -> None:
    """The window alone: where a node costs nothing it runs, where nodes are dear it does not."""
    flat = drafted(tiny_model("llama"), Lookahead(sources=("window",), tuning=FLAT, seed=0, stats="detailed"))
    assert max(map(max, nodes_of(flat))) >= 16 * 3
    dear = drafted(tiny_model("llama"), Lookahead(sources=("window",), tuning=USUAL, seed=0, stats="detailed"))
    assert dear.drafted == 0


def test_the_window_is_part_of_the_default_where_it_costs_nothing() -> None:
    both = Lookahead(sources=("suffix", "window"), tuning=FLAT, seed=0, max_nodes=64, stats="detailed")
    without = Lookahead(sources=("suffix",), tuning=FLAT, seed=0, max_nodes=64, stats="detailed")
    most = [max(map(max, nodes_of(drafted(tiny_model("llama"), strategy)))) for strategy in (both, without)]
    assert most[0] >= 16 * 3 and most[0] > most[1]


def plan(times: StepTimes, passes: int, cost: Any, *, window: bool = True, tree: int = 6) -> list[tuple[int, int]]:
    """Drive a planner: each row drafts up to ``tree`` nodes, a pass costs ``cost(width)``; tree nodes and columns."""
    planner = Planner(times, Acceptance([SuffixSource()]), batch=1, most_nodes=128, window=window)
    seen = []
    for _ in range(passes):
        planner.open(64)
        nodes = min(len(planner.sizes[0]) - 1, tree)
        columns = 0 if planner.single else planner.columns
        planner.learnt([0.5] * nodes, [], columns, False, written=1)
        width = 1 + nodes + 4 * columns
        times_taken: dict[str, Any] = {"draft_ms": 0.0, "forward_ms": cost(width), "keep_ms": 0.0}
        step: Any = SimpleNamespace(trees=[range(width)], **times_taken)
        planner.observe(step)
        seen.append((nodes, planner.columns))
    return seen


def batch_sizes(slow: Sequence[float], fast: Sequence[float], batch: int = 2) -> int:
    """Nodes of a batch's next pass, where the row furthest behind has had trees of other values than the rest."""
    planner = Planner(curve(0.1), Acceptance([SuffixSource()]), batch=batch, most_nodes=32)
    for passed in range(20):
        planner.open(64)
        planner.sizes = [1.0] * 9, [0.0] * 9
        planner.learnt(slow, [], 0, False, written=passed)
        for _ in range(batch - 1):
            planner.learnt(fast, [], 0, False, written=3 * passed + 1)
        step: Any = SimpleNamespace(
            trees=[range(9)], draft_ms=0.0, forward_ms=curve(0.1).ms(9, 64), keep_ms=0.0, verify_ms=0.0
        )
        planner.observe(step)
    planner.open(64)
    planner.single = False
    return len(planner.sizes[0]) - 1


def test_a_batch_drafts_for_the_row_that_is_furthest_behind() -> None:
    """It is done when its slowest row is: what others gain shortens nothing."""
    good, bad = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2], [0.02] * 8
    assert batch_sizes(good, bad) == batch_sizes(good, good) > 2
    assert batch_sizes(bad, good) == batch_sizes(bad, bad) == 0


def test_larger_batches_ask_for_more() -> None:
    """Once rows are out of step every pass costs more, which the curve does not know."""
    fair = [0.5, 0.1]
    assert batch_sizes(fair, fair, batch=2) > 0
    assert batch_sizes(fair, fair, batch=64) == 0


@pytest.mark.parametrize(("batch", "expected"), [(1, 128), (4, 32), (16, 8)])
def test_prompts_share_what_is_gathered_of_them(batch: int, expected: int, made: list[Any]) -> None:
    """Their logits would otherwise cost a large batch several passes."""
    seen = []

    def noting(model: Any, args: Any, kwargs: Any) -> None:
        seen.append(kwargs.get("logits_to_keep"))

    model = fresh_model("llama")
    handle = model.register_forward_pre_hook(noting, with_kwargs=True)
    run(model, prompts(batch, 30), use_lookahead=True, max_new_tokens=40)
    handle.remove()
    assert expected in seen


def test_what_is_fed_again_counts_as_nodes() -> None:
    """Sizes cost what they add behind the tokens that are fed again; where those are dear, nothing is drafted."""
    for slope, room in ((0.01, 17), (0.3, 1)):
        times, again = curve(slope), [0]
        planner = Planner(times, Acceptance([SuffixSource()]), batch=1, most_nodes=16)
        planner.again = lambda again=again: again[0]  # type: ignore[misc]
        planner.open(64)
        assert len(planner.sizes[0]) == 17
        again[0] = 5
        planner.open(64)
        assert len(planner.sizes[0]) == room
        if room > 1:
            assert planner.sizes[0][0] == pytest.approx(times.ms(1, 64))  # the draft before has paid for the others
            assert planner.sizes[0][3] == pytest.approx(times.ms(1, 64) + times.ms(9, 64) - times.ms(6, 64))
        again[0] = 0
        planner.open(64)
        assert len(planner.sizes[0]) == 17


def test_a_draft_pays_for_what_is_fed_again() -> None:
    """What passes fed again of late is added to every size but the first."""
    times, again = curve(0.05), [0]
    planner = Planner(times, Acceptance([SuffixSource()]), batch=1, most_nodes=16)
    planner.again = lambda: again[0]
    for fed in (0, 3) * 20:
        again[0] = fed
        planner.open(64)
        step: Any = SimpleNamespace(trees=[range(4)], draft_ms=0.0, forward_ms=times.ms(4 + fed, 64), keep_ms=0.0)
        planner.observe(step)
    again[0] = 0
    planner.open(64)
    costs = planner.sizes[0]
    assert costs[0] == pytest.approx(times.ms(1, 64))
    three = times.ms(7, 64) - times.ms(4, 64)  # fed again after every second draft
    assert 0.3 * three < costs[3] - times.ms(4, 64) < 0.7 * three


def test_the_step_to_several_tokens_is_paid_by_the_draft_that_was_cut_short() -> None:
    """Where more than one token costs a step, feeding again costs it, whatever is drafted on top in the same pass."""
    times, again = curve(0.0, step=2.0), [0]
    planner = Planner(times, Acceptance([SuffixSource()]), batch=1, most_nodes=16)
    planner.again = lambda: again[0]
    for fed in (0, 3) * 40:
        again[0] = fed
        planner.open(64)
        step: Any = SimpleNamespace(trees=[range(4)], draft_ms=0.0, forward_ms=3.0, keep_ms=0.0)
        planner.observe(step)
    again[0] = 0
    planner.open(64)
    assert planner.sizes[0][0] == pytest.approx(1.0)
    assert 3.7 < planner.sizes[0][3] < 4.3  # the step, and another one after every second draft
    again[0] = 3
    planner.open(64)
    assert planner.sizes[0][0] == pytest.approx(1.0)
    assert 1.7 < planner.sizes[0][3] < 2.3  # now the step is taken anyway


@pytest.mark.parametrize(("step", "first"), [(0.0, 32), (0.5, 32), (2.0, 100)])
def test_dear_trials_are_rare(step: float, first: int) -> None:
    """While nothing seems to pay, a small draft is tried after 32 passes, or after as many as make it a fiftieth."""
    planner = Planner(curve(0.0, step=step), Acceptance([SuffixSource()]), batch=1, most_nodes=16)
    tried = []
    for place in range(120):
        planner.open(64)
        if planner._probing:
            tried.append(place)
        planner.learnt([], [], 0, True, written=place)
        one: Any = SimpleNamespace(trees=[range(1)], draft_ms=0.0, forward_ms=1.0, keep_ms=0.0)
        planner.observe(one)
    assert tried and first <= tried[0] <= first + 2


def test_measuring_one_node_does_not_stop_the_drafts() -> None:
    """t(1) is measured now and then; with a window too, that is one pass and not all that follow."""
    seen = plan(curve(0.0), 800, lambda width: 1.0)
    assert seen[0][1] > 0
    without = [nodes for nodes, _ in seen].count(0)
    assert without < 20


def test_measuring_one_node_takes_single_passes() -> None:
    times = curve(0.0)
    seen = plan(times, 800, lambda width: 1.0, window=False)
    assert 1 <= [nodes for nodes, _ in seen].count(0) <= 4


def test_an_unknown_curve_is_learnt() -> None:
    """From nothing: the cost of one node is measured in the first passes."""
    times = StepTimes()
    seen = plan(times, 60, lambda width: 1.0 + 0.02 * (width - 1), window=False)
    assert times.knows_single
    assert times.ms(1, 64) == pytest.approx(1.0, rel=0.1)
    assert [nodes for nodes, _ in seen].count(0) <= 8


# --- what is told ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3])
def test_sources_add_up_to_accepted_tokens(batch: int) -> None:
    for strategy in (Lookahead(seed=0), Lookahead(tuning=FLAT, sources=NAMES), Lookahead(nodes=9)):
        stats = drafted(counting_model(), strategy, batch)
        assert sum(stats.sources.values()) == stats.accepted


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("nodes", [None, 5, 40])
def test_sources_add_up_but_for_the_last_passes(batch: int, nodes: int | None) -> None:
    """In chaotic texts too, and with a window beside."""
    strategy = Lookahead(tuning=None if nodes else FLAT, sources=NAMES, nodes=nodes, seed=0, stats="detailed")
    for model in (counting_model(), tiny_model("llama")):
        stats = drafted(model, strategy, batch)
        last = sum(
            next(record["tokens"][row] for record in reversed(stats.passes) if record["tokens"][row]) - 1
            for row in range(batch)
        )
        assert sum(stats.sources.values()) in (stats.accepted, stats.accepted - last)


def told(**changes: Any) -> str:
    stats = DecodingStats(
        steps=11,
        row_steps=11,
        emitted=44,
        drafted=110,
        accepted=33,
        sources={"suffix": 8, "recycling": 25},
        single_ms=10.0,
        timed_ms=20.0,
    )
    for name, value in changes.items():
        setattr(stats, name, value)
    return stats.explain()


def test_explain_says_what_happened() -> None:
    assert DecodingStats().explain() == "Nothing was decoded."
    assert told() == (
        "44 tokens in 11 passes (S = 4.00) with 10.0 drafted nodes a pass, of which 30% were kept "
        "(recycling 76%, suffix 24%); a pass cost t(T)/t(1) = 2.00, which makes about 2.00x plain decoding."
    )
    assert told(timed_ms=80.0).endswith("t(T)/t(1) = 8.00, which makes a loss, about 0.50x plain decoding.")
    assert told(single_ms=0.0, timed_ms=0.0).endswith(
        "what a pass over one node costs here is not known, so neither is the gain."
    )
    assert "were kept; a pass cost" in told(sources={})
    assert told(drafted=0, accepted=0).endswith(": decoded plainly, because no draft was expected to pay.")
    assert told(steps=1, row_steps=1).endswith("the prompt's pass wrote everything, so there was nothing to draft.")


def test_explain_after_calls() -> None:
    win = drafted(counting_model(), Lookahead(tuning=FLAT, seed=0))
    assert "drafted nodes a pass" in win.explain() and "plain decoding" in win.explain()
    plainly = drafted(tiny_model("llama"), Lookahead(tuning=STEEP, seed=0), max_new_tokens=20)
    assert "decoded plainly" in plainly.explain()
    assert plainly.drafted == 0 and plainly.steps == 20
    one = drafted(tiny_model("llama"), Lookahead(seed=0), max_new_tokens=1)
    assert "the prompt's pass wrote everything" in one.explain()
    total = win + plainly
    assert total.timed_ms == win.timed_ms + plainly.timed_ms
    assert DecodingStats.from_dict(win.to_dict()) == win


# --- one token, one pass -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("sample", [False, True])
def test_one_token_takes_one_pass(batch: int, sample: bool, passes: Any) -> None:
    settings = {"max_new_tokens": 1, "do_sample": sample}
    model, inputs = fresh_model("llama"), prompts(batch)
    plain, state = run(model, inputs, **settings)
    seen = passes(model)
    run(model, inputs, use_lookahead=True, **settings)  # with a hook on it, the model is tested once
    seen.clear()
    output, after = run(model, inputs, use_lookahead=True, **settings)
    assert torch.equal(output, plain) and torch.equal(state, after)
    assert len(seen) == 1
    output, _ = run(model, inputs, custom_generate=Lookahead(), **settings)
    assert torch.equal(output, plain)


@pytest.mark.parametrize("batch", [1, 3])
def test_one_token_with_all_that_is_asked_for(batch: int) -> None:
    output = same_as_plain(
        tiny_model("llama"), prompts(batch), max_new_tokens=1, output_scores=True, output_logits=True
    )
    assert isinstance(output, LookaheadOutput)
    assert output.stats is not None and output.stats.steps == 1


def test_one_token_into_the_users_cache() -> None:
    from transformers import DynamicCache

    caches = [DynamicCache(), DynamicCache()]
    model, inputs = tiny_model("llama"), prompts(1)
    plain, _ = run(model, inputs, max_new_tokens=1, past_key_values=caches[0])
    output, _ = run(model, inputs, max_new_tokens=1, past_key_values=caches[1], use_lookahead=True)
    assert torch.equal(output, plain)
    assert caches[0].get_seq_length() == caches[1].get_seq_length()


# --- repeatable, remembered, forgotten ---------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "sample"), [(1, True), (3, False)])
@pytest.mark.parametrize("tuning", [FLAT, USUAL, STEEP], ids=["flat", "usual", "steep"])
def test_a_seed_and_a_curve_repeat_the_passes(batch: int, sample: bool, tuning: StepTimes) -> None:
    """In a process that has decoded other things in between."""
    model, strategy = fresh_model("llama"), Lookahead(seed=5, tuning=tuning, sources=NAMES, stats="detailed")
    before = tuning.to_dict()
    first = drafted(model, strategy, batch, do_sample=sample)
    drafted(model, Lookahead(), batch)
    second = drafted(model, strategy, batch, do_sample=sample)
    assert nodes_of(first) == nodes_of(second)
    assert [record["tokens"] for record in first.passes] == [record["tokens"] for record in second.passes]
    assert first.sources == second.sources
    assert tuning.to_dict() == before, "the caller's curve stays as it is"


def memory_of(model: Any) -> memory.Memory:
    return memory._memories[model]


def test_calls_remember() -> None:
    """The second call on the same prompt knows the text: no token of it is new to the successor table."""
    model, strategy = fresh_model("llama"), Lookahead(sources=("recycling",), nodes=8)
    first, second = drafted(model, strategy), drafted(model, strategy)
    assert second.steps < first.steps
    assert len(memory_of(model).table) > 0
    memory.forget(model)
    assert drafted(model, strategy).steps == first.steps
    memory.forget(model)
    memory.forget(model)


@pytest.mark.parametrize("strategy", [Lookahead(remember=False), Lookahead(seed=3), Lookahead(window_size=5)])
def test_calls_that_leave_no_draft_memory(strategy: Lookahead) -> None:
    model = fresh_model("llama")
    drafted(model, strategy)
    kept = memory_of(model)
    assert len(kept.table) == 0 and not kept.acceptances
    drafted(model, Lookahead())
    rows, rates = len(memory_of(model).table), copy.deepcopy(next(iter(memory_of(model).acceptances.values())).weights)
    drafted(model, strategy, do_sample=True)
    assert memory_of(model) is kept
    assert len(kept.table) == rows and next(iter(kept.acceptances.values())).weights == rates
    assert not strategy.remembers and Lookahead().remembers


def test_ways_of_choosing_have_estimates_of_their_own_and_not_too_many() -> None:
    model = fresh_model("llama")
    drafted(model, Lookahead(), max_new_tokens=3)
    drafted(model, Lookahead(), max_new_tokens=3, do_sample=True)
    drafted(model, Lookahead(sources=("suffix",)), max_new_tokens=3)
    assert len(memory_of(model).acceptances) == 3
    for top_k in range(2, 22):
        drafted(model, Lookahead(), max_new_tokens=2, do_sample=True, top_k=top_k)
    assert len(memory_of(model).acceptances) == 16


def test_memory_goes_with_its_model() -> None:
    model = fresh_model("llama")
    drafted(model, Lookahead())
    drafted(model, Lookahead(tuning=FLAT), 3, do_sample=True)
    known, gone = len(memory._memories), weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert len(memory._memories) < known


def test_memory_goes_with_its_model_whatever_a_source_holds() -> None:
    model = fresh_model("llama")

    def source(row: RowContext, held: Any = model) -> Oracle:
        return Oracle(row)

    drafted(model, Lookahead(sources=(source,)))
    gone = weakref.ref(model)
    del model, source
    gc.collect()
    assert gone() is None


def test_the_models_copy_has_no_memory_of_it() -> None:
    model = fresh_model("llama")
    drafted(model, Lookahead())
    assert copy.deepcopy(model) not in memory._memories
    assert not any("lookahead" in name for name in vars(model))


def test_an_error_brings_the_memory_back() -> None:
    model = fresh_model("llama")
    drafted(model, Lookahead())
    kept = memory_of(model)

    def broken(row: RowContext) -> Any:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(model, prompts(1), use_lookahead=True, lookahead_strategy=Lookahead(sources=(broken,)), max_new_tokens=5)
    assert memory_of(model) is kept


def test_threads() -> None:
    """Calls at the same time on one model, greedy: each writes its own text."""
    model = fresh_model("llama")
    inputs = [prompts(1, seed=seed) for seed in range(4)]
    plain = [run(model, given, max_new_tokens=30, do_sample=False)[0].tolist() for given in inputs]
    written: list[Any] = [None] * len(inputs)

    def decode(index: int) -> None:
        settings = {"max_new_tokens": 30, "do_sample": False}
        strategy = Lookahead(nodes=6) if index % 2 else Lookahead()
        texts = [
            model.generate(**inputs[index], use_lookahead=True, lookahead_strategy=strategy, **settings).tolist()
            for _ in range(2)
        ]
        written[index] = texts[0] if texts[0] == texts[1] else None

    threads = [threading.Thread(target=decode, args=(index,)) for index in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert written == plain


def test_concurrent_calls_do_not_share() -> None:
    model = fresh_model("llama")
    with memory.borrowed(model, True) as first, memory.borrowed(model, True) as second:
        assert first is not second
        assert first.table is not second.table and first.times is not second.times
    with memory.borrowed(model, True) as third:
        assert third in (first, second)
    with memory.borrowed(model, False) as fourth:
        assert fourth.table is not third.table and not fourth.acceptances
        assert fourth.times is third.times, "step times are the machine's"


def test_step_times_are_learnt_and_shared() -> None:
    model = fresh_model("llama")
    drafted(model, Lookahead(seed=1))
    (times,) = memory_of(model).times.values()
    assert times.knows_single or times._mean
    drafted(model, Lookahead(seed=1), 3)
    assert len(memory_of(model).times) == 2
    drafted(model, Lookahead(tuning=FLAT))
    assert len(memory_of(model).times) == 2


def test_a_saved_curve_is_used(tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the cache folder, and from a file."""
    from lookahead import tuning

    monkeypatch.setenv("LOOKAHEAD_CACHE", str(tmp_path / "cache"))
    model = fresh_model("llama")
    STEEP.save(tuning.cache_file(describe(model)))
    assert drafted(model, Lookahead(), max_new_tokens=12).drafted == 0
    file = tmp_path / "flat.json"
    FLAT.save(file)
    for tuned in (file, str(file)):
        strategy = Lookahead(tuning=tuned, sources=("recycling",), seed=0)
        assert drafted(model, strategy, max_new_tokens=30).drafted > 20


# --- settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nodes": 0}, r"Lookahead\(nodes=\) must be at least 1: got 0"),
        ({"nodes": -2}, r"nodes=\) must be at least 1"),
        ({"nodes": 513}, r"nodes=\) must be at most 512: got 513"),
        ({"nodes": 2.0}, r"nodes=\) must be a whole number: got 2.0 of type float"),
        ({"nodes": True}, r"nodes=\) must be a whole number: got True"),
        ({"max_nodes": 0}, r"max_nodes=\) must be at least 1: got 0"),
        ({"max_nodes": 513}, r"max_nodes=\) must be at most 512: got 513"),
        ({"max_nodes": None}, r"max_nodes=\) must be a whole number: got None"),
        ({"remember": 1}, r"remember=\) must be True or False: got 1"),
        ({"sources": ("suffix", "medusa")}, r"Unknown source 'medusa': expected 'recycling', 'suffix'"),
        ({"sources": (3,)}, r"Unknown source 3"),
        ({"sources": "suffix"}, r"sources=\) must be a tuple of one or more of 'recycling'.*got 'suffix'"),
        ({"sources": ()}, r"sources=\) must be a tuple of one or more"),
        ({"sources": {"suffix"}}, r"sources=\) must be a tuple"),
        ({"sources": ("suffix", "pool", "suffix")}, r"names a source twice"),
        ({"sources": (Oracle, Oracle)}, r"names a source twice"),
        ({"tuning": 3}, r"tuning=\) must be a StepTimes or the file of a saved one: got 3"),
        ({"tuning": "/nowhere/curve.json"}, r"/nowhere/curve.json holds no step-time curve.*lookahead tune"),
        ({"sources": ("suffix",), "window_size": 5}, r"sources=\) belongs to the automatic mode"),
        ({"nodes": 4, "ngram_size": 5}, r"nodes=\) belongs to the automatic mode"),
        ({"tuning": FLAT, "verification_set_size": 5}, r"tuning=\) belongs to the automatic mode"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(LookaheadError, match=message):
        Lookahead(**settings)


def test_a_foreign_tuning_file_is_refused(tmp_path: FilePath) -> None:
    file = tmp_path / "curve.json"
    for content in ("{}", "[1, 2]", "no", '{"format": 99, "nodes": [], "cells": [], "about": {}}'):
        file.write_text(content)
        with pytest.raises(LookaheadError, match="step-time curve"):
            Lookahead(tuning=file)


def test_a_users_source_is_checked() -> None:
    class Sure(Oracle):
        priors = (1.0,)

    with pytest.raises(LookaheadError, match=r"Source 'oracle' has the prior 1.0"):
        drafted(tiny_model("llama"), Lookahead(sources=(Sure,)))
    with pytest.raises(LookaheadError, match="object is no source of candidates: it has no start, root"):
        drafted(tiny_model("llama"), Lookahead(sources=(lambda row: object(),)))


@pytest.mark.parametrize(
    ("candidates", "told"),
    [
        ([(10**6, 0)], "proposed token 1000000: expected 0 to"),
        ([(-3, 0)], "proposed token -3"),
        ([(1, 9)], "of kind 9: its priors know 0 to 0"),
        ([(1, -1)], "of kind -1"),
        (None, "proposed None: expected pairs"),
        ([1, 2], r"proposed \[1, 2\]: expected pairs"),
        ([(1.5, 0)], "expected pairs"),
    ],
)
@pytest.mark.parametrize("nodes", [None, 6])
def test_a_users_candidates_are_checked(candidates: Any, told: str, nodes: int | None) -> None:
    """By name, and not by an index error inside the model."""

    class Odd(Oracle):
        priors = (0.5,)

        def propose(self, state: Any) -> Any:
            return candidates

    with pytest.raises(LookaheadError, match=f"Source 'oracle' proposed.*{told.removeprefix('proposed ')}"):
        drafted(tiny_model("llama"), Lookahead(sources=(Odd,), nodes=nodes, tuning=None if nodes else FLAT))


def test_there_and_back(tmp_path: FilePath) -> None:
    file = tmp_path / "curve.json"
    FLAT.save(file)
    for strategy in (
        Lookahead(),
        Lookahead(seed=3, stats="detailed", remember=False),
        Lookahead(sources=("suffix", "pool"), nodes=5, max_nodes=9),
        Lookahead(sources=["window"], tuning=str(file)),
    ):
        data = strategy.to_dict()
        assert Lookahead.from_dict(data) == strategy
        assert strategy_from(data) == strategy
        assert data["strategy"] == "lookahead"
        assert strategy.automatic
        hash(strategy)
    assert Lookahead(tuning=file).to_dict()["tuning"] == str(file)
    assert Lookahead(sources=["suffix"]).sources == ("suffix",)
    again = Lookahead.from_dict(json.loads(json.dumps(Lookahead(tuning=FLAT).to_dict())))
    assert isinstance(again.tuning, StepTimes) and again.tuning.to_dict() == FLAT.to_dict()
    with pytest.raises(LookaheadError, match="Unknown source 'Oracle'"):
        Lookahead.from_dict(Lookahead(sources=(Oracle,)).to_dict())


def test_as_a_dict_in_the_call() -> None:
    given = {"sources": ["suffix"], "nodes": 4, "stats": "detailed"}
    output = same_as_plain(counting_model(), prompts(1), given, max_new_tokens=30)
    assert max(itertools.chain(*nodes_of(output.stats))) == 4
    assert set(output.stats.sources) == {"suffix"}


@pytest.mark.parametrize("strategy", [Lookahead(tuning=FLAT), Lookahead(sources=(Oracle,))], ids=["curve", "source"])
def test_a_config_that_holds_it_can_be_shown(strategy: Lookahead) -> None:
    config = GenerationConfig(max_new_tokens=3)
    config.lookahead_strategy = strategy
    assert "max_new_tokens" in repr(config)
