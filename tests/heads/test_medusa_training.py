"""Losses against slow references, what is trained and what is not, schedules, resuming, and every refusal."""

import dataclasses
import importlib.util
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import counting_model
from helpers.training import LORA, SETTINGS, batch, changed, small_model, texts, weights
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import TrainerCallback

from jacobi import LookaheadError
from lookahead.heads.medusa.settings import MedusaSettings
from lookahead.heads.medusa.training import MedusaRecipe, heads_loss
from lookahead.medusa import MedusaHeads, output_layer
from lookahead.training.data import Example


def test_the_sine_schedule() -> None:
    settings = dataclasses.replace(LORA, lambda_0=0.4)
    assert [settings.heads_weight(done) for done in (0.0, 1 / 3, 1.0)] == pytest.approx([0.0, 0.2, 0.4])
    assert dataclasses.replace(settings, schedule="two-stage").heads_weight(1 / 3) == 0.4
    assert MedusaSettings(schedule="two-stage").heads_weight(0.5) == 0.2
    assert MedusaSettings(schedule="two-stage", distil=True).heads_weight(0.5) == 0.01


def test_medusa_1_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = small_model()
    before, flags = weights(model), [weight.requires_grad for weight in model.parameters()]
    trained = MedusaRecipe.trained(model, texts(), SETTINGS, tmp_path)
    assert trained.model is model and not trained.changed
    assert not changed(before, model)
    assert [weight.requires_grad for weight in model.parameters()] == flags
    assert not model.training and not trained.heads.training
    assert (trained.steps, trained.planned_steps) == (4, 4)
    assert all(weight.any() for weight in trained.heads.parameters()), "every block has learnt something"


def test_training_lowers_the_loss(tmp_path: Path) -> None:
    model = counting_model(period=5).float()
    counted = [Example.of([(start + place) % 5 + 1 for place in range(12)]) for start in range(5)] * 8
    fresh, _ = heads_loss(MedusaHeads.for_model(model, 2), output_layer(model), *_hidden_and_labels(model, counted[:5]))
    settings = dataclasses.replace(SETTINGS, epochs=8.0, own_output=True)
    trained = MedusaRecipe.trained(model, counted, settings, tmp_path)
    loss, each = heads_loss(trained.heads, output_layer(model), *_hidden_and_labels(model, counted[:5]))
    assert loss < 0.1 * fresh
    assert (each < 0.5).all()


def _hidden_and_labels(model: Any, examples: list[Example]) -> tuple[Tensor, Tensor]:
    given = batch(examples)
    with torch.no_grad():
        return model.model(input_ids=given["input_ids"]).last_hidden_state, given["labels"]


def quantised(module: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it will move to another package
        return torch.ao.quantization.quantize_dynamic(module, {nn.Linear}, dtype=torch.qint8)


def test_a_quantised_model_is_left_alone(tmp_path: Path) -> None:
    model = small_model()
    model.model = quantised(model.model)
    packed = [module for module in model.modules() if "quantized" in type(module).__module__]
    before = [module.weight().int_repr().clone() for module in packed if hasattr(module, "in_features")]
    MedusaRecipe.trained(model, texts(), SETTINGS, tmp_path)
    after = [module.weight().int_repr() for module in packed if hasattr(module, "in_features")]
    assert len(before) == 7 and all(map(torch.equal, before, after))


def test_an_output_layer_without_a_gradient_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LookaheadError, match="LlamaForCausalLM, a Linear, passes no gradient on to the heads"):
        MedusaRecipe.trained(quantised(small_model()), texts(), SETTINGS, tmp_path)


