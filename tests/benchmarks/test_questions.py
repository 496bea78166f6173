"""One script a question, each on a few tokens: from the command line to JSON to a report."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from helpers.cli import invoked
from rich.console import Console

from benchmarks import compare, contest, regret, step_time, theory
from benchmarks.embedding import Shape, embedded
from lookahead import Lookahead
from lookahead.medusa import MedusaHeads

pytestmark = pytest.mark.usefixtures("augmented")


def test_regret_is_against_the_best_of_the_others() -> None:
    found = regret.regret_of({"plain": 1.0, "4": 1.4, "16": 2.0, "automatic": 1.6})
    assert found["best"] == "16"
    assert found["regret"] == pytest.approx(0.25)
    assert found["against_plain"] == pytest.approx(-0.375)
    found = regret.regret_of({"plain": 1.0, "4": 0.8, "automatic": 1.25})
    assert found == {"best": "plain", "regret": pytest.approx(-0.2), "against_plain": pytest.approx(-0.2)}


def test_a_class_of_calls(loaded: tuple[Any, Any]) -> None:
    place = {"shape": "as-is", "set": "no-loop", "mode": "greedy", "dtype": "float32", "batch": 1, "new_tokens": 12}
    row = regret.measure(Console(quiet=True), *loaded, place, "code-no-loop", prompts=1, rounds=1)
    assert set(row["speeds"]) == {"plain", *map(str, regret.SIZES), "automatic"}
    assert row["speeds"]["plain"] == 1.0
    assert row["S"]["64"] >= row["S"]["plain"]
    assert row["texts_that_differ"] == 0
    assert regret.shown(row)["regret"].endswith("%")


def _answer(tokens: list[int], cpu_ms: float, passes: int) -> dict[str, object]:
    return {"tokens": tokens, "cpu_ms": cpu_ms, "wall_ms": 2 * cpu_ms, "passes": passes, "fallback": {}}


def test_figures() -> None:
    """Ratios are the other's times over this checkout's, of the fastest round; a text differs if any round's does."""
    found = {
        "this": [[_answer([1, 2], 9.0, 1), _answer([1, 2], 2.0, 1)], [_answer([3, 4], 4.0, 2)] * 2],
        "other": [[_answer([1, 2], 4.0, 2)] * 2, [_answer([3, 5], 8.0, 2)] * 2],
    }
    row = compare.figures(found)
    assert row["cpu_ratio"] == row["wall_ratio"] == 2.0
    assert row["pass_ratio"] == 1.5  # 2.0 over 2.0, and 4.0 over 2.0
    assert (row["this_S"], row["other_S"]) == (8 / 6, 1.0)
    assert (row["texts"], row["texts_that_differ"]) == (2, 1)


@pytest.mark.slow
def test_the_same_checkout_twice(tmp_path: Path) -> None:
    """From the command line to JSON: whatever one checkout writes, the other does."""
    options = "--prompts 1 --warm 1 --new-tokens 6 --methods nodes16,plain --modes t0.8"
    folders = ("--other", compare.ROOT, "--out", tmp_path / "compare.json")
    done = invoked(compare.main, *options.split(), *folders)
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "compare.json").read_text())["rows"]
    assert [row["method"] for row in rows] == ["nodes16", "plain"]
    assert all(row["texts_that_differ"] == 0 and row["cpu_ratio"] > 0 for row in rows)
    assert rows[0]["this_S"] == rows[0]["other_S"] >= 1.0
    assert rows[1]["this_S"] == 1.0


def test_another_packages_process_is_refused(tmp_path: Path) -> None:
    """A folder without the library would import the installed one unnoticed."""
    with (
        compare.Side(tmp_path, str(tmp_path / "curves")) as side,
        pytest.raises(RuntimeError, match=r"The process of .*(expected that checkout's package|ended with code)"),
    ):
        side.ask({"load": None, "dtype": "float32", "device": "cpu", "threads": 1})


@pytest.mark.parametrize("shape", [Shape(384, 7, 6, 2, 900), Shape(384, 9, 12, 4, 768)])
def test_the_larger_model_writes_the_same_text(loaded: tuple[Any, Any], shape: Shape) -> None:
    small, tokenizer = loaded
    large = embedded(small, shape, torch.float64)
    inputs = tokenizer("def area(width, height):\n", return_tensors="pt")
    with torch.no_grad():
        logits = [model(inputs["input_ids"]).logits.double() for model in (small.double(), large)]
    small.float()
    torch.testing.assert_close(*logits, rtol=0, atol=1e-4)  # norms are computed in float32
    assert large.config.num_hidden_layers == len(large.model.layers) == shape.layers
    assert large.model.layers[-1].mlp.up_proj.weight.shape == (shape.feed_forward, shape.hidden)


def test_a_shape_that_is_too_small_is_refused(loaded: tuple[Any, Any]) -> None:
    with pytest.raises(typer.BadParameter, match="cannot hold 6 layers"):
        embedded(loaded[0], Shape(384, 4, 6, 2, 900), torch.float32)


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


def test_tokens_a_pass(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    texts = contest.units(model, tokenizer, "code", 2, 1, 12)
    given, others = texts
    told = contest.decode(model, Lookahead(nodes=8, remember=True), given, {"do_sample": False}, 12, others)
    assert [len(tokens) for _, tokens in told] == [12, 12]
    figures = contest.acceptance([stats for stats, _ in told])
    assert figures["texts"] == 2 and figures["S"] >= 1.0 and figures["nodes_per_pass"] > 0


@pytest.mark.usefixtures("nodes_are_cheap")
def test_medusa_takes_part(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    """Untrained heads are the model's own output layer, which is enough to be raced."""
    MedusaHeads.for_model(loaded[0], 2).save_pretrained(tmp_path)
    table, skipped = contest.methods(["medusa", "medusa+free", "eagle"], "cpu", heads=tmp_path)
    assert list(table) == ["plain", "medusa", "medusa+free"] and set(skipped) == {"eagle"}
    texts = contest.units(*loaded, "code", 1, 1, 8)
    results = contest.contest(loaded[0], table, texts, {"do_sample": False}, 8, rounds=1)
    rows = {name: contest.row(results, name, 8) for name in table}
    assert all(row["S"] >= 1.0 and row["texts_that_differ"] == 0 for row in rows.values())
    assert all(rows[name]["nodes"] > 0 for name in ("medusa", "medusa+free"))
