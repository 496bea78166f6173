"""Latency curves: guesses, measurements, contexts and outliers."""

import itertools

import pytest
from helpers.curves import measured
from helpers.toy import examples
from hypothesis import given
from hypothesis import strategies as st

from lookahead.draft.latency import NODES, StepTimes

CURVES = st.lists(st.floats(0.1, 50.0), min_size=len(NODES), max_size=len(NODES))


def test_what_rows_cost_stands_above_what_every_pass_takes() -> None:
    times = StepTimes(costs={1: 10.0, 4: 13.0, 16: 25.0})
    assert times.curve(64, 32) == pytest.approx([10.0 + nodes for nodes in range(32)])
    times.add(1, 64, 50.0)
    assert times.curve(64, 32) == pytest.approx([50.0 + nodes for nodes in range(32)])
    for _ in range(4):
        times.add(8, 64, 114.0)
    assert times.ms(8, 64) == pytest.approx(114.0)
    assert times.ms(32, 64) > 140.0, "larger ones keep the form"
    flat = StepTimes(costs={1: 10.0, 4: 9.0, 16: 8.0})
    assert flat.curve(64, 128) == pytest.approx([10.0] * 128), "several are never taken to cost less than one"


def test_an_empty_curve_is_a_guess_relative_to_one_node() -> None:
    times = StepTimes()
    curve = times.curve(100, 200)
    assert len(curve) == 200
    assert curve[0] == 1.0
    assert curve == sorted(curve)
    assert times.ms(1, 100) == times.ms(64, 100) == 0.0
    assert times.weight(1, 100) == 0.0
    assert not times.knows_single


@pytest.mark.parametrize("most", [1, 2, 3, 16, 128, 129, 300])
def test_a_curve_has_as_many_entries_as_asked_for(most: int) -> None:
    assert len(StepTimes().curve(0, most)) == len(measured({4: 2.0}).curve(0, most)) == most


@examples(60)
@given(CURVES, st.sampled_from([1, 300, 5000]))
def test_the_curve_goes_through_what_was_measured(ms: list[float], context: int) -> None:
    """And is linear in between, never falling beyond."""
    cells = dict(zip(NODES, ms, strict=True))
    times = measured(cells, context)
    curve = times.curve(context, 160)
    for nodes, expected in cells.items():
        assert curve[nodes - 1] == pytest.approx(expected)
        assert times.ms(nodes, context) == pytest.approx(expected)
    for low, high in itertools.pairwise(NODES):
        for nodes in range(low, high):
            share = (nodes - low) / (high - low)
            assert curve[nodes - 1] == pytest.approx(cells[low] * (1 - share) + cells[high] * share)
    for nodes in range(1, 161):
        assert times.ms(nodes, context) == pytest.approx(curve[nodes - 1])
    assert curve[127:] == sorted(curve[127:])


@examples(60)
@given(st.dictionaries(st.sampled_from(NODES), st.floats(0.1, 50.0), min_size=1))
def test_a_few_measurements_bend_the_guess(cells: dict[int, float]) -> None:
    times = measured(cells)
    for nodes, expected in cells.items():
        assert times.ms(nodes, 64) == pytest.approx(expected)
        assert times.weight(nodes, 64) == 3.5
    assert all(ms > 0.0 for ms in times.curve(64, 200))
    assert times.knows_single == (1 in cells)


def test_one_measurement_scales_the_whole_guess() -> None:
    guess, times = StepTimes().curve(64, 128), measured({16: 10.0})
    ratio = 10.0 / guess[15]
    assert times.curve(64, 128) == pytest.approx([ratio * value for value in guess])


def test_a_guess_keeps_its_form_as_it_is_bent() -> None:
    """Traces make passes over one node twice as fast: those over several may be so, too, until one was measured."""
    before = measured({1: 20.0, 4: 24.0, 16: 30.0, 64: 70.0})
    times = before.as_guess()
    assert times.curve(64, 80) == pytest.approx(before.curve(64, 80))
    assert (times.weight(1, 64), times.largest) == (0.0, 64)
    for _ in range(4):
        times.add(1, 64, 10.0)
    assert times.curve(64, 80) == pytest.approx([ms / 2 for ms in before.curve(64, 80)])
    for _ in range(4):
        times.add(16, 64, 27.0)
    assert [times.ms(nodes, 64) for nodes in (1, 16)] == pytest.approx([10.0, 27.0])
    assert times.ms(64, 64) == pytest.approx(70.0 * 27.0 / 30.0)
    times.add(1, 3000, 11.0)  # elsewhere, what is known here tells more than a guess
    assert times.ms(64, 3000) == pytest.approx(70.0 * 27.0 / 30.0 * 11.0 / 10.0)


def test_sizes_between_count_for_the_nearest() -> None:
    """Corrected by the form of the curve."""
    times = measured({8: 8.0, 12: 12.0})
    times.add(9, 64, 9.0)
    assert times.ms(8, 64) == pytest.approx(8.0)
    assert times.weight(8, 64) == 4.0
    times.add(500, 64, times.ms(500, 64))
    assert times.weight(128, 64) == 0.5, "the first pass of a size tells little"


def test_contexts_have_curves_of_their_own_and_help_each_other() -> None:
    times = measured({1: 1.0, 8: 2.0}, context=64)
    assert times.ms(8, 5000) == pytest.approx(2.0), "nothing is known there: as near by"
    times.add(1, 5000, 3.0)
    assert times.ms(1, 5000) == pytest.approx(3.0)
    assert times.ms(8, 5000) == pytest.approx(6.0), "the form of the other curve, scaled"
    assert times.ms(8, 64) == pytest.approx(2.0)
    assert times.weight(8, 5000) == 0.0


