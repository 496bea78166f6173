"""The benchmarks' own arithmetic and formats, on a few tokens; nothing here looks at a clock."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks import ablation, architectures, long_context, medusa, race, racing, report, specbench, step_time, theory
from lookahead import Lookahead, bundled
from lookahead.medusa import MedusaHeads

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    """The bundled model and its tokenizer, with the end-of-text token off."""
    if not (bundled.BUNDLED / "config.json").exists():
        pytest.skip("needs the bundled model")
    model, tokenizer = racing.load(None, "float32", "cpu")
    return model, tokenizer


# -- statistics --


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
    assert racing.loops(tokens) is expected


def test_loops_with_other_lengths() -> None:
    assert racing.loops([1, 2, 1, 2], tail=4, longest=2)
    assert not racing.loops([1, 2, 1, 2], tail=4, longest=1)


def test_bootstrap() -> None:
    """With n values the median of a draw is at most the smallest of five with probability 0.058, more than 0.025."""
    interval = racing.bootstrap
    assert interval([1.5] * 7) == (1.5, 1.5)
    assert interval([2.0]) == (2.0, 2.0)
    assert interval([5.0, 1.0, 3.0, 2.0, 4.0]) == (1.0, 5.0)
    low, high = interval(range(1, 102))  # the normal approximation: the 51st of 101, give or take 9.85
    assert abs(low - 41) <= 2
    assert abs(high - 61) <= 2
    assert interval(range(9), seed=3) == interval(range(9), seed=3)


def test_a_time_is_the_fastest_of_few_and_the_median_of_many() -> None:
    assert racing.typical([3.0, 1.0, 2.0]) == 1.0
    assert racing.typical([9.0, 1.0, 2.0, 3.0, 4.0]) == 3.0


# -- methods and prompts --


def test_methods_are_made_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise TypeError("no such field")

    monkeypatch.setitem(racing.METHODS, "auto", broken)
    table, skipped = racing.methods(["w7", "static", "assistant"], "cpu")
    assert list(table) == ["plain", "w7"]
    assert set(skipped) == {"static", "assistant"}
    with pytest.raises(TypeError, match="no such field"):
        racing.methods(["auto"], "cpu")


def test_at_most_one_method_remembers() -> None:
    table, _ = racing.methods(list(racing.METHODS), "cpu")
    assert [name for name, method in table.items() if method.remembers] == ["auto"]


def test_unknown_names_are_refused() -> None:
    assert racing.chosen("b,a", ("a", "b"), "letter") == ["b", "a"]
    assert racing.chosen("all", ("a", "b"), "letter") == ["a", "b"]
    with pytest.raises(Exception, match="c is no letter: expected some of a, b"):
        racing.chosen("a,c", ("a", "b"), "letter")


@pytest.mark.parametrize("name", ["code", "prose"])
def test_prompt_files(name: str) -> None:
    rows = [json.loads(line) for line in (BENCHMARKS / "prompts" / f"{name}.jsonl").read_text().splitlines()]
    assert all(set(row) == {"id", "prompt", "source"} for row in rows)
    assert len({row["id"] for row in rows}) == len({row["prompt"] for row in rows}) == len(rows)
    assert all(row["prompt"] == row["prompt"].strip() for row in rows)


def test_prose_prompts() -> None:
    rows = [json.loads(line) for line in (BENCHMARKS / "prompts" / "prose.jsonl").read_text().splitlines()]
    assert len(rows) == 40
    assert all(15 <= len(row["prompt"].split()) <= 60 for row in rows)
    assert all(row["prompt"].isascii() for row in rows)


def test_batches_are_padded_on_the_left(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    given, warm = racing.units(model, tokenizer, "code", 7, 3, 16)
    assert [unit.index for unit in given] == [0, 1]
    assert len(warm) == 2
    assert not {unit.index for unit in warm} & {0, 1}
    ids, mask = given[0].inputs["input_ids"], given[0].inputs["attention_mask"]
    assert ids.shape == mask.shape
    assert len(ids) == 3
    assert mask[:, -1].all()
    assert (ids[mask == 0] == model.generation_config.pad_token_id).all()
    texts = racing.texts_of(BENCHMARKS / "prompts" / "code.jsonl")
    for row in range(3):
        assert ids[row][mask[row] == 1].tolist() == tokenizer(texts[row])["input_ids"]


# -- a contest --


@pytest.mark.usefixtures("augmented")
@pytest.mark.parametrize(("mode", "batch"), [("greedy", 1), ("t0.8", 2)])
def test_contest(loaded: tuple[Any, Any], mode: str, batch: int) -> None:
    model, tokenizer = loaded
    table, _ = racing.methods(["lookup2", "w7"] if batch == 1 else ["w7"], "cpu")
    given, warm = racing.units(model, tokenizer, "code", 2, batch, 12)
    results = racing.contest(model, table, given, warm, racing.MODES[mode], 12, 1)
    rows = {name: racing.row(results, name, range(len(given)), 12, batch) for name in table}
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


@pytest.mark.usefixtures("augmented")
def test_race_command(loaded: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the command line to JSON to a report."""
    monkeypatch.setattr(theory, "_LARGE_BYTES", {"cpu": 1 << 16})
    monkeypatch.setattr(race, "load", lambda *_: loaded)
    app = typer.Typer()
    app.command()(race.main)
    out = tmp_path / "race.json"
    options = "--prompts 1 --modes greedy --dtypes float32 --methods w7,static --new-tokens 8 --rounds 1 --context 32"
    done = CliRunner().invoke(app, [*options.split(), "--sets", "code,single", "--out", str(out)])
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
    text = report.build(tmp_path, tmp_path / "BENCHMARKS.md")
    assert "lookahead 7/5/7" in text
    assert "on CUDA only" in text


