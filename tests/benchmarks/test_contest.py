"""The benchmarks' own arithmetic, contests on a few tokens, and rivals in processes of their own; no clock counts."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from helpers.chat_model import save_chat_model, save_gguf
from helpers.cli import invoked
from helpers.models import tiny_model

from benchmarks import contest, harness, options, race, report, rivals, theory
from benchmarks.rivals_worker import RIVALS
from lookahead import Lookahead

pytestmark = pytest.mark.usefixtures("augmented")


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([7] * 64, True),  # period 1
        ([1, 2, 3] * 30, True),  # a period that does not divide the tail
        ([*range(100, 200), *([1, 2, 3, 4] * 16)], True),  # what came before does not matter
        (list(range(32)) * 2, True),  # the longest period
        (list(range(33)) * 3, False),  # one token longer
        ([7] * 63, False),  # too short to tell
        ([1, 2] * 31 + [1, 3], False),  # broken at its last token
        ([9, *([1, 2] * 31), 1], False),  # not yet a loop where the tail begins
        (list(range(64)), False),
        ([], False),
    ],
)
def test_loops(tokens: list[int], expected: bool) -> None:
    assert harness.loops(tokens) is expected


def test_medians_and_their_intervals() -> None:
    """With n values the median of a draw is at most the smallest of five with probability 0.058, more than 0.025."""
    interval = harness.bootstrap
    assert interval([1.5] * 7) == (1.5, 1.5)
    assert interval([2.0]) == (2.0, 2.0)
    assert interval([5.0, 1.0, 3.0, 2.0, 4.0]) == (1.0, 5.0)
    low, high = interval(range(1, 102))  # the normal approximation: the 51st of 101, give or take 9.85
    assert abs(low - 41) <= 2
    assert abs(high - 61) <= 2
    assert interval(range(9), seed=3) == interval(range(9), seed=3)
    assert harness.typical([3.0, 1.0, 2.0]) == 1.0
    assert harness.typical([9.0, 1.0, 2.0, 3.0, 4.0]) == 3.0


def test_methods_are_made_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise TypeError("no such field")

    monkeypatch.setitem(contest.METHODS, "auto", broken)
    table, skipped = contest.methods(["w7", "static", "assistant"], "cpu")
    assert list(table) == ["plain", "w7"]
    assert set(skipped) == {"static", "assistant"}
    table, skipped = contest.methods(["assistant", "draft", "draft+free"], "cpu", assistant=tiny_model("llama"))
    assert list(table) == ["plain", "assistant", "draft", "draft+free"] and not skipped
    with pytest.raises(TypeError, match="no such field"):
        contest.methods(["auto"], "cpu")


def test_methods_that_remember_learn_apart(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two alike the second drafts no better than the first: it has not seen what the first wrote."""
    for name in ("auto", "untraced"):
        monkeypatch.setitem(contest.METHODS, name, lambda n=name: contest.ours(n, Lookahead(nodes=8), True))
    table, _ = contest.methods(["auto", "untraced"], "cpu")
    texts = contest.units(*loaded, "code", 2, 1, 24)
    results = contest.contest(loaded[0], table, texts, {"do_sample": False}, 24, rounds=0)
    first, second = ([calls.passes for calls in results[name]] for name in ("auto", "untraced"))
    assert first == second


def test_unknown_names_are_refused() -> None:
    assert options.chosen("b,a", ("a", "b"), "letter") == ["b", "a"]
    assert options.chosen("all", ("a", "b"), "letter") == ["a", "b"]
    with pytest.raises(Exception, match="c is no letter: expected some of a, b"):
        options.chosen("a,c", ("a", "b"), "letter")


@pytest.mark.parametrize("name", ["code", "prose"])
def test_prompt_files(name: str) -> None:
    rows = [json.loads(line) for line in (harness.PROMPTS / f"{name}.jsonl").read_text().splitlines()]
    assert all(set(row) == {"id", "prompt", "source"} for row in rows)
    assert len({row["id"] for row in rows}) == len({row["prompt"] for row in rows}) == len(rows)
    assert all(row["prompt"] == row["prompt"].strip() for row in rows)


