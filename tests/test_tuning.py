"""The step-time curve: what it learns, how it is kept, and that no file of anyone else's can harm."""

import itertools
import json
import multiprocessing
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.hybrids import hybrid
from helpers.models import F32, counting_model, fresh_model, tiny_model
from helpers.toy import examples
from hypothesis import given
from hypothesis import strategies as st

from jacobi import LookaheadError
from lookahead import tuning
from lookahead.draft.latency import NODES, StepTimes
from lookahead.generation.curves import step_times
from lookahead.runtime.tracing.record import traces_for

CURVES = st.lists(st.floats(0.1, 50.0), min_size=len(NODES), max_size=len(NODES))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of the test's own."""
    monkeypatch.setenv("LOOKAHEAD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def measured(cells: dict[int, float], context: int = 64, passes: int = 1, **settings: Any) -> StepTimes:
    times = StepTimes(**settings)
    for _ in range(passes):
        for nodes, ms in cells.items():
            times.add(nodes, context, ms)
    return times


# --- the curve ---------------------------------------------------------------------------------------------------


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
        assert times.weight(nodes, 64) == 1.0
    assert all(ms > 0.0 for ms in times.curve(64, 200))
    assert times.knows_single == (1 in cells)


def test_one_measurement_scales_the_whole_guess() -> None:
    guess, times = StepTimes().curve(64, 128), measured({16: 10.0})
    ratio = 10.0 / guess[15]
    assert times.curve(64, 128) == pytest.approx([ratio * value for value in guess])


def test_sizes_between_count_for_the_nearest() -> None:
    """Corrected by the form of the curve."""
    times = measured({8: 8.0, 12: 12.0})
    times.add(9, 64, 9.0)
    assert times.ms(8, 64) == pytest.approx(8.0)
    assert times.weight(8, 64) == 2.0
    times.add(500, 64, times.ms(500, 64))
    assert times.weight(128, 64) == 1.0


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
    assert times.weight(1, 64) == 1.0


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


# --- as data and in files ----------------------------------------------------------------------------------------


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


GOOD = measured({1: 1.0, 8: 2.0}).to_dict()
BAD: dict[str, Any] = {
    "list": [],
    "number": 3,
    "null": None,
    "text": "curve",
    "empty": {},
    "another format": GOOD | {"format": 2},
    "no format": {key: value for key, value in GOOD.items() if key != "format"},
    "other nodes": GOOD | {"nodes": [1, 2, 3]},
    "no nodes": GOOD | {"nodes": None},
    "about": GOOD | {"about": 3},
    "about text": GOOD | {"about": "model"},
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


@pytest.mark.parametrize("name", BAD)
def test_other_data_is_refused(name: str, tmp_path: Path, folder: Path) -> None:
    """By name from ``load``; ``cached`` does as if it were not there."""
    with pytest.raises(LookaheadError, match="step-time curve"):
        StepTimes.from_dict(BAD[name])
    file = tmp_path / "curve.json"
    file.write_text(json.dumps(BAD[name]))
    with pytest.raises(LookaheadError, match="step-time curve"):
        StepTimes.load(file)
    folder.mkdir()
    tuning.cache_file(tuning.describe(tiny_model("llama"))).write_text(json.dumps(BAD[name]))
    assert tuning.cached(tiny_model("llama")) is None


HUGE = json.dumps(GOOD | {"cells": [[0, 0, 10**400, 1.0]]}).encode()
FILES: dict[str, bytes] = {
    "nothing": b"",
    "half": json.dumps(GOOD).encode()[:40],
    "binary": bytes(range(256)),
    "words": b"hello",
    "huge": HUGE,
    "deep": b"[" * 200_000,
}


@pytest.mark.parametrize("content", FILES.values(), ids=FILES)
def test_unreadable_files(content: bytes, tmp_path: Path, folder: Path) -> None:
    folder.mkdir()
    tuning.cache_file(tuning.describe(tiny_model("llama"))).write_bytes(content)
    assert tuning.cached(tiny_model("llama")) is None
    file = tmp_path / "curve.json"
    file.write_bytes(content)
    with pytest.raises(LookaheadError):
        StepTimes.load(file)


def test_a_missing_file_or_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere.json", "no\0where"):
        with pytest.raises(LookaheadError, match=r"holds no step-time curve.*lookahead tune"):
            StepTimes.load(path)


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


def write_often(file: Path, number: int, count: int) -> None:
    times = measured(dict.fromkeys(NODES, float(number)), about={"writer": number, "long": "x" * 20_000})
    for _ in range(count):
        times.save(file)


def read_until(file: Path, done: Any) -> Iterator[int]:
    while not done():
        times = StepTimes.load(file)
        assert len(times.about["long"]) == 20_000
        assert times.ms(8, 64) == times.about["writer"]
        yield times.about["writer"]


def test_threads_that_write_at_once(tmp_path: Path) -> None:
    """A reader sees a whole file of one of them, always."""
    file = tmp_path / "curve.json"
    write_often(file, 1, 1)
    writers = [threading.Thread(target=write_often, args=(file, number, 40)) for number in (1, 2, 3)]
    for writer in writers:
        writer.start()
    seen = list(read_until(file, lambda: not any(writer.is_alive() for writer in writers)))
    for writer in writers:
        writer.join()
    assert set(seen) <= {1, 2, 3}
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.skipif(os.name == "nt", reason="processes are forked")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_processes_that_write_at_once(tmp_path: Path) -> None:
    file = tmp_path / "curve.json"
    write_often(file, 1, 1)
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_often, args=(file, number, 30)) for number in (1, 2)]
    for writer in writers:
        writer.start()
    seen = list(read_until(file, lambda: not any(writer.is_alive() for writer in writers)))
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert set(seen) <= {1, 2}
    assert list(tmp_path.iterdir()) == [file]


