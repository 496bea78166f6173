"""Latency curves: guesses, measurements, contexts and outliers; as data and in files."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from helpers.curves import measured
from helpers.models import tiny_model
from helpers.refusals import refuses
from helpers.toy import examples
from hypothesis import given
from hypothesis import strategies as st

from lookahead import tuning
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
    """The nearest counts most, and what others know of larger sizes is kept."""
    times = measured({1: 1.0, 8: 2.0}, context=64)
    assert times.ms(8, 5000) == pytest.approx(2.0), "nothing is known there: as near by"
    times.add(1, 5000, 3.0)
    assert times.ms(1, 5000) == pytest.approx(3.0)
    assert times.ms(8, 5000) == pytest.approx(6.0), "the form of the other curve, scaled"
    assert times.ms(8, 64) == pytest.approx(2.0)
    assert times.weight(8, 5000) == 0.0
    times = measured({1: 1.0}, context=64)
    times.add(1, 100_000, 9.0)
    assert times.ms(1, 300) == pytest.approx(1.0)
    assert times.ms(1, 60_000) == pytest.approx(9.0)
    times = measured({nodes: 10.0 + 2.0 * nodes for nodes in NODES})
    times.add(1, 1000, 24.0)
    assert times.ms(128, 1000) == pytest.approx(2.0 * times.ms(128, 64))


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


def test_outliers() -> None:
    """One moves little; the first is corrected soon, and leaves other sizes alone: the first passes at a size are often
    slow (kernels are chosen, buffers are made); the machine is what it was."""
    for odd in (1000.0, 0.001):
        times = measured({1: 1.0, 8: 2.0}, passes=12)
        times.add(8, 64, odd)
        assert times.ms(8, 64) == pytest.approx(2.0, rel=0.2)
        assert times.ms(1, 64) == pytest.approx(1.0, rel=0.1)
    times = StepTimes()
    times.add(8, 64, 20.0)
    for _ in range(40):
        times.add(8, 64, 2.0)
    assert times.ms(8, 64) == pytest.approx(2.0, rel=0.2)
    times = measured({1: 1.0, 64: 8.0}, passes=12)
    times.add(8, 64, 20.0)
    for _ in range(20):
        times.add(8, 64, 2.0)
        assert times.ms(1, 64) > 0.7
    times = measured({1: 10.0, 4: 11.0, 16: 13.0})
    times.add(8, 64, 36.0)
    assert times.ms(8, 64) < 15.0
    for _ in range(3):
        times.add(8, 64, 36.0)
    assert times.ms(8, 64) == pytest.approx(36.0), "four do"
    times = measured({1: 10.0, 8: 40.0})
    times.add(8, 64, 12.0)
    assert times.ms(8, 64) == pytest.approx(12.0)


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


@st.composite
def curves(draw: st.DrawFn) -> StepTimes:
    times = StepTimes(about={"model": draw(st.text(max_size=5))})
    for _ in range(draw(st.integers(0, 30))):
        times.add(draw(st.integers(1, 200)), draw(st.integers(0, 9000)), draw(st.floats(0.01, 100.0)))
    return times


@examples(60)
@given(curves())
def test_there_and_back(times: StepTimes) -> None:
    data = json.loads(json.dumps(times.to_dict()))
    again = StepTimes.from_dict(data)
    for context in (0, 300, 9000):
        assert again.curve(context, 150) == pytest.approx(times.curve(context, 150))
        assert again.weight(8, context) == times.weight(8, context)
    assert again.about == times.about
    assert not again.frozen and StepTimes.from_dict(data, frozen=True).frozen
    assert StepTimes.from_dict(again.to_dict()).to_dict() == again.to_dict()


def test_through_a_file(tmp_path: Path) -> None:
    times, file = measured({1: 1.0, 8: 2.0}, about={"batch": 3}), tmp_path / "deep" / "er" / "curve.json"
    times.save(file)
    for path in (file, str(file)):
        again = StepTimes.load(path)
        assert again.to_dict() == times.to_dict()
        assert again.frozen, "by default a file is taken as it is"
    assert not StepTimes.load(file, frozen=False).frozen
    assert [path.name for path in file.parent.iterdir()] == ["curve.json"], "no leftovers"


def test_a_curve_that_was_saved_at_fewer_sizes() -> None:
    """Its entries name places among the sizes that the file lists."""
    about = {"batch": 1}
    old = {"format": 1, "nodes": [1, 2, 4, 8], "cells": [[0, 0, 1.0, 32.0], [0, 3, 3.0, 4.0]], "about": about}
    times = StepTimes.from_dict(old)
    assert (times.ms(1, 64), times.ms(8, 64)) == (1.0, 3.0)
    assert (times.weight(8, 64), times.weight(6, 64)) == (4.0, 0.0)
    assert times.ms(1, 64) < times.ms(6, 64) < times.ms(8, 64)
    assert StepTimes.from_dict(times.to_dict()).to_dict() == times.to_dict()


GOOD = measured({1: 1.0, 8: 2.0}).to_dict()
BAD: dict[str, Any] = {
    "list": [],
    "empty": {},
    "another format": GOOD | {"format": 2},
    "no format": {key: value for key, value in GOOD.items() if key != "format"},
    "other nodes": GOOD | {"nodes": [1, 2, 3]},
    "nodes of nodes": GOOD | {"nodes": [[1], [2]]},
    "place past its nodes": GOOD | {"nodes": [1, 2], "cells": [[0, 2, 1.0, 1.0]]},
    "no nodes": GOOD | {"nodes": None},
    "about": GOOD | {"about": 3},
    "cells": GOOD | {"cells": 3},
    "cell": GOOD | {"cells": [3]},
    "short cell": GOOD | {"cells": [[0, 0, 1.0]]},
    "words": GOOD | {"cells": [["a", "b", "c", "d"]]},
    "place": GOOD | {"cells": [[0, len(NODES), 1.0, 1.0]]},
    "negative place": GOOD | {"cells": [[0, -1, 1.0, 1.0]]},
    "negative context": GOOD | {"cells": [[-1, 0, 1.0, 1.0]]},
    "no time": GOOD | {"cells": [[0, 0, 0.0, 1.0]]},
    "negative time": GOOD | {"cells": [[0, 0, -1.0, 1.0]]},
    "endless": GOOD | {"cells": [[0, 0, float("inf"), 1.0]]},
    "nan": GOOD | {"cells": [[0, 0, float("nan"), 1.0]]},
    "weightless": GOOD | {"cells": [[0, 0, 1.0, 0.0]]},
    "nan weight": GOOD | {"cells": [[0, 0, 1.0, float("nan")]]},
}


UNREADABLE: dict[str, bytes] = {
    "nothing": b"",
    "half": json.dumps(GOOD).encode()[:40],
    "binary": bytes(range(256)),
    "hello": b"hello",
    "huge": json.dumps(GOOD | {"cells": [[0, 0, 10**400, 1.0]]}).encode(),
    "deep": b"[" * 200_000,
}
FILES = UNREADABLE | {name: json.dumps(data).encode() for name, data in BAD.items()}


@pytest.mark.parametrize("name", FILES)
def test_other_data_is_refused(name: str, tmp_path: Path, curves: Path) -> None:
    """By name from ``load``; ``cached`` does as if it were not there."""
    if name in BAD:
        refuses("step-time curve", StepTimes.from_dict, BAD[name])
    file = tmp_path / "curve.json"
    curves.mkdir()
    for path in (file, tuning.cache_file(tuning.describe(tiny_model("llama")))):
        path.write_bytes(FILES[name])
    refuses("step-time curve", StepTimes.load, file)
    assert tuning.cached(tiny_model("llama")) is None


def test_a_missing_file_or_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere.json", "no\0where"):
        refuses(r"holds no step-time curve.*lookahead tune", StepTimes.load, path)


def test_a_sweep_survives_a_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What was measured is not lost."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LOOKAHEAD_CACHE", str(tmp_path / "file"))
    times = tuning.sweep(tiny_model("llama"), contexts=(16,), seconds=0.01)
    assert times.ms(1, 16) > 0.0
    assert "The latency curve is not saved" in caplog.text


def test_a_failed_save_leaves_nothing(tmp_path: Path) -> None:
    file = tmp_path / "curve.json"
    measured({1: 1.0}).save(file)
    before = file.read_text()
    with pytest.raises(TypeError):
        measured({1: 2.0}, about={"object": object()}).save(file)
    assert file.read_text() == before
    assert list(tmp_path.iterdir()) == [file]
