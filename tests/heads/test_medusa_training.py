"""Losses against slow references, what is trained and what is not, schedules, resuming, and every refusal."""

import dataclasses
import importlib.util
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.marks import few
from helpers.models import F64, VOCAB, counting_model, fresh_model
from helpers.refusals import refuses
from helpers.training import LORA, SETTINGS, StopAt, batch, changed, drawn, small_model, texts, weights
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div
from transformers import TrainerCallback

from jacobi import LookaheadError
from lookahead.heads.medusa.settings import MedusaSettings
from lookahead.heads.medusa.training import MedusaModel, MedusaRecipe, distillation_loss, heads_loss, next_token_loss
from lookahead.medusa import MedusaHeads, output_layer
from lookahead.models.hidden_states import HiddenStates
from lookahead.training import data
from lookahead.training.data import IGNORE, Example
from lookahead.training.stage import Trained


def slow_loss(heads: MedusaHeads, model: Any, hidden: Tensor, labels: Tensor) -> tuple[Tensor, list[float]]:
    """The same sum, one token at a time."""
    logits = heads(hidden, output_layer(model))
    total, each = torch.zeros((), dtype=F64), []
    for head in range(heads.num_heads):
        found = [
            cross_entropy(logits[head, row, place], labels[row, place + head + 2])
            for row in range(labels.shape[0])
            for place in range(labels.shape[1] - head - 2)
            if labels[row, place + head + 2] != IGNORE
        ]
        mean = torch.stack(found).mean() if found else torch.zeros((), dtype=F64)
        total = total + 0.8 ** (head + 1) * mean
        each.append(mean.item())
    return total, each


@pytest.mark.parametrize("own_output", [False, True])
@pytest.mark.parametrize("part", [1, 7, 10**6])
def test_the_heads_loss_is_the_formula(monkeypatch: pytest.MonkeyPatch, own_output: bool, part: int) -> None:
    """Value and all gradients, whatever the size of the parts."""
    monkeypatch.setattr(data, "_LOGITS", {"cpu": 2 * part * VOCAB, "cuda": 0})
    model = fresh_model("llama")
    heads = drawn(model, own_output=own_output)
    labels = batch()["labels"]
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(*labels.shape, 32, generator=generator, dtype=F64).requires_grad_()
    trained = [hidden, *heads.parameters(), *([] if own_output else output_layer(model).parameters())]
    loss, each = heads_loss(heads, output_layer(model), hidden, labels)
    expected, slowly = slow_loss(heads, model, hidden, labels)
    torch.testing.assert_close(loss, expected)
    assert each.tolist() == pytest.approx(slowly)
    for got, wanted in zip(
        torch.autograd.grad(3.0 * loss, trained), torch.autograd.grad(3.0 * expected, trained), strict=True
    ):
        torch.testing.assert_close(got, wanted)


def test_heads_without_a_labelled_token_cost_nothing() -> None:
    model = small_model()
    heads = drawn(model)
    hidden = torch.randn(1, 3, 32)
    loss, each = heads_loss(heads, output_layer(model), hidden, torch.tensor([[7, 7, IGNORE]]))
    assert (loss.item(), each.tolist()) == (0.0, [0.0, 0.0])
    loss.backward()
    assert all(not weight.grad.any() for weight in heads.parameters() if weight.grad is not None)
    assert all(weight.grad is not None for weight in heads.parameters()), "distributed training waits for all of them"


@pytest.mark.parametrize("own_output", [False, True])
def test_the_heads_loss_under_autocast(own_output: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "_LOGITS", {"cpu": 10 * VOCAB, "cuda": 0})
    model = small_model()
    heads, labels = drawn(model, own_output=own_output), batch()["labels"]
    hidden = torch.randn(*labels.shape, 32)
    exact, _ = heads_loss(heads, output_layer(model), hidden, labels)
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = heads_loss(heads, output_layer(model), hidden, labels)
    loss.backward()
    assert loss.dtype is torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=0.02)
    assert all(weight.grad is not None and weight.grad.dtype is torch.float32 for weight in heads.parameters())


