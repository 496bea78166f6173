"""One script a question, each on a few tokens, from the command line to JSON to a report."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import contest, step_time, theory
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
    texts = contest.units(model, tokenizer, "code", 2, 1, 12)
    given, others = texts
    told = contest.decode(model, Lookahead(nodes=8, remember=True), given, {"do_sample": False}, 12, others)
    assert [len(tokens) for _, tokens in told] == [12, 12]
    figures = contest.acceptance([stats for stats, _ in told])
    assert figures["texts"] == 2 and figures["S"] >= 1.0 and figures["nodes_per_pass"] > 0


@pytest.mark.usefixtures("augmented")
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
