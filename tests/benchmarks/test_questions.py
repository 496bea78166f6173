"""One script a question, each on a few tokens, from the command line to JSON to a report."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks import (
    ablation,
    architectures,
    contenders,
    exactness,
    first_call,
    long_context,
    medusa,
    report,
    step_time,
    theory,
)
from lookahead import Lookahead, bundled
from lookahead.medusa import MedusaHeads


def _page(folder: Path, name: str) -> str:
    """A page of the report on what a folder holds."""
    report.build(folder, folder / "BENCHMARKS.md", allow_dirty=True)
    return (folder / f"{name}.md").read_text()


def _tiny(tied: bool) -> Any:
    return step_time.random_model((32, 2, 4, 2, 48, 64, tied, 8), torch.float32, "cpu")


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
    texts = contenders.units(model, tokenizer, "code", 2, 1, 12)
    strategy = Lookahead(window_size=3, ngram_size=3, verification_set_size=3, seed=0)
    found = ablation.measure(model, strategy, texts, {"do_sample": False}, 12)
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
    text = _page(tmp_path, "long_context")
    assert text.startswith("# Long prompts")
    assert "| float32 | 40 |" in text


@pytest.mark.slow
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
    assert "| lfm2 | chain | t1.5 |" in _page(tmp_path, "architectures")


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
    assert list(medusa.contenders(tmp_path / "heads", 9)) == ["plain", "medusa", "auto", "combined"]


@pytest.mark.usefixtures("augmented")
def test_exactness(loaded: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kinds of settings, from the command line to JSON to a report."""
    monkeypatch.setattr(exactness, "load", lambda *_, **__: loaded)
    app = typer.Typer()
    app.command()(exactness.main)
    for kind in ("automatic", "given"):
        options = ["--prompts", "2", "--new-tokens", "8", f"--{kind}", "--out", str(tmp_path / f"{kind}.json")]
        result = CliRunner().invoke(app, options)
        assert result.exit_code == 0, result.output
        results = json.loads((tmp_path / f"{kind}.json").read_text())["results"]
        assert all(row["differ"] == [] and row["tokens"] == 16 for row in results.values())
    assert _page(tmp_path, "exactness").count("| 0 of 2 |") == 4


@pytest.mark.slow
def test_first_calls(tmp_path: Path) -> None:
    """One fresh process for each method and case."""
    app = typer.Typer()
    app.command()(first_call.main)
    options = "--method nodes16 --repeats 1 --new-tokens 4"
    result = CliRunner().invoke(app, [*options.split(), "--out", str(tmp_path / "first.json")])
    assert result.exit_code == 0, result.output
    cases = json.loads((tmp_path / "first.json").read_text())["results"]["float32"]
    assert set(cases) == set(first_call.CASES)
    assert all(len(row["plain_ms"]) == len(row["ours_ms"]) == 1 and row["speedup"] > 0 for row in cases.values())
    assert "| float32 | greedy | 4 |" in _page(tmp_path, "first_call")