# -- Spec-Bench --


@pytest.mark.usefixtures("augmented")
def test_answers(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    model, tokenizer = loaded
    file = tmp_path / "question.jsonl"
    asked = [
        {"question_id": 81, "category": "writing", "turns": ["def add(a, b):", "def sub(a, b):"]},
        {"question_id": 300, "category": "qa", "turns": ["import os"], "reference": ["nothing"]},
    ]
    file.write_text("".join(json.dumps(question) + "\n" for question in asked))
    questions = specbench.read_questions(file)
    for bad in ('{"question_id": 1, "category": "qa"}', "[]", "{", '{"question_id": 1, "category": "a", "turns": []}'):
        (tmp_path / "bad.jsonl").write_text(f"{json.dumps(asked[0])}\n\n{bad}\n")
        with pytest.raises(typer.BadParameter, match="line 3: expected a JSON object with question_id"):
            specbench.read_questions(tmp_path / "bad.jsonl")
    table, _ = racing.methods(["w7"], "cpu")
    contenders = {name: (table[name], tmp_path / f"{name}.jsonl") for name in ("w7", "plain")}
    mode = racing.MODES["greedy"]
    summary = specbench.answer_all(model, tokenizer, contenders, questions, mode, 12, "tiny")
    answers = {
        name: [json.loads(line) for line in out.read_text().splitlines()] for name, (_, out) in contenders.items()
    }
    for name, rows in answers.items():
        for row, question in zip(rows, asked, strict=True):
            assert list(row) == ["question_id", "category", "answer_id", "model_id", "choices", "tstamp"]
            assert (row["question_id"], row["category"]) == (question["question_id"], question["category"])
            assert row["model_id"] == f"tiny-{name}"
            (choice,) = row["choices"]
            assert list(choice) == [
                "index",
                "turns",
                "decoding_steps",
                "new_tokens",
                "wall_time",
                "accept_lengths",
            ]
            turns = len(question["turns"])
            assert all(len(choice[key]) == turns for key in ("turns", "decoding_steps", "new_tokens", "wall_time"))
            assert choice["new_tokens"] == [12] * turns
            assert sum(choice["accept_lengths"]) == 12 * turns
            assert len(choice["accept_lengths"]) == sum(choice["decoding_steps"])
            assert all(type(length) is int for length in choice["accept_lengths"])
    plain, ours = answers["plain"], answers["w7"]
    assert all(set(row["choices"][0]["accept_lengths"]) == {1} for row in plain)
    assert [row["choices"][0]["turns"] for row in plain] == [row["choices"][0]["turns"] for row in ours]
    assert summary["w7"]["overall"]["answers_that_differ"] == 0
    assert set(summary["w7"]) == {"overall", "writing", "qa"}
    assert summary["plain"]["overall"]["S"] == 1.0


class _Tokenizer:
    """Characters as ids, with an optional chat template."""

    def __init__(self, chat_template: str | None) -> None:
        self.chat_template = chat_template

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [1] * add_special_tokens + list(map(ord, text))}

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize
        return "".join(f"<{each['role'][0]}>{each['content']}" for each in messages) + "<a>" * add_generation_prompt


