"""Regret: the arithmetic, and one class of calls on a few tokens."""

from typing import Any

import pytest
from rich.console import Console

from benchmarks import regret


def test_regret_is_against_the_best_of_the_others() -> None:
    found = regret.regret_of({"plain": 1.0, "4": 1.4, "16": 2.0, "automatic": 1.6})
    assert found["best"] == "16"
    assert found["regret"] == pytest.approx(0.25)
    assert found["against_plain"] == pytest.approx(-0.375)
    found = regret.regret_of({"plain": 1.0, "4": 0.8, "automatic": 1.25})
    assert found == {"best": "plain", "regret": pytest.approx(-0.2), "against_plain": pytest.approx(-0.2)}


@pytest.mark.usefixtures("augmented")
def test_a_class_of_calls(loaded: tuple[Any, Any]) -> None:
    place = {"shape": "as-is", "set": "no-loop", "mode": "greedy", "dtype": "float32", "batch": 1, "new_tokens": 12}
    row = regret.measure(Console(quiet=True), *loaded, place, "code-no-loop", prompts=1, rounds=1)
    assert set(row["speeds"]) == {"plain", *map(str, regret.SIZES), "automatic"}
    assert row["speeds"]["plain"] == 1.0
    assert row["S"]["64"] >= row["S"]["plain"]
    assert row["texts_that_differ"] == 0
    assert regret.shown(row)["regret"].endswith("%")
