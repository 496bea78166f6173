"""Latency curves as data and in files."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.curves import measured
from helpers.models import tiny_model
from helpers.toy import examples
from hypothesis import given
from hypothesis import strategies as st

from jacobi import LookaheadError
from lookahead import tuning
from lookahead.draft.latency import NODES, StepTimes


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


@pytest.mark.parametrize("name", BAD)
def test_other_data_is_refused(name: str, tmp_path: Path, curves: Path) -> None:
    """By name from ``load``; ``cached`` does as if it were not there."""
    with pytest.raises(LookaheadError, match="step-time curve"):
        StepTimes.from_dict(BAD[name])
    file = tmp_path / "curve.json"
    file.write_text(json.dumps(BAD[name]))
    with pytest.raises(LookaheadError, match="step-time curve"):
        StepTimes.load(file)
    curves.mkdir()
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
def test_unreadable_files(content: bytes, tmp_path: Path, curves: Path) -> None:
    curves.mkdir()
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