def test_lora_trains_an_adapter_and_nothing_else_of_the_model(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model = small_model()
    before = weights(model)
    trained = MedusaRecipe.trained(model, texts(), LORA, tmp_path)
    assert trained.changed
    base = {name.replace(".base_layer", ""): value for name, value in model.state_dict().items()}
    assert all(torch.equal(base[name], value) for name, value in before.items())
    adapted = {name.rpartition(".lora_B")[0].rpartition(".")[2] for name in base if "lora_B" in name}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert all(value.any() for name, value in base.items() if "lora_B" in name)
    stored = load_file(tmp_path / "both" / "checkpoint-4" / "trainable.safetensors")
    assert stored.keys() == {name for name in stored if name.startswith("heads.") or "lora_" in name}
    assert trained.model.peft_config["default"].r == 2


def test_full_training_changes_all_weights(tmp_path: Path) -> None:
    model = small_model(tie_word_embeddings=True)
    before = weights(model)
    trained = MedusaRecipe.trained(model, texts(), dataclasses.replace(LORA, backbone="full"), tmp_path)
    assert trained.changed and trained.model is model
    assert changed(before, model) == set(before)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_two_stages_train_the_heads_first(tmp_path: Path) -> None:
    model = small_model()
    before = weights(model)
    seen: list[tuple[str, bool]] = []

    class Look(TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append((Path(args.output_dir).name, bool(changed(before, model))))

    settings = dataclasses.replace(LORA, backbone="full", schedule="two-stage")
    trained = MedusaRecipe.trained(model, texts(), settings, tmp_path, callbacks=[Look()])
    assert seen == [("heads", False), ("both", True)]
    assert trained.steps == 8


class Rates(TrainerCallback):
    """Notes every step's learning rates, and the weight of the heads' loss."""

    def __init__(self) -> None:
        self.rates: list[list[float]] = []
        self.weights: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.rates.append([group["lr"] for group in kwargs["optimizer"].param_groups])
        self.weights.append(kwargs["model"].heads_weight)


def test_heads_learn_four_times_as_fast_as_the_model(tmp_path: Path) -> None:
    rates = Rates()
    settings = dataclasses.replace(LORA, backbone="full", warmup=0.0)
    MedusaRecipe.trained(small_model(), texts(), settings, tmp_path, callbacks=[rates])
    cosine = [(1 + math.cos(math.pi * step / 4)) / 2 for step in range(4)]
    assert rates.rates == [pytest.approx([2e-3 * factor, 5e-4 * factor]) for factor in cosine]
    assert rates.weights == pytest.approx([0.2 * math.sin(math.pi / 2 * step / 4) for step in range(4)])


def test_rates_rise_first(tmp_path: Path) -> None:
    rates = Rates()
    MedusaRecipe.trained(small_model(), texts(), dataclasses.replace(SETTINGS, warmup=0.5), tmp_path, callbacks=[rates])
    peak = 1e-3 * math.sqrt(4096 / 32)
    cosine = [(1 + math.cos(math.pi * step / 4)) / 2 for step in range(4)]
    assert [rate for (rate,) in rates.rates] == pytest.approx(
        [peak * rise * factor for rise, factor in zip((0.5, 1, 1, 1), cosine, strict=True)]
    )


def test_rates_that_are_given() -> None:
    settings = MedusaSettings(method="medusa-2", learning_rate=4e-3)
    assert (settings.heads_rate("heads", 99), settings.heads_rate("both", 99), settings.backbone_rate) == (
        4e-3,
        4e-3,
        1e-3,
    )
    assert dataclasses.replace(settings, backbone_learning_rate=1e-5).backbone_rate == 1e-5
    assert MedusaSettings().heads_rate("heads", 4096) == 1e-3


def test_small_data_is_passed_over_more_often(tmp_path: Path) -> None:
    trained = MedusaRecipe.trained(small_model(), texts(4), dataclasses.replace(SETTINGS, min_steps=7), tmp_path)
    assert (trained.steps, trained.planned_steps) == (7, 7)


def test_training_stops_when_the_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(0, 1000, 10))
    monkeypatch.setattr("lookahead.training.stage.time.monotonic", lambda: float(next(now)))
    rates = Rates()
    settings = dataclasses.replace(SETTINGS, epochs=5.0, max_minutes=0.5, warmup=0.0, learning_rate=1.0)
    trained = MedusaRecipe.trained(small_model(), texts(), settings, tmp_path, callbacks=[rates])
    assert (trained.steps, trained.planned_steps, trained.seconds) == (4, 20, 30.0)
    factors = [(1 + math.cos(math.pi * done)) / 2 for done in (0.0, 1 / 20, 1 / 3, 2 / 3)]
    assert [rate for (rate,) in rates.rates] == pytest.approx(factors), "by the clock once that is ahead"
    assert (tmp_path / "heads" / "checkpoint-4" / "trainer_state.json").exists()


def test_progress_and_losses_are_told(tmp_path: Path) -> None:
    told: list[tuple[str, float, dict[str, float]]] = []
    settings = dataclasses.replace(LORA, backbone="full", epochs=3.0)
    MedusaRecipe.trained(small_model(), texts(), settings, tmp_path, report=lambda *args: told.append(args))
    assert [done for _, done, logs in told if not logs] == pytest.approx([step / 12 for step in range(1, 13)])
    ((stage, done, logs),) = [entry for entry in told if entry[2]]
    assert (stage, done, logs["step"]) == ("both", pytest.approx(10 / 12), 10)
    parts = [logs[name] for name in ("loss_model", "loss_head_0", "loss_head_1")]
    assert all(2.0 < part < 20.0 for part in parts)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 513}, "block_size=513: LlamaForCausalLM has positions for 512 tokens"),
        ({"precision": "fp16"}, "precision='fp16' does not train on a CPU"),
        ({"report_to": "paper"}, "report_to='paper' cannot be used here: paper is not supported"),
    ],
)
def test_settings_that_do_not_fit_the_model_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(LookaheadError, match=message):
        MedusaRecipe.trained(small_model(), texts(), dataclasses.replace(SETTINGS, **settings), tmp_path)
    assert not any(tmp_path.iterdir())


def test_weights_that_are_too_coarse_are_refused(tmp_path: Path) -> None:
    full = dataclasses.replace(LORA, backbone="full")
    with pytest.raises(LookaheadError, match=r"weights that cannot be trained \(torch.float16\)"):
        MedusaRecipe.trained(small_model().half(), texts(), full, tmp_path)


@pytest.mark.parametrize(
    ("gone", "settings", "named"),
    [
        (["accelerate"], SETTINGS, "accelerate, which is not"),
        (["peft"], LORA, "peft, which is not"),
        (["accelerate", "peft"], LORA, "accelerate and peft, which are not"),
    ],
)
def test_missing_packages_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: list[str], settings: MedusaSettings, named: str
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in gone else find(name))
    with pytest.raises(LookaheadError, match=rf"{named} installed. Run `pip install lookahead-decoding\[train\]`"):
        MedusaRecipe.trained(small_model(), texts(), settings, tmp_path)


@pytest.mark.slow
def test_mixed_precision_trains(tmp_path: Path) -> None:
    model = small_model()
    settings = dataclasses.replace(SETTINGS, precision="bf16")
    one = MedusaRecipe.trained(model, texts(), settings, tmp_path / "bf16").heads
    other = MedusaRecipe.trained(model, texts(), SETTINGS, tmp_path / "none").heads
    assert all(weight.dtype is torch.float32 for weight in one.parameters())
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert 0.0 < (mine - theirs).norm() < 0.2 * theirs.norm()