# --- where curves are kept, and under what -----------------------------------------------------------------------


def test_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOOKAHEAD_CACHE", str(tmp_path / "a"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    monkeypatch.setenv("HOME", str(tmp_path / "c"))
    assert tuning.cache_folder() == tmp_path / "a"
    assert tuning.cache_file({}).parent == tmp_path / "a"
    monkeypatch.setenv("LOOKAHEAD_CACHE", "")
    assert tuning.cache_folder() == tmp_path / "b" / "lookahead"
    monkeypatch.delenv("LOOKAHEAD_CACHE")
    assert tuning.cache_folder() == tmp_path / "b" / "lookahead"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    if os.name != "nt":
        assert tuning.cache_folder() == tmp_path / "c" / ".cache" / "lookahead"


def test_no_home_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("LOOKAHEAD_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert tuning.cached(tiny_model("llama")) is None


def key_of(model: Any, batch: int = 1) -> Path:
    return tuning.cache_file(tuning.describe(model, batch))


def test_the_key_is_all_that_the_curve_depends_on() -> None:
    model = tiny_model("llama")
    threads = torch.get_num_threads()
    others = {
        "model": tiny_model("qwen3"),
        "dtype": fresh_model("llama").to(F32),
        "attention": fresh_model("llama", attn_implementation="eager"),
        "layers": fresh_model("llama", num_hidden_layers=1),
        "width": fresh_model("llama", intermediate_size=64),
        "heads": tiny_model("llama_mha"),
        "vocabulary": fresh_model("llama", vocab_size=64),
    }
    others["attention"].set_attn_implementation("eager")
    keys = {name: key_of(other) for name, other in others.items()} | {
        "itself": key_of(model),
        "batch": key_of(model, 2),
    }
    torch.set_num_threads(threads + 1)
    try:
        keys["threads"] = key_of(model)
    finally:
        torch.set_num_threads(threads)
    assert len(set(keys.values())) == len(keys), keys
    assert key_of(model) == keys["itself"]


def test_weights_and_special_tokens_are_not_in_the_key() -> None:
    model = tiny_model("llama")
    assert key_of(fresh_model("llama", seed=5)) == key_of(model)
    assert key_of(fresh_model("llama", eos_token_id=5, bos_token_id=1)) == key_of(model)
    assert key_of(fresh_model("llama", eos_token_id=[5, 6])) == key_of(model)
    assert json.dumps(tuning.describe(model))


def test_saving_a_model_does_not_change_its_key(tmp_path: Path) -> None:
    model = fresh_model("llama")
    before = key_of(model)
    model.save_pretrained(tmp_path)
    assert key_of(model) == before
    loaded = type(model).from_pretrained(tmp_path, dtype=model.dtype)
    assert key_of(loaded) == before


def test_a_saved_curve_is_found_by_later_calls(folder: Path) -> None:
    model = fresh_model("llama")
    assert tuning.cached(model) is None
    curve = measured({1: 1.0, 8: 2.0})
    curve.save(key_of(model))
    found = tuning.cached(model)
    assert found is not None and found.to_dict() == curve.to_dict()
    assert not found.frozen, "it is corrected by the passes"
    assert tuning.cached(model, 2) is None
    memory: dict[Any, StepTimes] = {}
    assert step_times(model, 1, memory, None).to_dict() == curve.to_dict()
    assert step_times(model, 1, memory, None) is next(iter(memory.values()))
    assert step_times(model, 2, memory, None).ms(8, 64) == 0.0
    assert step_times(model, 1, memory, curve) is curve
    assert len(memory) == 2


# --- measuring ---------------------------------------------------------------------------------------------------


def test_sweep(folder: Path) -> None:
    model = counting_model()
    told: list[float] = []
    state = torch.get_rng_state()
    times = tuning.sweep(model, nodes=(1, 4, 16), contexts=(20, 300), seconds=0.02, report=told.append)
    assert torch.equal(torch.get_rng_state(), state), "no draw of the user's"
    for context in (20, 300):
        assert all(times.weight(nodes, context) > 0 and times.ms(nodes, context) > 0 for nodes in (1, 4, 16))
        assert times.weight(64, context) == 0
    assert told == sorted(told) and told[-1] == 1.0 and len(told) > 6
    assert all(0.0 <= share <= 1.0 for share in told)
    assert list(folder.iterdir()) == [key_of(model)], "the curve and no leftovers"
    saved = tuning.cached(model)
    assert saved is not None and saved.to_dict() == times.to_dict()
    assert saved.about == tuning.describe(model)


def test_sweep_of_traced_passes(folder: Path) -> None:
    """They have a curve of their own, which calls take that have traces."""
    model = fresh_model("llama")
    tuning.sweep(model, nodes=(1, 4), contexts=(20,), seconds=0.01)
    times = tuning.sweep(model, nodes=(1, 4), contexts=(20,), seconds=0.01, traced=True)
    assert len(list(folder.iterdir())) == 2
    saved = tuning.cached(model, traced=True)
    assert saved is not None and saved.to_dict() == times.to_dict()
    own = tuning.cached(model)
    assert own is not None and own.about | {"traced": True} == saved.about
    with torch.no_grad():
        traces = traces_for(model, 1)
    assert traces is not None and {kind.single for kind in traces.made} == {True, False}
    assert step_times(model, 1, {}, None, traces=traces).to_dict() == times.to_dict()
    assert step_times(model, 1, {}, None).to_dict() == own.to_dict()
    traces.made = {kind: trace for kind, trace in traces.made.items() if kind.single}
    assert not step_times(model, 1, {}, None, traces=traces).knows_single, "a mixture is learnt from passes"


def test_sweep_where_traces_turn_out_to_be_wrong(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is saved as traced that was not; and what was found wrong is not made again."""
    model = fresh_model("llama")
    measure = tuning._measure

    def failing(*args: Any) -> Any:
        with torch.no_grad():
            found = traces_for(model, 1)
        assert found is not None
        found.fail("wrong")
        return measure(*args)

    monkeypatch.setattr(tuning, "_measure", failing)
    for _ in range(2):
        with pytest.raises(LookaheadError, match="cannot be traced: wrong"):
            tuning.sweep(model, nodes=(1, 4), contexts=(20,), seconds=0.01, traced=True)
    assert not folder.exists()


def test_sweep_of_what_cannot_be_traced(folder: Path) -> None:
    model = tiny_model("llama")
    hook = model.model.register_forward_hook(lambda *_: None)
    with pytest.raises(LookaheadError, match="cannot be traced: other code"):
        tuning.sweep(model, nodes=(1, 4), contexts=(20,), seconds=0.01, traced=True)
    hook.remove()
    with pytest.raises(LookaheadError, match=r"cannot be traced: .* recurrent"):
        tuning.sweep(hybrid("lfm2"), nodes=(1, 4), contexts=(20,), seconds=0.01, traced=True)
    assert not folder.exists()


def test_sweep_without_saving_and_with_a_batch(folder: Path) -> None:
    times = tuning.sweep(counting_model(), batch=3, nodes=(1, 8), contexts=(20,), seconds=0.01, save=False)
    assert times.about["batch"] == 3
    assert times.ms(8, 20) > 0.0
    assert not folder.exists()


@pytest.mark.parametrize("name", ["gpt2", "mistral", "gemma3"])
def test_sweep_of_models_with_few_positions_and_windows(name: str, folder: Path) -> None:
    """Contexts that the model has no positions for are left out, or shortened if none is left."""
    times = tuning.sweep(tiny_model(name), nodes=(1, 16), contexts=(30, 10_000), seconds=0.01)
    assert {context for context, _ in times._mean} == {0}
    times = tuning.sweep(tiny_model(name), nodes=(1, 16), contexts=(10_000,), seconds=0.01)
    assert times.ms(16, 1) > 0.0


def test_sweep_of_a_gpt2_with_all_sizes(folder: Path) -> None:
    """More nodes than positions: the tree is flat."""
    assert tuning.sweep(tiny_model("gpt2"), seconds=0.01).ms(128, 1) > 0.0


def test_sweep_refuses_what_lookahead_refuses(folder: Path) -> None:
    model = fresh_model("llama")
    model.config.is_encoder_decoder = True
    with pytest.raises(LookaheadError):
        tuning.sweep(model, seconds=0.01)
    assert not folder.exists()


def test_passes_with_static_shapes_have_a_curve_of_their_own() -> None:
    model = tiny_model("llama")
    assert tuning.describe(model, static=True)["static"] is True
    assert tuning.describe(model, static=False) == tuning.describe(model, static=None), "as on any CPU"
    measured = tuning.sweep(model, static=True, nodes=(1, 4), contexts=(16,), seconds=0.01)
    assert measured.ms(4, 16) > 0.0
    assert tuning.cached(model) is None
    kept = tuning.cached(model, static=True)
    assert kept is not None and kept.ms(4, 16) == measured.ms(4, 16)
    memory: dict[Any, StepTimes] = {}
    step_times(model, 1, memory, None)
    assert step_times(model, 1, memory, None, static=True) is not next(iter(memory.values()))


@given(st.floats(1.0, 50.0), st.floats(0.0, 3.0), st.sampled_from(NODES[1:-1]))
def test_past_the_largest_measured_size_a_curve_does_not_go_flat(first: float, slope: float, largest: int) -> None:
    """It may be a guess there, but not one that whatever costs up to here costs nothing from here on."""
    times = StepTimes()
    for nodes in (1, largest):
        times.add(nodes, 64, first + slope * (nodes - 1))
    curve = times.curve(64, 128)
    assert curve[largest - 1] == pytest.approx(first + slope * (largest - 1))
    assert curve[127] - curve[largest - 1] >= 0.49 * slope * (128 - largest)


def test_what_other_contexts_know_of_larger_sizes_is_kept() -> None:
    times = StepTimes()
    for nodes in NODES:
        times.add(nodes, 64, 10.0 + 2.0 * nodes)
    times.add(1, 1000, 24.0)
    assert times.ms(128, 1000) == pytest.approx(2.0 * times.ms(128, 64))