def test_conversations() -> None:
    continued = specbench.conversation
    assert continued(_Tokenizer(None), ["a", "b"], ["x"]) == [1, *map(ord, "a\nx\nb")]
    assert continued(_Tokenizer("yes"), ["a", "b"], ["x"]) == list(map(ord, "<u>a<a>x<u>b<a>"))


# -- theory, step time, ablation --


def _tiny(tied: bool) -> Any:
    return step_time.random_model(step_time.shape(32, 2, 4, 2, 48, 64, tied, 8), torch.float32, "cpu")


@pytest.mark.parametrize("tied", [False, True])
def test_weights_read_by_a_pass(tied: bool) -> None:
    """An embedding table counts as one row unless it is the output layer, too."""
    model = _tiny(tied)
    count, read = theory.weights(model)
    assert count == sum(p.numel() for p in model.parameters())
    assert read == 4 * (count if tied else count - 63 * 32)
    assert theory.cache_bytes(model) == 2 * 2 * 2 * 8 * 4


def test_ceiling() -> None:
    card = {"pass_ms": {1: {1: 2.0, 8: 3.0, 16: 5.0}}}
    assert theory.ceiling(card, 1, 1.0, 0.0) == 1.0
    assert theory.ceiling(card, 1, 3.0, 11.0) == pytest.approx(3.0 * 2.0 / 4.0)


def test_random_weights_give_a_working_model() -> None:
    model = _tiny(tied=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()
    taken = step_time.curve(model, 40, (1, 4), batch=2, rounds=1)
    assert set(taken) == {1, 4}


@pytest.mark.usefixtures("augmented")
def test_ablation(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    given, warm = racing.units(model, tokenizer, "code", 2, 1, 12)
    strategy = Lookahead(window_size=3, ngram_size=3, verification_set_size=3, seed=0)
    found = ablation.measure(model, strategy, given, warm[0], {"do_sample": False}, 12)
    assert set(found) == {"all", "not looping"}  # 12 tokens are too few for a loop
    assert found["all"]["texts"] == 2
    assert found["all"]["S"] >= 1.0
    assert found["all"]["nodes_per_pass"] > 0


def test_long_prompts(loaded: tuple[Any, Any]) -> None:
    """A prompt of the set at the end, those before it in front; no more tokens than there are."""
    texts = ["def a():\n    return 1\n", "class B:\n    pass\n", "import os\n"]
    rows = [loaded[1](text)["input_ids"] for text in texts]
    given = long_context.prompts_of(loaded[1], texts, 8, 3, "cpu")
    assert [unit.index for unit in given] == [0, 1, 2]
    for index, unit in enumerate(given):
        joined = rows[index - 2] + rows[index - 1] + rows[index]
        assert unit.inputs["input_ids"].tolist() == [joined[-8:]]
        assert unit.inputs["attention_mask"].all()
    with pytest.raises(typer.BadParameter, match="got --contexts 9000"):
        long_context.prompts_of(loaded[1], texts, 9000, 1, "cpu")


@pytest.mark.usefixtures("loaded")
def test_stretched_models(tmp_path: Path) -> None:
    """The bundled model's own text where it has the positions; beyond them YaRN, and no second stretching."""
    stretched = long_context.stretched
    model, _ = stretched(bundled.BUNDLED, 1024, "float32", "cpu")
    assert model.config.rope_parameters["rope_type"] == "default"
    model, tokenizer = stretched(bundled.BUNDLED, 4096, "float32", "cpu")
    assert model.config.rope_parameters["factor"] == 4.0
    assert model.config.max_position_embeddings == 4096
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(typer.BadParameter, match="RoPE of type yarn for 4096 positions"):
        stretched(tmp_path, 8192, "float32", "cpu")


@pytest.mark.usefixtures("augmented", "loaded")
def test_long_contexts(tmp_path: Path) -> None:
    """From the command line to JSON to a report."""
    app = typer.Typer()
    app.command()(long_context.main)
    options = "--contexts 16,40 --prompts 1 --modes greedy --methods plain,auto --new-tokens 6"
    result = CliRunner().invoke(app, [*options.split(), "--out", str(tmp_path / "long.json")])
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "long.json").read_text())
    assert [(row["context"], row["method"]) for row in document["rows"]] == [
        (context, method) for context in (16, 40) for method in ("plain", "auto")
    ]
    assert all(row["texts_that_differ"] == 0 and row["S"] >= 1.0 for row in document["rows"])
    assert all(row["first_token_ms"] > 0 and row["token_ms"] > 0 for row in document["rows"])
    assert {row["after_median"] for row in document["rows"] if row["method"] == "plain"} == {1.0}
    text = report.build(tmp_path, tmp_path / "BENCHMARKS.md")
    assert "## Long contexts" in text
    assert "| bundled | float32 | 40 | 1 |" in text