def test_batches_are_padded_on_the_left(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    given, warm = contest.units(model, tokenizer, "code", 7, 3, 16)
    assert [unit.index for unit in given] == [0, 1]
    assert len(warm) == 2
    assert not {unit.index for unit in warm} & {0, 1}
    ids, mask = given[0].inputs["input_ids"], given[0].inputs["attention_mask"]
    assert ids.shape == mask.shape
    assert len(ids) == 3
    assert mask[:, -1].all()
    assert (ids[mask == 0] == model.generation_config.pad_token_id).all()
    texts = harness.texts_of("code")
    for row in range(3):
        assert ids[row][mask[row] == 1].tolist() == tokenizer(texts[row])["input_ids"]


def test_a_batch_that_is_larger_than_its_set_repeats_prompts(loaded: tuple[Any, Any]) -> None:
    given, warm = contest.units(*loaded, "code-no-loop", 16, 16, 24)
    assert [len(unit.inputs["input_ids"]) for unit in (*given, *warm)] == [16, 16, 16]
    ids = given[0].inputs["input_ids"]
    assert ids[10:].tolist() == ids[:6].tolist()


@pytest.mark.parametrize(("mode", "batch"), [("greedy", 1), ("t0.8", 2)])
def test_contest(loaded: tuple[Any, Any], mode: str, batch: int) -> None:
    model, tokenizer = loaded
    table, _ = contest.methods(["lookup2", "w7"] if batch == 1 else ["w7"], "cpu")
    texts = contest.units(model, tokenizer, "code", 2, batch, 12)
    given, _ = texts
    results = contest.contest(model, table, texts, options.MODES[mode], 12, 1)
    rows = {name: contest.row(results, name, 12, batch) for name in table}
    assert rows["plain"]["speedup_median"] == 1.0
    assert rows["plain"]["passes"] == 12 * len(given)
    for name, row in rows.items():
        assert row["texts_that_differ"] == 0, name
        assert row["texts"] == 2
        assert row["S"] >= 1.0
        assert row["passes"] <= 12 * len(given)
        assert row["speedup_interval"][0] <= row["speedup_median"] <= row["speedup_interval"][1]
    assert rows["w7"]["nodes"] > 0
    assert rows["w7"]["stats"]["emitted"] == 24
    json.dumps(rows)


def test_race_command(loaded: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the command line to JSON to a report."""
    monkeypatch.setattr(theory, "_LARGE_BYTES", {"cpu": 1 << 16})
    monkeypatch.setattr(race, "load", lambda *_: loaded)
    out = tmp_path / "race.json"
    options = "--prompts 1 --modes greedy --dtypes float32 --methods w7,static --new-tokens 8 --rounds 1 --context 32"
    done = invoked(race.main, *options.split(), "--sets", "code,single", "--out", out)
    assert done.exit_code == 0, done.output
    document = json.loads(out.read_text())
    assert document == json.loads(done.stdout.splitlines()[-1])
    places = [(row["set"], row["method"], row["new_tokens"], row["rounds"]) for row in document["rows"]]
    assert places == [
        ("code", "plain", 8, 1),
        ("code", "w7", 8, 1),
        ("single", "plain", 1, 10),
        ("single", "w7", 1, 10),
    ]
    assert [skip["method"] for skip in document["skipped"]] == ["static"]
    assert "](race.md)" in report.build(tmp_path, tmp_path / "BENCHMARKS.md", allow_dirty=True)
    page = (tmp_path / "race.md").read_text()
    assert page.count("| lookahead 7/5/7 |") == 3  # a column, and a line for each of the two sets
    assert "on CUDA only" in page


class _Chat:
    """Characters as ids, and a chat template."""

    chat_template = "yes"

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [1] * add_special_tokens + list(map(ord, text))}

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize
        return "".join(f"<{each['role'][0]}>{each['content']}" for each in messages) + "<a>" * add_generation_prompt


def test_prompts_of_ones_own(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    """Files of prompts and Spec-Bench's questions; a chat model gets them by its template."""
    model, tokenizer = loaded
    file = tmp_path / "question.jsonl"
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["def add(a, b):", "def sub(a, b):"]},
        {"prompt": "import os"},
        {"prompt": "warm"},
        {"prompt": "up"},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets = contest.prompt_sets(f"prose, {file}")
    assert list(sets) == ["prose", "question"]
    assert harness.texts_of(sets["question"].source) == ["def add(a, b):", "import os", "warm", "up"]
    given, _ = contest.units(model, tokenizer, sets["question"].source, 20, 1, 4)
    assert given[0].inputs["input_ids"][0].tolist() == tokenizer("def add(a, b):")["input_ids"]
    given, _ = contest.units(model, _Chat(), sets["question"].source, 20, 1, 4)
    assert given[1].inputs["input_ids"][0].tolist() == list(map(ord, "<u>import os<a>"))
    for bad in ('{"question_id": 1}', '{"turns": []}', '{"prompt": 7}'):
        file.write_text(f"{json.dumps(rows[0])}\n{bad}\n")
        with pytest.raises(typer.BadParameter, match="line 2: expected a JSON object with a prompt or turns"):
            harness.texts_of(str(file))


def test_figures() -> None:
    answers = [
        {"tokens": [1, 2, 3], "first_s": 1.0, "last_s": 2.0, "memory_mb": 5},
        {"tokens": [1, 2, 3], "first_s": 0.5, "last_s": 1.0, "memory_mb": 7},
    ]
    row = rivals.figures(answers)
    assert (row["tokens_per_s_median"], row["whole_per_s_median"]) == (3.0, 2.25)
    assert (row["first_token_ms"], row["memory_mb"]) == (750.0, 7)


@pytest.mark.slow
def test_all_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the command line to JSON, and what is missing is named."""
    monkeypatch.setattr(rivals, "find_spec", lambda name: None)
    folder = save_chat_model(tmp_path / "model")
    file = save_gguf(folder, tmp_path / "model.gguf")
    given = ("--model", folder, "--gguf", file, "--out", tmp_path / "rivals.json")
    options = "--precisions bfloat16 --prompts 1 --new-tokens 6 --modes greedy"
    done = invoked(rivals.main, *given, *options.split())
    assert done.exit_code == 0, done.output
    document = json.loads((tmp_path / "rivals.json").read_text())
    rows = {row["way"]: row for row in document["rows"]}
    assert all(row["tokens_per_s_median"] > 0 and len(row["texts"]) == 1 for row in rows.values())
    assert list(rows) == ["bfloat16 plain", "bfloat16 lookahead"]
    assert [each["way"] for each in document["skipped"]] == list(RIVALS)
