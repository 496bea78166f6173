"""When nothing pays: how seldom sources are asked; and which sizes are tried although nothing speaks for them."""

from typing import Any

import pytest
from helpers.automatic import Limits, curve

from lookahead.draft.guard import Mode, Rest, Trials
from lookahead.draft.latency import NODES, StepTimes
from lookahead.draft.pass_costs import PassCosts


def after(passes: int, limits: Limits | None = None) -> Rest:
    """A rest of so many plain passes."""
    rest = Rest(PassCosts(curve(0.03, step=1.5), limits or Limits(), None, 65, 1))
    for _ in range(passes):
        rest.observe(Mode.DRAFT, drafted=False, refused=True, accepted=False)
    return rest


def test_sources_are_asked_more_and_more_seldom() -> None:
    asked = [passes for passes in range(40) if not after(passes).is_on]
    assert asked == [0, 1, 2, 3, 4, 8, 12, 16, 24, 32]


def test_where_repeats_are_counted_they_call_for_sources() -> None:
    """Else those are asked seldom: a text that does not repeat has hardly anything to draft."""
    limits = Limits()
    limits.repeated = 0
    asked = [passes for passes in range(100) if not after(passes, limits).is_on]
    assert asked == [0, 1, 8, 32, 64, 96]
    rest = after(40, limits)
    rest._costs.open(64)
    rest._costs.read()
    rest._costs.read_trees()
    calls = []
    for run in range(4):
        limits.in_a_row = run
        calls.append(not rest.is_on)
    assert calls == [False, False, True, True], "a pass over two nodes costs two and a half over one"


def test_a_pass_without_candidates_is_no_rest() -> None:
    rest = after(0)
    rest.observe(Mode.DRAFT, drafted=False, refused=False, accepted=False)
    rest.observe(Mode.MEASURE, drafted=False, refused=False, accepted=False)
    assert rest.passes == 0
    rest.observe(Mode.REST, drafted=False, refused=False, accepted=False)
    assert rest.passes == 1


def test_an_accepted_token_ends_the_rest_unless_its_draft_was_a_trial() -> None:
    rest = after(40)
    rest.observe(Mode.TRY, drafted=True, refused=False, accepted=True)
    assert rest.passes == 40
    rest.observe(Mode.DRAFT, drafted=True, refused=False, accepted=True)
    assert rest.passes == 0
    assert not rest.is_on


def tried(times: StepTimes, slope: float, passes: int = 3000, repeats: float | None = None) -> tuple[list[int], float]:
    """The widths of the trials among passes over one node, which write one token each; the share of time they lose.
    So many of the tokens are counted as ``repeats`` (None = nobody counts)."""
    limits = Limits()
    costs = PassCosts(times, limits, None, 65, 1)
    trials, widths, lost, total = Trials(costs), [], 0.0, 0.0
    for passed in range(passes):
        if repeats is not None:
            limits.repeated = int(passed * repeats)
        if costs.open(64):
            costs.read()
            costs.read_trees()
        width = trials.width
        taken = 1.0 + slope * (max(1, width) - 1)
        trials.observe(width > 0, taken, 1.0)
        costs.observe(max(1, width), taken, 0.0, 1.0)
        widths += [width] * (width > 0)
        lost += taken - 1.0
        total += taken
    return widths, lost / total


@pytest.mark.parametrize("slope", [0.0, 0.02, 0.3, 2.0])
def test_trials_lose_a_hundredth_of_the_time_at_most(slope: float) -> None:
    widths, share = tried(StepTimes(), slope)
    assert widths[0] == 4
    assert share <= 0.0101
    if slope < 1.0:
        assert {8, 16, 32, 64} & set(widths)


def test_a_size_that_was_slow_once_is_tried_again() -> None:
    """Three passes of eight nodes met a slow moment; what they say does not stand for ever."""
    times = curve(0.01)
    for _ in range(3):
        times.put(8, 64, 8.0)
    times._weight[0, NODES.index(8)] = 3.0
    assert 8 in tried(times, 0.01)[0]
    assert times.ms(8, 64) < 1.5


def test_trials_do_not_follow_each_other() -> None:
    times: Any = StepTimes()
    times.spare_ms = 1000.0
    widths, _ = tried(times, 0.1, passes=40)
    assert len(widths) <= 40 // 8


@pytest.mark.parametrize(("repeats", "most"), [(0.0, 0.0), (0.05, 0.006), (0.5, 0.06)])
def test_trials_lose_a_tenth_of_what_drafts_would_have_saved(repeats: float, most: float) -> None:
    """Where that is counted; nothing at all in a text that does not repeat."""
    widths, share = tried(StepTimes(), 0.3, repeats=repeats)
    assert share <= most
    assert bool(widths) == (repeats > 0.0)


def test_what_a_trial_leaves_to_be_replayed_is_part_of_its_loss() -> None:
    """Four nodes and a replay of two each took 3 ms more than two passes over one."""
    times, limits = curve(0.0, step=3.0), Limits(replays=True)
    costs = PassCosts(times, limits, None, 65, 1)
    trials = Trials(costs)
    for passed, again in enumerate((0, 0, 2, 0)):
        limits.again = again
        costs.open(64)
        costs.read()
        costs.read_trees()
        assert trials.width == 0
        taken = 4.0 if passed in (1, 2) else 1.0
        trials.observe(passed == 1, taken, 1.0)
        costs.observe(1, 1.0, 0.0, 1.0)
    assert times.spare_ms == pytest.approx(0.01 * 10.0 - 3.0 - 3.0)