@pytest.mark.usefixtures("augmented")
def test_architectures(tmp_path: Path) -> None:
    """A tree, a chain and an encoder-decoder model, from the command line to JSON to a report."""
    app = typer.Typer()
    app.command()(architectures.main)
    options = "--families llama,lfm2,bart --prompts 1 --rounds 1 --new-tokens 8"
    result = CliRunner().invoke(app, [*options.split(), "--out", str(tmp_path / "architectures.json")])
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "architectures.json").read_text())["rows"]
    assert [(row["family"], row["mode"], row["route"]) for row in rows] == [
        (family, mode, "chain" if family == "lfm2" else "tree")
        for family in ("llama", "lfm2", "bart")
        for mode in ("t1.5", "greedy")
    ]
    assert all(row["texts_that_differ"] == 0 for row in rows)
    text = report.build(tmp_path, tmp_path / "BENCHMARKS.md")
    assert "| lfm2 | chain | t1.5 |" in text


def test_medusa(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    """Untrained heads are the model's own output layer, which is enough to be measured."""
    MedusaHeads.for_model(loaded[0], 2).save_pretrained(tmp_path / "heads")
    app = typer.Typer()
    app.command()(medusa.main)
    options = "--prompts 1 --modes greedy --parts nodes,curve --nodes 9 --temperatures 0.2,1 --new-tokens 10"
    folders = ["--heads", str(tmp_path / "heads"), "--out", str(tmp_path / "o.json")]
    result = CliRunner().invoke(app, [*options.split(), *folders])
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "o.json").read_text())
    assert document["benchmark"] == "medusa" and document["tree_nodes"] > 20
    found = {row["draft"]: row for row in document["drafts"] if row["group"] == "all"}
    assert set(found) == set(medusa.drafts(tmp_path / "heads", 9))
    assert all(row["S"] >= 1.0 and row["nodes_per_pass"] > 0 for row in found.values())
    assert found["medusa, budgeted tree"]["nodes_per_pass"] <= 9
    assert [(row["temperature"], row["acceptance"]) for row in document["curve"]] == [
        (degree, name) for degree in (0.2, 1.0) for name in ("exact", "typical", "nucleus")
    ]
    assert list(medusa.contenders(tmp_path / "heads", 9)) == ["plain", "medusa", "auto", "window", "combined"]


# -- the report --

RUN = {
    "machine": {"cpu": "a processor", "cores": 2, "cpu_capability": "AVX2", "gpu": None, "system": "Linux"},
    "versions": {"python": "3.11", "torch": "2", "transformers": "5", "lookahead": "0"},
    "commit": "abc123",
    "argv": ["-m", "benchmarks.race", "--modes", "greedy"],
}


