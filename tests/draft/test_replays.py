"""Linear drafts that are cut short: what that costs, and how long drafts are where it does."""

from itertools import accumulate
from operator import mul
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.automatic import Limits, curve, drafted
from helpers.hybrids import counting_hybrid

from jacobi import Path
from lookahead import Lookahead
from lookahead.draft.acceptance import Acceptance
from lookahead.draft.best_first import BestFirstTree
from lookahead.draft.latency import StepTimes
from lookahead.draft.pass_costs import Cut, least_slopes
from lookahead.draft.planner import Planner
from lookahead.sources import SuffixSource


def planner_of(times: StepTimes, limits: Limits, batch: int = 1) -> Planner:
    return Planner(times, Acceptance([SuffixSource()]), limits=limits, batch=batch, most_nodes=16)


def decode(planner: Planner, limits: Limits, waiting: int, width: int = 4) -> None:
    """One pass over ``width`` nodes, after which so many tokens wait for their replay."""
    planner.open(64)
    taken = planner.costs.times.ms(width + limits.again, 64)
    limits.again = waiting
    paths = [Path([0], [1] * width)]
    step: Any = SimpleNamespace(
        trees=[range(width)], paths=paths, draft_ms=0.0, forward_ms=taken, verify_ms=0.0, keep_ms=0.0
    )
    planner.observe(step)


def test_a_draft_costs_what_it_adds_behind_replayed_tokens() -> None:
    """The draft before has paid for those; the one behind them pays if they have to be replayed once more."""
    times, limits = curve(0.01), Limits(replays=True)
    planner = planner_of(times, limits)
    planner.open(64)
    assert planner.sizes[0] == pytest.approx([times.ms(nodes, 64) for nodes in range(1, 18)])
    assert planner.cut == Cut(pytest.approx(0.01), 0.0)
    limits.again = 5
    planner.open(64)
    assert len(planner.sizes[0]) == 17
    assert planner.sizes[0][0] == pytest.approx(times.ms(1, 64))
    assert planner.sizes[0][3] == pytest.approx(times.ms(1, 64) + times.ms(9, 64) - times.ms(6, 64))
    assert planner.cut == Cut(pytest.approx(0.01), pytest.approx(times.ms(6, 64) - times.ms(1, 64)))


def test_a_draft_that_is_kept_whole_pays_for_no_replay() -> None:
    cut = Cut(token_ms=2.0, again_ms=3.0)
    assert cut.cost(expected=5.0, whole=1.0, nodes=5) == 0.0
    assert cut.cost(expected=1.0, whole=0.0, nodes=2) == 2.0 + 3.0  # the root alone is kept
    assert cut.cost(expected=2.5, whole=0.5, nodes=4) == pytest.approx(2.0 * 0.5 + 3.0 * 0.5)


def test_where_the_cache_gives_tokens_back_nothing_is_charged() -> None:
    planner = planner_of(curve(0.01), Limits())
    planner.open(64)
    assert planner.cut is None


@pytest.mark.parametrize(("width", "step"), [(4, 0.0), (1, 2.0)])
def test_the_step_to_several_tokens(width: int, step: float) -> None:
    """A replay makes a pass one over several tokens. That costs nothing where drafts follow each other anyway."""
    limits = Limits(replays=True)
    planner = planner_of(curve(0.0, step=2.0), limits)
    for _ in range(40):
        decode(planner, limits, waiting=3)
        decode(planner, limits, waiting=0, width=width)
    planner.open(64)
    assert planner.cut is not None
    assert planner.cut.again_ms == pytest.approx(step, abs=0.1)
    limits.again = 3
    planner.open(64)
    assert planner.sizes[0][3] == pytest.approx(1.0)  # the step is taken anyway
    assert planner.cut.again_ms == pytest.approx(2.0)  # and would be once more


def test_a_batch_pays_what_cuts_cost_of_late() -> None:
    """Its drafts are sized together, by their mean."""
    times, limits = curve(0.05), Limits(replays=True)
    planner = planner_of(times, limits, batch=2)
    for _ in range(40):
        decode(planner, limits, waiting=3)
        decode(planner, limits, waiting=0)
    planner.open(64)
    assert planner.costs.cut_ms == pytest.approx(0.5 * 3 * 0.05, rel=0.1)
    assert planner.cut is None


@pytest.mark.parametrize("cut", [Cut(0.0, 0.0), Cut(0.1, 0.0), Cut(0.0, 0.6), Cut(0.3, 1.5)])
@pytest.mark.parametrize("chance", [0.4, 0.7, 0.9])
def test_the_length_that_pays(cut: Cut, chance: float) -> None:
    """Expected tokens against the pass and the replay that follows a cut, by brute force over all lengths."""
    source: Any = SimpleNamespace(
        name="sure", priors=(chance,), root=lambda: 0, step=lambda state, token: token, propose=lambda state: [(7, 0)]
    )
    times = [1.0, *(1.3 + 0.05 * nodes for nodes in range(12))]
    values = list(accumulate([1.0] + [chance] * 12, mul))
    expected = list(accumulate(values))
    speeds = [
        expected[drafted] / (times[drafted] + cut.cost(expected[drafted], values[drafted], drafted + 1))
        for drafted in range(13)
    ]
    trees = BestFirstTree([source], Acceptance([source]), chain=True)
    tree, _ = trees.grow(1, 99, times, least_slopes(times), cut=cut)
    assert len(tree) - 1 == speeds.index(max(speeds))


def test_several_tokens_may_take_other_kernels_than_one() -> None:
    """What one token takes then says nothing of how steep the curve of several is."""
    times = StepTimes()
    times.steps = True
    assert times.curve(64, 2)[1] == pytest.approx(1.0, abs=0.05)
    times.add(1, 64, 10.0)
    assert times.curve(64, 16)[0] == 10.0
    times.add(4, 64, 30.0)
    known = times.curve(64, 64)
    assert known[0] == 10.0
    assert known[1] == pytest.approx(30.0, rel=0.05)
    assert known[63] < 50.0
    assert times.curve(1024, 64)[0] == pytest.approx(10.0)  # other contexts are taken to be alike


def test_several_tokens_never_take_less_time_than_one() -> None:
    """A machine that has become slower since several were measured does not make them cheaper."""
    times = StepTimes()
    times.steps = True
    for _ in range(4):
        times.add(4, 64, 10.0)
    for _ in range(40):
        times.add(1, 64, 20.0)
    known = times.curve(64, 8)
    assert min(known) == known[0]


@pytest.mark.usefixtures("augmented")
@pytest.mark.parametrize(("step", "least"), [(0.4, 4.0), (2.0, 4.0)])
def test_text_that_repeats_is_drafted(step: float, least: float) -> None:
    """Wherever a fixed draft would pay, also where several tokens cost three times as much as one."""
    strategy = Lookahead(tuning=curve(0.02, step=step), seed=1)
    assert drafted(counting_hybrid("zaya"), strategy, max_new_tokens=60).mean_acceptance_length >= least
