"""Which models run nothing but transformers' and torch's own code, unwatched."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.marks import few
from helpers.models import fresh_model, prompts, same_as_plain
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lookahead.models.code_safety import is_safe

pytestmark = pytest.mark.usefixtures("augmented")


class _Subclass(torch.Tensor):
    """A weight with code of its own."""


def _hook(model: Any) -> None:
    model.model.norm.register_forward_pre_hook(lambda module, inputs: None)


def _wrap(model: Any) -> None:
    model.model.norm.forward = model.model.norm.forward


def _compile(model: Any) -> None:
    model.model.norm.compile()


def _quantise(model: Any) -> None:
    weight = model.model.norm.weight.detach().as_subclass(_Subclass)
    model.model.norm.weight = nn.Parameter(weight, requires_grad=False)


class _Own(nn.Module):
    """A layer of the user's, which takes a gradient on its way, as ``no_grad`` lets it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.on = False

    def forward(self, states: Tensor) -> Tensor:
        """A step uphill."""
        if self.on:
            with torch.enable_grad():
                place = states.detach().clone().requires_grad_(True)
                (slope,) = torch.autograd.grad(self.inner(place)[..., :5].sum(), place)
            states = states + 20.0 * slope
        result: Tensor = self.inner(states)
        return result


def _own_layer(model: Any) -> None:
    model.model.norm = _Own(model.model.norm)


def _built_in_inference_mode(model: Any) -> None:
    with torch.inference_mode():
        model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.clone()


def _trace(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    with torch.no_grad():
        model.model.layers[0].mlp = torch.jit.trace(mlp, torch.zeros(1, 2, 32, dtype=torch.float64), check_trace=False)


CHANGES = [_trace, _hook, _wrap, _compile, _quantise, _own_layer, _built_in_inference_mode]


@pytest.mark.parametrize("change", few(CHANGES, *(change for change in CHANGES if change is not _compile)))
def test_is_safe(change: Callable[[Any], None]) -> None:
    """Not where somebody may see a tensor, nor where weights are no plain tensors."""
    model = fresh_model("llama")
    with torch.no_grad():
        assert is_safe(model)
        change(model)
        assert not is_safe(model)
    if change is not _built_in_inference_mode:  # whose buffer stays what it was
        same_as_plain(model, prompts(1), max_new_tokens=8)


def test_is_not_safe_in_some_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast keeps weights that it has cast, gradients are wanted, the mode is on already, operations are watched."""
    model = fresh_model("llama")
    assert not is_safe(model)
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            assert not is_safe(model)
        with torch.overrides.BaseTorchFunctionMode():
            assert not is_safe(model)
        with torch.inference_mode():
            assert not is_safe(model)
        norm = type(model.model.norm)
        with monkeypatch.context() as patch:
            patch.setattr(norm, "forward", lambda self, states: states)
            assert not is_safe(model)
        with monkeypatch.context() as patch:
            patch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", lambda *args, **kwargs: None)
            assert not is_safe(model)
        assert is_safe(model)
        assert not is_safe(model.to("meta"))


def test_gradients_inside_a_layer() -> None:
    """A layer of the user's gets the gradient that plain decoding gives it, also when it first asks in a later call."""
    model = fresh_model("llama")
    _own_layer(model)
    for on in (False, True):
        model.model.norm.on = on
        same_as_plain(model, prompts(1), max_new_tokens=16)