def _row(method: str, speedup: float, group: str = "all") -> dict[str, Any]:
    return {
        "method": method,
        "label": {"plain": "generate", "auto": "lookahead"}.get(method, method),
        "group": group,
        "set": "code",
        "mode": "greedy",
        "dtype": "float32",
        "batch": 1,
        "new_tokens": 64,
        "speedup_median": speedup,
        "speedup_interval": [speedup - 0.1, speedup + 0.1],
        "speedup_quartiles": [speedup, speedup],
        "tokens_per_s_median": 100.0,
        "S": 2.0,
        "passes": 32,
        "nodes": 8.0,
        "share_of_ceiling": 0.9,
        "texts": 4,
        "texts_that_differ": 0,
        "same_draws": True,
    }


def _write(folder: Path, name: str, document: dict[str, Any]) -> None:
    (folder / f"{name}.json").write_text(json.dumps({"device": "cpu", "model": "bundled", **document, **RUN}))


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A folder with one small document of every kind, and one that the report does not know."""
    card = {
        "parameters": 5_000_000,
        "weight_bytes_per_pass": 20_000_000,
        "bandwidth_gb_per_s": {"memory": {"sum": 10.0, "copy": 9.0}},
        "context": 256,
        "floor_ms": {"1": 2.0},
        "pass_ms": {"1": {"1": 3.0, "8": 4.5}},
    }
    rows = [_row("plain", 1.0), _row("auto", 1.5), _row("auto", 0.8, "not looping"), _row("jacobi", 0.998)]
    skipped = [{"method": "static", "dtype": "float32", "reason": "no CUDA"}]
    _write(tmp_path, "race", {"benchmark": "race", "theory": {"float32": card}, "rows": rows, "skipped": skipped})
    call = {"plain_median_ms": 100.0, "ours_median_ms": 200.0, "speedup": 0.5}
    _write(tmp_path, "first", {"benchmark": "first call", "new_tokens": 8, "results": {"float32": {"greedy": call}}})
    nodes = [
        {"source": s, "nodes": n, "mode": "greedy", "group": "all", "texts": 2, "S": n / 4, "draft_ms": 0.1}
        for s in ("suffix", "pool")
        for n in (4, 8)
    ]
    _write(tmp_path, "ablation", {"benchmark": "ablation", "rows": nodes})
    curve = {"preset": "bundled", "dtype": "float32", "context": 128, "batch": 1, "pass_ms": {"1": 2.0, "8": 3.0}}
    _write(tmp_path, "step", {"benchmark": "step time", "rows": [curve]})
    _write(tmp_path, "other", {"benchmark": "something else"})
    return tmp_path


def test_report(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "plots", lambda *_: [])
    text = report.build(results, results / "BENCHMARKS.md")
    assert text.startswith("# Benchmarks\n\nGenerated by `python -m benchmarks.report`")
    assert "1 of 2 medians of the automatic mode are below 1.00x" in text
    assert "| code, not looping | greedy | float32 | 1 | 64 | lookahead | **0.80x** |" in text
    assert "| code | greedy | float32 | 1 | 64 | 1.50x | 1.00x |" in text
    assert "| float32 | 1 | 5.0M | 20.0 MB | 10.0 GB/s | 2.00 ms | 3.00 ms | 1.50 |" in text
    assert "- static: no CUDA" in text
    assert "| float32 | greedy | 8 | 100 | 200 | **0.50x** |" in text
    assert "| suffix | 1.00 | 2.00 |" in text
    assert "`python -m benchmarks.race --modes greedy`" in text
    assert "abc123" in text
    assert "something else" not in text


def test_report_without_matplotlib(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda name: None)
    assert "## Plots" not in report.build(results, results / "BENCHMARKS.md")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_plots(results: Path) -> None:
    pytest.importorskip("matplotlib")
    text = report.build(results, results / "BENCHMARKS.md")
    for name in ("nodes", "step_time", "speedup-float32"):
        assert (results / "plots" / f"{name}.png").stat().st_size > 1000
        assert f"![{name}](plots/{name}.png)" in text
