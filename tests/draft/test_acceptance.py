"""Estimates of acceptance: priors, disputes, calibration, and how they follow what is observed."""

import math

import pytest
from helpers.drafting import SLOTS, TableSource
from helpers.refusals import refuses
from helpers.toy import examples, seeded
from hypothesis import given
from hypothesis import strategies as st

from lookahead.draft.acceptance import Acceptance
from lookahead.sources.base import CheckedSource


def count(acceptance: Acceptance, offered: dict[int, list[int]], token: int) -> None:
    """Let ``token`` have been right."""
    acceptance.count(offered, [float(candidate == token) for candidate in offered])


def lone(acceptance: Acceptance, slot: int) -> float:
    """The chance of a candidate without rivals."""
    return acceptance.chances({1: [slot]})[0]


def source(*priors: float, name: str = "one") -> TableSource:
    return TableSource(name, {}, priors)


@pytest.mark.parametrize("prior", [0.0, 1.0, -0.1, 1.5, float("nan")])
def test_priors_are_shares(prior: float) -> None:
    refuses("Source 'odd' has the prior", CheckedSource, source(0.5, prior, name="odd"), 99)


def test_weights_start_from_priors_and_calibration_from_trust() -> None:
    acceptance = Acceptance([source(0.2, 0.6), source(0.4, name="two")])
    assert acceptance.offsets == [0, 2 * SLOTS]
    assert len(acceptance.weights) == 3 * SLOTS
    for kind, prior in enumerate((0.2, 0.6, 0.4)):
        assert lone(acceptance, kind * SLOTS) == pytest.approx(prior)
    assert Acceptance([source(0.5)]).calibration == 1.0
    assert Acceptance([source(0.5)], 0.25).calibration == 0.25


@examples(60)
@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), max_size=6))
def test_chances_are_shares_of_the_odds(candidates: list[list[int]]) -> None:
    acceptance = Acceptance([source(0.2, 0.6), source(0.4, name="two")])
    odds = [math.prod(math.exp(acceptance.weights[slot]) for slot in slots) for slots in candidates]
    chances = acceptance.chances(dict(enumerate(candidates)))
    assert chances == pytest.approx([each / (1 + sum(odds)) for each in odds])


def test_agreement_raises_a_chance_and_rivals_lower_it() -> None:
    acceptance = Acceptance([source(0.3), source(0.4, name="two")])
    alone, agreed = acceptance.chances({1: [0]}), acceptance.chances({1: [0, SLOTS + 1]})
    contradicted = acceptance.chances({1: [0], 2: [SLOTS]})
    assert contradicted[0] < alone[0] < agreed[0]


@examples(60)
@given(st.floats(0.05, 0.95), st.lists(st.booleans(), min_size=1, max_size=60))
def test_a_trial_moves_the_estimate_towards_what_was_right(prior: float, trials: list[bool]) -> None:
    acceptance = Acceptance([source(prior, 0.5)])
    others = acceptance.weights[1:]
    for right in trials:
        before = lone(acceptance, 0)
        count(acceptance, {1: [0]}, 1 if right else 9)
        assert (lone(acceptance, 0) > before) == right
    assert acceptance.weights[1:] == others, "of this slot only"


@pytest.mark.parametrize("right", [True, False])
def test_old_trials_fade(right: bool) -> None:
    """After thousands of one kind, hundreds of the other turn the estimate round."""
    acceptance = Acceptance([source(0.5)])
    for _ in range(5000):
        count(acceptance, {1: [0]}, 1 if right else 9)
    assert abs(lone(acceptance, 0) - right) < 0.02
    for _ in range(800):
        count(acceptance, {1: [0]}, 9 if right else 1)
    assert abs(lone(acceptance, 0) - (not right)) < 0.15


@examples(30)
@given(st.integers(0, 10**6), st.floats(0.05, 0.95))
def test_estimates_come_near_the_truth(seed: int, truth: float) -> None:
    acceptance, rng = Acceptance([source(0.5)]), seeded(seed)
    for _ in range(2000):
        count(acceptance, {1: [0]}, 1 if rng.random() < truth else 9)
    assert abs(lone(acceptance, 0) - truth) < 0.2


@examples(20)
@given(st.integers(0, 10**6))
def test_who_is_right_in_a_dispute_is_learnt(seed: int) -> None:
    """Two sources that always disagree: whatever the priors say, the one that is right more often comes out ahead."""
    acceptance, rng = Acceptance([source(0.8), source(0.2, name="two")]), seeded(seed)
    for _ in range(2000):
        draw = rng.random()
        count(acceptance, {1: [0], 2: [SLOTS]}, 1 if draw < 0.2 else 2 if draw < 0.8 else 9)
    chances = acceptance.chances({1: [0], 2: [SLOTS]})
    assert chances == pytest.approx([0.2, 0.6], abs=0.2)
    assert chances[1] > chances[0]


def test_weights_stay_finite() -> None:
    acceptance = Acceptance([source(0.999999), source(1e-6, name="two")])
    for _ in range(3000):
        count(acceptance, {1: [0, SLOTS + 1]}, 1)
        count(acceptance, {2: [SLOTS]}, 9)
    assert all(map(math.isfinite, acceptance.weights))
    assert 0.0 <= lone(acceptance, SLOTS) < lone(acceptance, 0) <= 1.0


@examples(60)
@given(st.floats(0.1, 1.0), st.lists(st.tuples(st.floats(0.0, 20.0), st.integers(0, 20)), max_size=100))
def test_calibration_stays_between_what_it_has_seen(trust: float, passes: list[tuple[float, int]]) -> None:
    """Never negative, nor above the best ratio that any pass could explain."""
    acceptance = Acceptance([source(0.5)], trust)
    for expected, accepted in passes:
        acceptance.count_tree(expected, accepted)
        assert acceptance.calibration > 0.0
        assert acceptance._expected <= 40.0 + 1e-9


@pytest.mark.parametrize("share", [0.2, 1.0, 2.0])
def test_calibration_follows_the_ratio_of_late(share: float) -> None:
    acceptance = Acceptance([source(0.5)])
    for _ in range(300):
        acceptance.count_tree(5.0, 5)
    for _ in range(100):
        acceptance.count_tree(5.0, round(5 * share))
    assert acceptance.calibration == pytest.approx(share, abs=0.01)


def test_a_copy_goes_on_separately() -> None:
    first = Acceptance([source(0.5), source(0.3, name="two")])
    for _ in range(10):
        count(first, {1: [0]}, 1)
        first.count_tree(3.0, 1)
    second = first.copy(0.5)
    assert second.weights == first.weights
    assert second.calibration == 0.5
    weights, calibration = list(first.weights), first.calibration
    for _ in range(5):
        count(second, {1: [0], 2: [3]}, 2)
        second.count_tree(1.0, 4)
    assert first.weights == weights
    assert first.calibration == calibration
    assert second.weights[0] < first.weights[0]
