"""How much is drafted: trees follow the latency curve, the acceptance and the bounds that are set."""

from types import SimpleNamespace
from typing import Any

import pytest
from helpers.automatic import FLAT, NAMES, STEEP, USUAL, Limits, curve, drafted, nodes_of
from helpers.models import counting_model, fresh_model, prompts, run, tiny_model

from jacobi import Path, Step, TokenTree
from lookahead import Lookahead
from lookahead.draft.acceptance import Acceptance
from lookahead.draft.guard import Mode
from lookahead.draft.latency import NODES, StepTimes
from lookahead.draft.planner import Planner, shared_width
from lookahead.sources import SuffixSource

pytestmark = pytest.mark.usefixtures("augmented")

GOOD, BAD = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4], [0.02] * 6
COSTS = [1.0 + 0.2 * nodes for nodes in range(8)]


@pytest.mark.parametrize("nodes", [1, 5, 40])
@pytest.mark.parametrize(
    "sources", [None, ("suffix",), ("recycling", "pool"), NAMES], ids=["default", "suffix", "two", "all"]
)
def test_nodes_bounds_the_tree(sources: tuple[str, ...] | None, nodes: int) -> None:
    for model, batch in ((counting_model(), 1), (tiny_model("llama"), 1), (tiny_model("llama"), 3)):
        strategy = Lookahead(nodes=nodes, sources=sources, seed=0, stats="detailed")
        assert max(map(max, nodes_of(drafted(model, strategy, batch, max_new_tokens=24)))) <= nodes


@pytest.mark.parametrize("most", [1, 7, 30])
def test_a_flat_curve_reaches_max_nodes(most: int) -> None:
    strategy = Lookahead(max_nodes=most, sources=("recycling", "suffix"), tuning=FLAT, stats="detailed")
    counts = nodes_of(drafted(tiny_model("llama"), strategy, max_new_tokens=80))
    assert max(map(max, counts)) == most


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("sources", [None, ("recycling", "suffix")])
def test_an_expensive_curve_means_plain_decoding(batch: int, sources: tuple[str, ...] | None) -> None:
    strategy = Lookahead(tuning=STEEP, sources=sources, stats="detailed", seed=0)
    counts = nodes_of(drafted(tiny_model("llama"), strategy, batch, max_new_tokens=100))
    width = [max(nodes) for nodes in counts]
    assert sum(width) <= 4 * 4, "the odd probe"
    assert width[0] == 0 or batch > 1


def test_what_is_certain_is_drafted_at_any_usual_price() -> None:
    """On a curve of 3% a node, a text that repeats itself is written several tokens a pass; a chaotic one is not."""
    sure = drafted(counting_model(), Lookahead(tuning=USUAL, seed=0), max_new_tokens=100)
    assert sure.mean_acceptance_length > 3
    chaotic = drafted(tiny_model("llama"), Lookahead(tuning=USUAL, seed=0, remember=False), max_new_tokens=60)
    assert chaotic.drafted / chaotic.row_steps < sure.drafted / sure.row_steps


