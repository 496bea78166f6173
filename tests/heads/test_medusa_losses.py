"""Labels, losses and one training pass against slow references."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import F64, VOCAB, fresh_model
from helpers.training import LORA, batch, drawn, small_model, texts
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div

from lookahead.heads.medusa.settings import MedusaSettings
from lookahead.heads.medusa.training import MedusaModel, MedusaRecipe, distillation_loss, heads_loss, next_token_loss
from lookahead.medusa import MedusaHeads, output_layer
from lookahead.models.hidden_states import HiddenStates
from lookahead.training import data
from lookahead.training.data import IGNORE


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
