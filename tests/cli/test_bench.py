"""``lookahead bench``: every method on every prompt, honest about texts, losses and time; what paired ratios say."""

import json
import os
import re
import subprocess
import sys
from math import exp, log, sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from helpers.chat_model import save_chat_model
from helpers.cli import other_token, run, spoil
from hypothesis import given
from hypothesis import strategies as st

from lookahead import bundled
from lookahead.chat_format import CHAT_QUESTIONS
from lookahead.cli import common
from lookahead.cli.evidence import evidence
from lookahead.cli.racing import METHODS

QUICK = ("--new-tokens", 12, "--modes", "greedy,t0.7", "--minutes", 1)


@pytest.fixture(autouse=True)
def _tiny(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundled, "BUNDLED", folder)


def test_every_method_and_mode(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("def add(a, b):\nclass Stack:\n")
    out = tmp_path / "bench.json"
    ran = run("bench", "--prompts", file, "--out", out, *QUICK)
    assert ran.status == 0, ran.out
    document = json.loads(out.read_text())
    assert len(document["runs"]) == 2 * 2 * len(METHODS) and len(document["rows"]) == 2 * len(METHODS)
    ours = [each for each in document["runs"] if each["method"] == "lookahead"]
    assert all(each["verdict"] == "same" and each["tokens"] == 12 and each["stats"]["steps"] for each in ours)
    plain = [each for each in document["rows"] if each["method"] == "plain"]
    assert all(each["speedup"] == pytest.approx(1.0) for each in plain)
    assert document["machine"]["threads"] and document["versions"]["torch"]
    assert "prompts, greedy: lookahead " in ran.words and "prompts, t0.7: lookahead " in ran.words
    assert ran.out.count("█") >= 8


def test_questions_by_category(tmp_path: Path) -> None:
    file = tmp_path / "question.jsonl"
    lines = [
        {"question_id": n, "category": kind, "turns": ["Say it.", "Again."]} for n, kind in enumerate(["qa", "math"])
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    ran = run("bench", "--questions", file, "--modes", "greedy", "--new-tokens", 8, "--json")
    document = json.loads(ran.out)
    assert {row["kind"] for row in document["rows"]} == {"qa", "math", "all"}


def test_chat_models_are_asked_questions_of_several_kinds(tmp_path: Path) -> None:
    """One of each: a row a kind, and a verdict on all of them, as one text says little."""
    chatty, file = save_chat_model(tmp_path / "chatty"), tmp_path / "bench.json"
    ran = run("bench", "--model", chatty, "--modes", "greedy", "--new-tokens", 16, "--out", file)
    document, kinds = json.loads(file.read_text()), ["question", "summary", "extraction", "code", "comparison", "story"]
    assert ran.status == 0 and list(CHAT_QUESTIONS) == kinds
    assert list(dict.fromkeys(row["kind"] for row in document["rows"])) == [*kinds, "all"]
    table = ran.words.partition("Lookahead, by category")[2].partition("greedy plain")[0]
    assert [kind for kind in kinds if re.search(rf"{kind} greedy \d+\.\d\dx \d", table)] == kinds
    assert re.findall(r"(\w+), greedy: lookahead", ran.words) == ["all"]
    assert ran.words.count("greedy plain") == 1 + 1, "a line and a bar, of all"
    raw = run("bench", "--model", chatty, "--modes", "greedy", "--new-tokens", 4, "--json", "--raw")
    assert {row["kind"] for row in json.loads(raw.out)["rows"]} == {"prompts"}


def test_little_time_means_less_text() -> None:
    ran = run("bench", "--minutes", 0.05, "--new-tokens", 400, "--modes", "greedy")
    assert ran.status == 0
    assert "--minutes gives more" in ran.words


def test_one_short_text_is_too_few_and_the_table_fits(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("def add(a, b):\n")
    given = [sys.executable, "-m", "lookahead", "bench", "--model", str(bundled.BUNDLED), "--prompts", str(file)]
    settings = {"capture_output": True, "text": True, "env": os.environ | {"COLUMNS": "80"}, "check": True}
    ran = subprocess.run([*given, "--modes", "greedy,t0.7", "--new-tokens", "16"], **settings)  # type: ignore[call-overload]
    assert " ".join(ran.stdout.split()).count("too few to say (1 text of 16 tokens: at least 3 and 96 are needed)") == 2
    assert "…" not in ran.stdout and all(len(line) <= 80 for line in ran.stdout.splitlines())
    assert "Racing, for about 1.5 minutes: 0%" in ran.stderr  # where no bar can be drawn
    last = [line for line in ran.stdout.splitlines() if line.startswith(("greedy lookahead", "t0.7 lookahead"))]
    told = re.findall(
        r"Drafts (\S+)x times passes (\S+)x makes (?:a loss, )?(\S+)x plain decoding, measured",
        " ".join(ran.stdout.split()),
    )
    for line, (drafts, passes, whole) in zip(last, told, strict=False):
        assert line.endswith(f" {whole}x")
        assert float(drafts) * float(passes) == pytest.approx(float(whole), rel=0.05, abs=0.02)


def test_a_wrong_text_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, other_token(5, lambda token: (token + 1) % 258))
    ran = run("bench", *QUICK, "--json")
    assert ran.status == 1
    assert {each["verdict"] for each in json.loads(ran.out)["runs"] if each["mode"] == "greedy"} >= {"bug", "same"}


def test_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "bench.png"
    assert run("bench", "--plot", file, "--new-tokens", 8, "--modes", "greedy").status == 0
    assert file.read_bytes().startswith(b"\x89PNG")


def test_one_short_text_says_nothing() -> None:
    told = "too few to say (1 text of 16 tokens: at least 3 and 96 are needed)"
    assert evidence([4.59], 16) == (4.59, None, told)
    assert evidence([4.5, 4.6, 4.7], 95)[2].startswith("too few to say (3 texts of 95 tokens")
    assert evidence([4.5, 4.6], 1000)[2].startswith("too few to say (2 texts of 1000 tokens")


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([4.5, 4.6, 4.7], "a win"),
        ([0.5, 0.55, 0.52, 0.5], "a loss"),
        ([1.0, 1.01, 0.99, 1.0], "no difference"),
        ([1.01, 1.01, 1.01, 1.01], "no difference"),
        ([0.8, 1.6, 2.9], "too few to say"),
        ([1.0, 9.0, 1.1], "too few to say"),
        ([0.9, 1.1] * 3, "too few to say"),
        ([0.9, 1.2] * 200, "a win"),
    ],
)
def test_the_scatter_decides(ratios: list[float], verdict: str) -> None:
    assert evidence(ratios, 4000)[2].startswith(verdict)