def test_the_models_own_loss_is_transformers() -> None:
    model, given = small_model(), batch()
    output = model(**given)
    torch.testing.assert_close(next_token_loss(output.logits, given["labels"]), output.loss)


def test_the_distillation_loss_is_the_divergence() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = batch()["labels"]
    adapted, original = (torch.randn(*labels.shape, VOCAB, generator=generator, dtype=F64) for _ in range(2))
    kept = labels[:, 1:] != IGNORE
    expected = kl_div(
        adapted[:, :-1][kept].log_softmax(-1), original[:, :-1][kept].log_softmax(-1), log_target=True, reduction="sum"
    ) / int(kept.sum())
    torch.testing.assert_close(distillation_loss(adapted, original, labels), expected.float(), check_dtype=False)
    assert distillation_loss(adapted, adapted, labels).item() == pytest.approx(0.0, abs=1e-6)


def test_the_output_layer_does_not_run_on_what_is_not_trained() -> None:
    model = small_model()
    together = MedusaModel(model, drawn(model), MedusaSettings()).train()
    calls: list[int] = []
    output_layer(model).register_forward_pre_hook(lambda _, args: calls.append(args[0].shape[:-1].numel()))
    loss = together(**batch())["loss"]
    labelled = [int((batch()["labels"][:, head + 2 :] != IGNORE).sum()) for head in range(2)]
    assert calls == [8, *labelled], "a look at 8 tokens, then the heads' labelled ones"
    assert not model.training and together.heads.training
    hidden = HiddenStates(output_layer(model))
    with hidden:
        hidden.expect()
        (states,) = hidden.take(model(**batch()).logits)
    torch.testing.assert_close(loss, heads_loss(together.heads, output_layer(model), states, batch()["labels"])[0])


def test_hidden_states_of_a_model_whose_inside_does_not_tell() -> None:
    """Where the model without its output layer gives other states, they are noted in a full pass."""
    model = small_model()
    layer, states = output_layer(model), []
    model.model.norm.register_forward_hook(lambda *args: states.append(args[-1]))
    plain = MedusaModel(model, drawn(model), MedusaSettings())(**batch())["loss"]

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = model.model
            self.layer = layer

        @property
        def base_model(self) -> Any:
            return lambda **inputs: type("Output", (), {"last_hidden_state": 2 * self.inside(**inputs)[0]})

        def get_output_embeddings(self) -> nn.Module:
            return self.layer

        def forward(self, **inputs: Any) -> Any:
            return model(**{name: value for name, value in inputs.items() if name != "labels"})

    torch.testing.assert_close(MedusaModel(Scaled(), drawn(model), MedusaSettings())(**batch())["loss"], plain)


def test_a_fresh_adapter_diverges_by_nothing(tmp_path: Path) -> None:
    """The reference is the model without its adapter, and without the adapter's dropout."""
    pytest.importorskip("peft")
    trained = MedusaRecipe.trained(small_model(), texts(2), dataclasses.replace(LORA, learning_rate=1e-30), tmp_path)
    together = MedusaModel(trained.model, trained.heads, dataclasses.replace(LORA, distil=True), "both").train()
    together(**batch())
    assert together.parts["loss_model"].item() == pytest.approx(0.0, abs=1e-6)
    with torch.no_grad():
        for name, weight in trained.model.named_parameters():
            if "lora_B" in name:
                weight.normal_()
    together(**batch())
    assert together.parts["loss_model"].item() > 0.01
    assert trained.model.training, "the reference pass leaves training mode on"


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
    message = "LlamaForCausalLM, a Linear, passes no gradient on to the heads"
    refuses(message, MedusaRecipe.trained, quantised(small_model()), texts(), SETTINGS, tmp_path / "output")


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
    refuses(message, MedusaRecipe.trained, small_model(), texts(), dataclasses.replace(SETTINGS, **settings), tmp_path)
    full = dataclasses.replace(LORA, backbone="full")
    coarse = r"weights that cannot be trained \(torch.float16\)"
    refuses(coarse, MedusaRecipe.trained, small_model().half(), texts(), full, tmp_path)
    assert not any(tmp_path.iterdir())


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
