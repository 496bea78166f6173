"""A training that was stopped goes on as if it had not been."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from helpers.marks import few
from helpers.training import LORA, SETTINGS, StopAt, changed, small_model, texts, weights

from jacobi import LookaheadError
from lookahead.heads.medusa.settings import MedusaSettings
from lookahead.heads.medusa.training import MedusaRecipe
from lookahead.training.stage import Trained


def resumed(settings: MedusaSettings, folder: Path, stage: str, step: int) -> tuple[Trained, Trained]:
    """A training that nobody interrupted, and one that was."""
    settings = dataclasses.replace(settings, epochs=2.0, save_steps=3)
    whole = MedusaRecipe.trained(small_model(), texts(), settings, folder / "whole")
    with pytest.raises(KeyboardInterrupt):
        MedusaRecipe.trained(small_model(), texts(), settings, folder / "parts", callbacks=[StopAt(stage, step)])
    return whole, MedusaRecipe.trained(small_model(), texts(), settings, folder / "parts", resume=True)


def same_weights(one: Trained, other: Trained) -> None:
    for mine, theirs in ((one.heads, other.heads), (one.model, other.model)):
        assert not changed(weights(mine), theirs)
    assert (one.steps, one.planned_steps) == (other.steps, other.planned_steps)


@pytest.mark.parametrize("step", few([3, 6], 3))
def test_a_resumed_training_ends_with_the_same_heads(tmp_path: Path, step: int) -> None:
    """In the middle of an epoch, and with the data in another order than in the first epoch."""
    same_weights(*resumed(SETTINGS, tmp_path, "heads", step))


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "step"), [("heads", 6), ("heads", 8), ("both", 3)])
@pytest.mark.parametrize("backbone", ["lora", "full"])
def test_resuming_either_stage(tmp_path: Path, backbone: Any, stage: str, step: int) -> None:
    """Dropout of the adapter included."""
    settings = dataclasses.replace(LORA, schedule="two-stage", backbone=backbone)
    same_weights(*resumed(settings, tmp_path, stage, step))


def test_what_was_finished_is_only_read(tmp_path: Path) -> None:
    trained = MedusaRecipe.trained(small_model(), texts(), SETTINGS, tmp_path)
    stopped = [StopAt("heads", step) for step in range(9)]
    same_weights(
        trained, MedusaRecipe.trained(small_model(), texts(), SETTINGS, tmp_path, resume=True, callbacks=stopped)
    )


def test_time_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(0, 1000, 10))
    monkeypatch.setattr("lookahead.training.stage.time.monotonic", lambda: float(next(now)))
    settings = dataclasses.replace(SETTINGS, save_steps=3, epochs=5.0, max_minutes=0.5)
    with pytest.raises(KeyboardInterrupt):
        MedusaRecipe.trained(small_model(), texts(), settings, tmp_path, callbacks=[StopAt("heads", 3)])
    trained = MedusaRecipe.trained(small_model(), texts(), settings, tmp_path, resume=True)
    assert (trained.steps, trained.seconds) == (5, 30.0)


def test_more_time_can_be_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(0, 1000, 10))
    monkeypatch.setattr("lookahead.training.stage.time.monotonic", lambda: float(next(now)))
    settings = dataclasses.replace(SETTINGS, epochs=5.0, max_minutes=0.5)
    assert MedusaRecipe.trained(small_model(), texts(), settings, tmp_path).steps == 4
    assert MedusaRecipe.trained(small_model(), texts(), settings, tmp_path, resume=True).steps == 4
    more = dataclasses.replace(settings, max_minutes=1.0)
    assert MedusaRecipe.trained(small_model(), texts(), more, tmp_path, resume=True).steps == 8


def test_other_weights_than_are_trained_are_refused(tmp_path: Path) -> None:
    MedusaRecipe.trained(small_model(), texts(), SETTINGS, tmp_path)
    (tmp_path / "heads" / "finished.safetensors").unlink()
    with pytest.raises(LookaheadError, match="holds other weights than are trained"):
        MedusaRecipe.trained(small_model(), texts(), dataclasses.replace(SETTINGS, num_heads=3), tmp_path, resume=True)
