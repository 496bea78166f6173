"""Sources that cost time: asked where they pay, left alone where they do not, and never a part of the curve."""

import random
from typing import Any

import pytest
from helpers.automatic import Oracle
from helpers.models import counting_model, prompts, same_as_plain, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from lookahead import Lookahead
from lookahead.draft.context import RowContext
from lookahead.draft.guard import ExpensiveSources
from lookahead.draft.latency import NODES, StepTimes
from lookahead.sources import RecyclingSource, SuccessorTable
from lookahead.sources.base import is_expensive

pytestmark = pytest.mark.usefixtures("augmented")


class Knows(Oracle):
    """Says that every answer took a while."""

    name = "knows"
    cost_ms = 0.0
    asked = 0

    def __init__(self, row: RowContext) -> None:
        super().__init__(row)
        self.spent_ms = 0.0
        type(self).asked = 0

    def root(self) -> Any:
        return self.last, True

    def step(self, state: Any, token: int) -> Any:
        return token, False

    def propose(self, state: Any) -> list[tuple[int, int]]:
        if state[1]:
            self.spent_ms += self.cost_ms
            type(self).asked += 1
        return super().propose(state[0])


class Cheap(Knows):
    cost_ms = 1e-6


class Dear(Knows):
    cost_ms = 1e6


class Clueless(Knows):
    """Takes as long as several passes, and is always wrong."""

    name = "clueless"
    priors = (0.3,)
    cost_ms = 1e5

    def propose(self, state: Any) -> list[tuple[int, int]]:
        super().propose(state)
        return [(8, 0)]


def decoded(*sources: Any, batch: int = 1, **settings: Any) -> Any:
    strategy = Lookahead(sources=sources, seed=0, **settings)
    return same_as_plain(counting_model(), prompts(batch), strategy, max_new_tokens=160).stats


def test_what_costs_nothing_is_asked() -> None:
    stats = decoded(Cheap)
    assert stats.mean_acceptance_length > 3
    assert Cheap.asked > stats.steps / 3  # the first ones are measured without it


def test_what_costs_more_than_it_brings_is_left_alone() -> None:
    """Others draft without it."""
    stats = decoded("recycling", Dear)
    assert stats.mean_acceptance_length > 3
    assert Dear.asked <= 12  # twice at each of four levels, and now and then again
    decoded("recycling", Clueless)
    assert Clueless.asked <= 12


@pytest.mark.parametrize("batch", [1, 3])
def test_with_a_frozen_curve_choices_repeat(batch: int) -> None:
    """What asking takes is measured, so it is then left out of the choice."""
    flat = StepTimes()
    for nodes in NODES:
        flat.put(nodes, 64, 1.0)
    runs = [decoded("recycling", kind, batch=batch, tuning=flat) for kind in (Dear, Cheap, Dear)]
    assert len({run.steps for run in runs}) == 1
    assert Dear.asked > 0


def test_a_batch_counts_the_cost_into_its_passes() -> None:
    assert decoded(Dear, batch=2).mean_acceptance_length < 1.5
    assert decoded(Cheap, batch=2).mean_acceptance_length > 3


@pytest.mark.parametrize("kind", [Cheap, Dear])
@pytest.mark.parametrize("settings", [{}, {"do_sample": True, "temperature": 0.7}, {"repetition_penalty": 1.2}])
def test_the_text_is_plain_decodings(kind: Any, settings: dict[str, Any]) -> None:
    for batch in (1, 2):
        strategy = Lookahead(sources=("recycling", "pool", kind))
        same_as_plain(tiny_model("llama"), prompts(batch), strategy, max_new_tokens=40, **settings)


def test_who_is_expensive() -> None:
    row = RowContext([1, 2], 9, 0, frozenset(), random.Random(0))
    expensive, free = Dear(row), RecyclingSource(SuccessorTable())
    assert is_expensive(expensive)
    assert not is_expensive(free)


@given(st.lists(st.tuples(st.floats(0.0, 6.0), st.floats(0.1, 3.0)), max_size=60))
def test_every_level_is_tried_and_judged_by_its_own_gains(trials: list[tuple[float, float]]) -> None:
    expensive, gains = ExpensiveSources(), dict[int, list[float]]()
    for expected, gain in trials:
        before = gains.setdefault(sum(expected >= step for step in (0.3, 1.0, 2.5)), [])
        pays = expensive.pay(expected)
        if min(before, default=gain) > 1.05 or not before:
            assert pays
        if pays:
            expensive.learn(expected, gain)
            before.append(gain)


def test_one_bad_trial_is_no_verdict() -> None:
    """What heads promise in a single pass varies, and a level that was given up is not looked at for long."""
    expensive = ExpensiveSources()
    expensive.learn(0.5, 0.8)
    assert expensive.pay(0.5)
    for _ in range(3):
        expensive.learn(0.5, 0.8)
    assert not expensive.pay(0.5)


def test_a_level_that_does_not_pay_is_tried_again_ever_more_seldom() -> None:
    expensive = ExpensiveSources()
    for _ in range(8):
        expensive.learn(0.5, 0.7)
    tried = [expensive.pay(0.5) for _ in range(97)]
    assert [place for place, pays in enumerate(tried) if pays] == [4, 13, 30, 63, 96]
    assert expensive.pay(2.0)  # another level
    for _ in range(12):  # things have changed
        expensive.learn(0.5, 2.0)
    assert expensive.pay(0.5)


def test_the_cost_follows_what_runs_take_but_not_their_outliers() -> None:
    expensive = ExpensiveSources()
    for ms in (30.0, 2.0, 2.2, 0.0):
        expensive.time.observe(ms)
    assert expensive.time.ms == 2.2
    expensive.time.observe(500.0)
    assert expensive.time.ms == 2.2
    for _ in range(9):
        expensive.time.observe(4.0)
    assert expensive.time.ms == 4.0