def plan(times: StepTimes, passes: int, cost: Any, *, tree: int = 6) -> list[int]:
    """Drive a planner: each row drafts up to ``tree`` nodes, a pass costs ``cost(width)``; nodes of each tree."""
    planner = Planner(times, Acceptance([SuffixSource()]), limits=Limits(), batch=1, most_nodes=128)
    seen = []
    for _ in range(passes):
        planner.open(64)
        nodes = min(len(planner.sizes[0]) - 1, tree)
        planner.learn(False, False)
        width = 1 + nodes
        times_taken: dict[str, Any] = {"draft_ms": 0.0, "forward_ms": cost(width), "verify_ms": 0.0, "keep_ms": 0.0}
        path = Path([0], [1] * (1 + nodes // 2))
        step: Any = SimpleNamespace(trees=[range(width)], paths=[path], **times_taken)
        planner.observe(step)
        seen.append(nodes)
    return seen


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


def test_measuring_one_node_does_not_stop_the_drafts() -> None:
    """t(1) is measured now and then; that is one pass and not all that follow."""
    assert 1 <= plan(curve(0.0), 800, lambda width: 1.0).count(0) <= 4


def test_what_asking_takes_is_no_part_of_what_passes_take() -> None:
    """A pass takes 10 ms and 2 more for each further node; drafting takes 0.5 ms for each node that is asked about. Of
    a single sequence's passes the curve tells the first, and asking is counted apart."""
    times = StepTimes()
    planner = Planner(times, Acceptance([SuffixSource()]), limits=Limits(), batch=1, most_nodes=8)
    for width in (1, 4, 4, 1, 4, 8, 4, 4, 1, 4, 4):
        planner.open(64)
        planner.asks = width
        step = Step([TokenTree.chain(0, [1] * (width - 1))], [Path([0], [1])], 0.5 * width, 8.0 + 2.0 * width, 0.0, 0.0)
        planner.observe(step)
    planner.open(64)
    assert planner.mode is Mode.DRAFT
    assert planner.ask_ms == pytest.approx(0.5)
    assert times.ms(4, 64) == pytest.approx(16.0)
    assert times.ms(1, 64) == pytest.approx(10.0)


def test_an_unknown_curve_is_learnt() -> None:
    """From nothing: the cost of one node is measured in the first passes."""
    times = StepTimes()
    seen = plan(times, 60, lambda width: 1.0 + 0.02 * (width - 1))
    assert times.knows_single
    assert times.ms(1, 64) == pytest.approx(1.0, rel=0.1)
    assert seen.count(0) <= 8


def test_trees_of_a_batch_are_as_wide_as_pays_for_all() -> None:
    assert shared_width([], COSTS, 1.0) == 1
    assert shared_width([([], 4)] * 3, COSTS, 1.0) == 1, "no candidate"
    assert shared_width([(GOOD, 4)] * 3, COSTS, 1.0) == 6
    assert shared_width([(BAD, 4)] * 3, COSTS, 1.0) == 1
    assert shared_width([(GOOD, 4)] * 3, [1.0, 3.0, 5.0], 1.0) == 1


def test_rows_that_are_ahead_count_less() -> None:
    """A batch is done when its slowest row is: what others gain shortens little."""
    assert shared_width([(GOOD, 4), (BAD, 30), (BAD, 30)], COSTS, 1.0) > 3
    assert shared_width([(GOOD, 30), (BAD, 4), (BAD, 4)], COSTS, 1.0) == 1


def test_the_same_tokens_count_more_where_all_rows_write_them() -> None:
    costs = [1.0, 1.3, 1.6, 1.9, 2.2]
    assert shared_width([([1.0] * 4, 4), ([], 4), ([], 4), ([], 4)], costs, 1.0) == 1
    assert shared_width([([1.0], 4)] * 4, costs, 1.0) == 2


def test_long_leaps_of_all_rows_count_in_full() -> None:
    """Twice as many tokens in less than twice the time are worth it, however many they are already."""
    costs = [1.0 + 0.5 * nodes for nodes in range(8)]
    assert shared_width([([1.0] * 7, 4)] * 4, costs, 1.0) == 8


def test_larger_batches_ask_for_more() -> None:
    """The more rows, the more likely is one that has no luck."""
    costs = [1.0, 1.4]
    assert shared_width([([0.6], 4)] * 2, costs, 1.0) == 2
    assert shared_width([([0.6], 4)] * 64, costs, 1.0) == 1


def test_trees_of_a_batch_have_one_of_the_curves_sizes() -> None:
    """Every further size would have kernels of its own to be made."""
    flat = [1.0 + 0.001 * nodes for nodes in range(64)]
    for count in range(1, 20):
        width = shared_width([([0.9] * count, 4)] * 3, flat, 1.0)
        assert width == max(size for size in NODES if size <= count + 1)
