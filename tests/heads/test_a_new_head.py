"""The worked example of CONTRIBUTING: a folder and a line in the registry make a new kind of heads."""

from pathlib import Path
from typing import Any

import pytest
from bigram_head.training import BigramSettings
from helpers.models import counting_model, prompts, same_as_plain, tiny_model

from lookahead.registry import KINDS, StrategyKind, strategy_from
from lookahead.training.data import Example

SETTINGS = BigramSettings(block_size=12, batch_size=7, epochs=30.0, min_steps=0)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> StrategyKind:
    kind = StrategyKind(folder="bigram_head", strategy="strategy.Bigram", recipe="training.TrainedBigram")
    monkeypatch.setitem(KINDS, "bigram", kind)
    return kind


@pytest.mark.usefixtures("augmented")
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("settings", [{"do_sample": False}, {"do_sample": True, "temperature": 0.8}])
def test_a_fresh_head_leaves_every_text_as_it_was(
    name: str, settings: Any, registered: StrategyKind, tmp_path: Path
) -> None:
    """Read from its folder by a dict of settings; drafts that know nothing change nothing."""
    model = tiny_model(name)
    registered.part("recipe").fresh(model, SETTINGS).head.save_pretrained(str(tmp_path))
    given = {"strategy": "bigram", "head": str(tmp_path), "nodes": 6, "seed": 0}
    for batch in (1, 3):
        same_as_plain(model, prompts(batch), strategy_from(given), max_new_tokens=16, **settings)


@pytest.mark.usefixtures("augmented")
def test_a_trained_head_drafts_what_the_model_writes(registered: StrategyKind, tmp_path: Path) -> None:
    model = counting_model(period=7).float()
    counted = [Example.of([(start + place) % 7 + 1 for place in range(12)]) for start in range(7)]
    head = registered.part("recipe").trained(model, counted, SETTINGS, tmp_path / "run")
    strategy = registered.part("strategy")(head, sources=("bigram",), nodes=4, seed=0)
    stats = same_as_plain(model, prompts(1), strategy, max_new_tokens=24).stats
    assert stats.sources["bigram"] > 16 and stats.steps < 9