@given(st.lists(st.floats(0.2, 5.0), min_size=3, max_size=30))
def test_the_interval_is_students(ratios: list[float]) -> None:
    (speedup, interval, verdict), logs = evidence(ratios, 4000), [log(ratio) for ratio in ratios]
    assert interval is not None
    low, high = interval
    assert low <= speedup <= high and speedup == pytest.approx(exp(fmean(logs)))
    reach = log(high / low) / 2
    assert reach >= 1.96 * stdev(logs) / sqrt(len(logs)) - 1e-9
    if verdict.startswith("a win"):
        assert low > 1.0
    if low < 0.95 and high > 1.05:
        assert verdict.startswith("too few to say")


def test_the_number_of_texts_that_is_asked_for_suffices() -> None:
    """As many texts again with the same scatter decide."""
    found = re.search(r"about (\d+) such texts", evidence([0.8, 1.6, 2.9], 4000)[2])
    assert found is not None and (needed := int(found[1])) > 3
    assert evidence([0.8, 1.6, 2.9] * needed, 4000)[2] == "a win"


def decoded(busy: float) -> Any:
    return common.Decoded([1], 2.0, None, busy)


def test_a_loaded_machine_is_told() -> None:
    """By a thread that did not run while it could have."""
    (told,) = common.load_told([decoded(0.9), decoded(1.1)], torch.device("cpu"))
    assert told.startswith("The machine is loaded: this process ran in 50% of the time")
    assert common.load_told([decoded(1.9), decoded(2.0)], torch.device("cpu")) == []
    assert common.load_told([decoded(0.1)], torch.device("cuda")) == []
