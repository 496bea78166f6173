"""One script a question, each on a few tokens, from the command line to JSON to a report."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks import contenders, contest, medusa, step_time, theory
from lookahead import Lookahead
from lookahead.medusa import MedusaHeads


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
def test_tokens_a_pass(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    texts = contenders.units(model, tokenizer, "code", 2, 1, 12)
    strategy = Lookahead(window_size=3, ngram_size=3, verification_set_size=3, seed=0)
    found = medusa.measure(model, strategy, texts, {"do_sample": False}, 12)
    assert set(found) == {"all", "not looping"}  # 12 tokens are too few for a loop
    assert found["all"]["texts"] == 2
    assert found["all"]["S"] >= 1.0
    assert found["all"]["nodes_per_pass"] > 0
    given, others = texts
    told = contest.decode(model, Lookahead(nodes=8, remember=True), given, {"do_sample": False}, 12, others)
    assert [len(tokens) for _, tokens in told] == [12, 12]


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