def test_the_nearest_context_counts_most() -> None:
    times = measured({1: 1.0}, context=64)
    times.add(1, 100_000, 9.0)
    assert times.ms(1, 300) == pytest.approx(1.0)
    assert times.ms(1, 60_000) == pytest.approx(9.0)


@pytest.mark.parametrize("ms", [0.0, -1.0, float("nan")])
def test_impossible_times_are_not_taken_in(ms: float) -> None:
    times = measured({1: 1.0})
    times.add(1, 64, ms)
    assert times.ms(1, 64) == 1.0
    assert times.weight(1, 64) == 3.5


def test_estimates_are_means_that_follow() -> None:
    times = measured({1: 1.0, 8: 2.0}, passes=30)
    assert times.ms(8, 64) == pytest.approx(2.0)
    for _ in range(60):
        times.add(8, 64, 2.6)
    assert times.ms(8, 64) == pytest.approx(2.6, rel=0.02)


def test_one_outlier_moves_little() -> None:
    for odd in (1000.0, 0.001):
        times = measured({1: 1.0, 8: 2.0}, passes=12)
        times.add(8, 64, odd)
        assert times.ms(8, 64) == pytest.approx(2.0, rel=0.2)
        assert times.ms(1, 64) == pytest.approx(1.0, rel=0.1)


def test_the_first_outlier_is_corrected_soon() -> None:
    times = StepTimes()
    times.add(8, 64, 20.0)
    for _ in range(40):
        times.add(8, 64, 2.0)
    assert times.ms(8, 64) == pytest.approx(2.0, rel=0.2)


def test_the_first_outlier_at_a_size_leaves_others_alone() -> None:
    """The first pass at a size is often slow (kernels are chosen, buffers are made); the machine is what it was."""
    times = measured({1: 1.0, 64: 8.0}, passes=12)
    times.add(8, 64, 20.0)
    for _ in range(20):
        times.add(8, 64, 2.0)
        assert times.ms(1, 64) > 0.7


def test_a_slower_machine_scales_all_sizes() -> None:
    """What is seen at one size is in part put down to the machine, so others do not look cheap beside it."""
    times = measured({1: 1.0, 8: 2.0, 64: 8.0}, passes=12)
    for _ in range(4):
        times.add(8, 64, 4.0)
    grown = {nodes: times.ms(nodes, 64) / before for nodes, before in ((1, 1.0), (8, 2.0), (64, 8.0))}
    assert grown[1] == pytest.approx(grown[64])
    assert 1.1 < grown[1] < grown[8] < 2.0
    for _ in range(50):
        times.add(8, 64, 2.0)
    assert times.ms(8, 64) == pytest.approx(2.0, rel=0.05)
    assert times.ms(1, 64) < 1.1, "and back"


def test_frozen_learns_nothing() -> None:
    times = measured({1: 1.0, 8: 2.0})
    frozen = times.as_frozen()
    assert frozen.frozen and not times.frozen
    for _ in range(20):
        frozen.add(8, 64, 9.0)
        frozen.add(1, 64, 9.0)
    assert frozen.curve(64, 128) == times.curve(64, 128)
    times.add(8, 64, 4.0)
    assert frozen.ms(8, 64) == 2.0, "a copy"
    assert measured({1: 1.0}, frozen=True).ms(1, 64) == 0.0


@given(st.floats(1.0, 50.0), st.floats(0.0, 3.0), st.sampled_from(NODES[1:-1]))
def test_past_the_largest_measured_size_a_curve_does_not_go_flat(first: float, slope: float, largest: int) -> None:
    """It may be a guess there, but not one that whatever costs up to here costs nothing from here on."""
    times = measured({nodes: first + slope * (nodes - 1) for nodes in (1, largest)})
    curve = times.curve(64, 128)
    assert curve[largest - 1] == pytest.approx(first + slope * (largest - 1))
    assert curve[127] - curve[largest - 1] >= 0.49 * slope * (128 - largest)


def test_what_other_contexts_know_of_larger_sizes_is_kept() -> None:
    times = measured({nodes: 10.0 + 2.0 * nodes for nodes in NODES})
    times.add(1, 1000, 24.0)
    assert times.ms(128, 1000) == pytest.approx(2.0 * times.ms(128, 64))


def test_one_slow_pass_does_not_rule_a_size_out() -> None:
    times = measured({1: 10.0, 4: 11.0, 16: 13.0})
    times.add(8, 64, 36.0)
    assert times.ms(8, 64) < 15.0
    for _ in range(3):
        times.add(8, 64, 36.0)
    assert times.ms(8, 64) == pytest.approx(36.0), "four do"


def test_first_passes_may_all_have_been_slow() -> None:
    times = measured({1: 10.0, 8: 40.0})
    times.add(8, 64, 12.0)
    assert times.ms(8, 64) == pytest.approx(12.0)


def test_kernels_that_take_six_rows_at_a_time() -> None:
    """The seventh row costs as much as many: passes over five to eight tell on which side of it trees pay."""
    times = measured({1: 46.0, 4: 45.0})
    for _ in range(8):
        for nodes, ms in ((5, 47.0), (6, 49.0), (7, 61.0), (8, 65.0)):
            times.add(nodes, 64, ms)
    curve = times.curve(64, 8)
    assert curve[5] == pytest.approx(49.0, rel=0.02)
    assert curve[6] - curve[5] > 2.0 * (curve[5] - curve[4])


def test_a_curve_of_a_loaded_machine_is_soon_put_right() -> None:
    saved = StepTimes()
    saved.put(1, 100, 3000.0)
    saved.put(4, 100, 3500.0)
    for _ in range(2):
        saved.doubt().add(1, 100, 50.0)
    assert saved.ms(1, 100) == pytest.approx(50.0)
