"""What is measured of pretrained models, here of the bundled one: every part, from the command line to the report."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from helpers.cli import invoked

from benchmarks import harness, real, real_parts, report
from benchmarks.real_parts import Bench, Budget

CATEGORIES = {
    *("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"),
    *("translation", "summarization", "qa", "rag", "math_reasoning"),
}


def test_prompts() -> None:
    """Every category of Spec-Bench in turn, and functions to be continued; no prompt twice."""
    chat, functions = harness.prompts_in("chat"), harness.prompts_in("functions")
    assert {category for category, _ in chat[:13]} == CATEGORIES
    assert [category for category, _ in chat[13:26]] == [category for category, _ in chat[:13]]
    assert len({text for _, text in chat}) == len(chat) == 39
    assert len({text for _, text in functions}) == len(functions) >= 12
    assert all("def " in text and '"""' in text and text == text.strip() for _, text in functions)


@pytest.fixture
def bench(loaded: tuple[Any, Any]) -> Bench:
    return Bench(*loaded, "functions", None, "float32", 6, lengths=(16,))


def test_prompts_of_a_length(bench: Bench) -> None:
    """Others stand before a prompt, as many as fit; its own text is the end, whatever the length."""
    own = bench.tokens(2)
    for length in (0, 300):
        tokens = bench.tokens(2, length)
        assert len(tokens) == len(own) if not length else 150 < len(tokens) <= 310
        assert bench.tokenizer.decode(tokens).endswith(bench.prompts[2][1])
    given, warm = bench.texts(200, 2, 2)
    assert [len(unit.inputs["input_ids"]) for unit in (*given, *warm)] == [2, 2, 2]
    seen = {tuple(row.tolist()) for unit in given for row in unit.inputs["input_ids"]}
    assert len(seen) == 4


def test_a_budget_measures_at_least_one_case(monkeypatch: pytest.MonkeyPatch) -> None:
    skipped: list[dict[str, Any]] = []
    budget = Budget(-1.0, skipped)
    assert [budget.over(case=case) for case in (1, 2)] == [False, True]
    assert skipped == [{"case": 2, "reason": "no time was left"}]
    budget, now = Budget(10.0, skipped), iter([1.0, 4.0, 8.0])
    monkeypatch.setattr(real_parts.time, "monotonic", lambda: next(now))
    budget._end = 10.0
    assert [budget.over(case=case) for case in (3, 4, 5)] == [False, False, True]  # the longest took 4 seconds


@pytest.mark.usefixtures("augmented")
def test_acceptance_by_source_category_and_memory(bench: Bench) -> None:
    rows = list(real_parts.acceptance(bench, 2, Budget(600.0, [])))
    few = {(row["source"], row["nodes"]) for row in rows if row["category"] == "few"}
    assert few == {(name, 24) for name in real_parts.ALL} | {("all", nodes) for nodes in real_parts.NODES}
    whole = [row for row in rows if row["category"] != "few"]
    assert {(row["category"], row["memory"]) for row in whole} == {
        (category, memory) for category in ("all", "code") for memory in ("cold", "other texts")
    }
    assert all(row["S"] >= 1.0 and row["texts"] == (1 if row["category"] == "few" else 2) for row in rows)


@pytest.mark.usefixtures("augmented")
def test_models_that_draft(bench: Bench) -> None:
    """Transformers' way and ours; with another tokenizer both are given."""
    model, tokenizer = bench.model, bench.tokenizer

    class Other:
        def get_vocab(self) -> dict[str, int]:
            return {"a": 0}

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

    drafted = Bench(model, tokenizer, "functions", None, "float32", 4, (16,), {"same": (model, tokenizer)})
    table = real_parts.methods(drafted)
    assert list(table) == ["plain", "lookup2", "w7", "auto", "assistant same", "draft same"]
    assert set(table["assistant same"].settings) == {"assistant_model"}
    drafted.drafts["same"] = (model, Other())
    assert set(real_parts.methods(drafted)["assistant same"].settings) > {"tokenizer", "assistant_tokenizer"}


@pytest.mark.slow
@pytest.mark.usefixtures("loaded")
def test_every_part_of_a_quick_run(tmp_path: Path) -> None:
    """From the command line to JSON to the report; in float32 no text of ours differs."""
    options = "--models bundled --quick --parts exact,s:1,race:1 --threads 1 --minutes 600"
    done = invoked(real.main, *options.split(), "--out", tmp_path)
    assert done.exit_code == 0, done.output
    document = json.loads((tmp_path / "real-bundled.json").read_text())
    assert document == json.loads(done.stdout.splitlines()[-1])
    assert document["model"] == "bundled" and document["first"] == []
    assert [row["mode"] for row in document["exact"]] == ["greedy", "t0.7", "t1.0"]
    assert all(row["texts_that_differ"] == 0 and row["texts"] == 2 for row in document["exact"])
    first = document["rows"][:4]
    assert [row["method"] for row in first] == ["plain", "lookup2", "w7", "auto"]
    assert all((row["length"], row["batch"], row["mode"]) == (16, 1, "greedy") for row in first)
    ours = [row for row in document["rows"] if row["method"] in ("w7", "auto")]
    assert all(row["texts_that_differ"] == 0 for row in ours)
    for row in ours:
        if "drafts" in row:
            assert row["drafts"] * row["passes_gain"] == pytest.approx(row["speedup_median"])
    text = report.build(tmp_path, tmp_path / "BENCHMARKS.md", allow_dirty=True)
    assert "## Pretrained models" in text and "| 16 | 1 | greedy | float32 | 8 |" in text
    page = (tmp_path / "real.md").read_text()
    assert "| greedy | 16 |" in page and "| 0 of 2 |" in page
    assert "| greedy | recycling |" in page and "| code | 1 |" in page
    assert page.count("| lookahead | 16 | 1 | greedy |") == 1


@pytest.mark.slow
@pytest.mark.usefixtures("loaded")
def test_first_calls(bench: Bench) -> None:
    """A fresh process for each method and mode; its first call, its second, and the others."""
    skipped: list[dict[str, Any]] = []
    rows = list(real_parts.first_calls(bench, 1, Budget(600.0, skipped)))
    assert [(row["mode"], row["call"], row["texts"]) for row in rows] == [
        (mode, call, texts) for mode in ("greedy", "t0.7") for call, texts in (("first ever", 1), ("later", 3))
    ]
    assert all(row["texts_that_differ"] == 0 and row["speedup_median"] > 0 for row in rows) and not skipped


def test_refused_arguments(tmp_path: Path) -> None:
    assert real.numbered("race:8, first") == {"race": 8, "first": 3}
    for given in ("race:0", "race:many"):
        with pytest.raises(typer.BadParameter, match="expected a number of texts behind the colon"):
            real.numbered(given)
    with pytest.raises(typer.BadParameter, match="walk is no part: expected some of exact, s, race, first"):
        real.numbered("walk:3")
    with pytest.raises(typer.BadParameter, match="is no model: expected bundled, smollm2-135m"):
        real.place_of(str(tmp_path), tmp_path)
