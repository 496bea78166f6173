"""Every change of a model that changes what its passes do is seen, and nothing else is."""

import functools
import gc
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.models import fresh_model
from torch import nn
from transformers import LlamaForCausalLM, activations
from transformers.models.llama import modeling_llama

from lookahead.models.fingerprint import fingerprint
from lookahead.models.hidden_states import HiddenStates


def model_with_settings() -> Any:
    """One that has settings of every kind."""
    model = fresh_model("llama")
    model.config.rope_parameters = {"rope_type": "default", "nested": {"beta": [1.0, 2.0]}}
    model.config.answer = -1
    layer = model.model.layers[0]
    layer.tensor, layer.array, layer.number = torch.tensor(1.0), np.ones(2), np.float32(1.0)
    layer.mlp.config = type(model.config)(num_hidden_layers=5)  # a copy of its own
    model.model.forward = functools.partial(type(model.model).forward, model.model)
    layer.self_attn.helper = lambda states: states
    return model


def replaced(module: nn.Module, name: str) -> None:
    """The same numbers at another place."""
    setattr(module, name, nn.Parameter(getattr(module, name).detach().clone()))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "number": lambda model: setattr(model.config, "answer", -2),  # which hash alike
    "kind of number": lambda model: setattr(model.config, "answer", -1.0),
    "inside dicts": lambda model: model.config.rope_parameters["nested"]["beta"].append(3.0),
    "config of one layer": lambda model: setattr(model.model.layers[0].mlp.config, "num_hidden_layers", 6),
    "attribute of a module": lambda model: setattr(model.model.layers[0].self_attn, "scaling", 3.0),
    "list of adapters": lambda model: setattr(model.model.layers[0].mlp, "_active_adapter", ["one"]),
    "tensor": lambda model: setattr(model.model.layers[0], "tensor", torch.tensor(1.0)),
    "array": lambda model: setattr(model.model.layers[0], "array", np.ones(2)),
    "number of NumPy": lambda model: setattr(model.model.layers[0], "number", np.float32(-1.0)),
    "function": lambda model: setattr(model.model.layers[0].self_attn, "helper", lambda states: states),
    "method": lambda model: setattr(
        model.model.layers[0].mlp, "act", types.MethodType(lambda self, states: states, model)
    ),
    "partial": lambda model: setattr(model.model, "forward", functools.partial(type(model.model).forward, model.model)),
    "training": lambda model: model.model.layers[0].self_attn.train(),
    "hook": lambda model: model.model.norm.register_forward_hook(lambda *_: None),
    "hook before": lambda model: model.model.norm.register_forward_pre_hook(lambda *_: None),
    "weight": lambda model: replaced(model.lm_head, "weight"),
    "tied weights": lambda model: setattr(model.lm_head, "weight", model.model.embed_tokens.weight),
    "weights over the same memory": lambda model: (
        setattr(
            model.model.layers[1].input_layernorm,
            "weight",
            nn.Parameter(model.model.layers[1].input_layernorm.weight.data),
        )
        or setattr(model.model.norm, "weight", model.model.layers[1].input_layernorm.weight)
    ),
    "layer": lambda model: model.model.layers.pop(1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_seen(change: str) -> None:
    model = model_with_settings()
    before = fingerprint(model)
    assert fingerprint(model) == before
    assert hash(fingerprint(model)) == hash(before)
    CHANGES[change](model)
    assert fingerprint(model) != before


def restrided(model: Any) -> None:
    """The same memory, read in another order."""
    weight = model.model.layers[0].self_attn.o_proj.weight
    weight.data = weight.data.t()


MORE_CHANGES: dict[str, Callable[[Any], Any]] = {
    "strides": restrided,
    "shape": lambda model: setattr(model.lm_head.weight, "data", model.lm_head.weight.data[:40]),
    "dtype": lambda model: setattr(model.lm_head.weight, "data", model.lm_head.weight.data.view(torch.int64)),
}


@pytest.mark.parametrize("change", MORE_CHANGES)
def test_how_weights_lie_is_seen(change: str) -> None:
    """Where they lie is the same."""
    model = fresh_model("llama").requires_grad_(False)
    before, place = fingerprint(model), model.lm_head.weight.data_ptr()
    MORE_CHANGES[change](model)
    assert fingerprint(model) != before
    assert model.lm_head.weight.data_ptr() == place


SWITCHES: dict[str, Callable[[bool], Any]] = {
    "TF32": lambda on: setattr(torch.backends.cuda.matmul, "allow_tf32", on),
    "TF32 of cuDNN": lambda on: setattr(torch.backends.cudnn, "allow_tf32", not on),
    "precision": lambda on: torch.set_float32_matmul_precision("high" if on else "highest"),
    "new precision": lambda on: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32" if on else "none"),
    "deterministic": torch.use_deterministic_algorithms,
    "flash": lambda on: torch.backends.cuda.enable_flash_sdp(not on),
    "memory-efficient": lambda on: torch.backends.cuda.enable_mem_efficient_sdp(not on),
    "cuDNN": lambda on: torch.backends.cuda.enable_cudnn_sdp(not on),
    "math": lambda on: torch.backends.cuda.enable_math_sdp(not on),
    "sums": lambda on: setattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", not on),
    "sums of half": lambda on: setattr(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", not on),
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_switches_of_kernels_are_seen(switch: str) -> None:
    """Also those of which torch tells nothing by their old names, once they were set by the new ones."""
    model = fresh_model("llama")
    before = fingerprint(model)
    SWITCHES[switch](True)
    try:
        assert fingerprint(model) != before
    finally:
        SWITCHES[switch](False)
        torch.backends.cuda.matmul.fp32_precision = "none"  # the old names leave another word for it
    assert torch.get_float32_matmul_precision() == "highest"
    assert fingerprint(model) == before or switch in ("TF32", "precision")


def test_shared_weights_over_one_memory() -> None:
    """Two parameters over the memory of one are two inputs."""
    model = fresh_model("llama", tie_word_embeddings=True)
    before = fingerprint(model)
    model.load_state_dict(model.state_dict(), assign=True)
    assert fingerprint(model) != before


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (modeling_llama, "apply_rotary_pos_emb"),
        (modeling_llama, "rotate_half"),
        (modeling_llama.LlamaMLP, "helper"),
        (nn.functional, "scaled_dot_product_attention"),
    ],
)
def test_functions_and_methods_are_code(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The family's and torch's."""
    model = fresh_model("llama")
    before = fingerprint(model)
    monkeypatch.setattr(owner, name, lambda *states, **_: states, raising=name != "helper")
    assert fingerprint(model) != before
    monkeypatch.undo()
    assert fingerprint(model) == before


class Derived(LlamaForCausalLM):
    """Somebody's own class."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize("kind", [nn.Linear, modeling_llama.LlamaDecoderLayer, activations.SiLUActivation, Derived])
def test_passes_of_other_classes_are_code(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where a wrapper looks like what it wraps."""
    model = Derived(fresh_model("llama").config)
    model.model.layers[0].mlp.act_fn = activations.SiLUActivation()
    before = fingerprint(model)
    own = kind.forward
    monkeypatch.setattr(kind, "forward", functools.wraps(own)(lambda *states, **given: own(*states, **given)))
    assert fingerprint(model) != before


def test_what_changes_nothing_is_not_seen() -> None:
    """Numbers in place, gradients, a pass, and what this library hangs on a model."""
    model = fresh_model("llama")
    before = fingerprint(model)
    with torch.no_grad():
        model.lm_head.weight.neg_()
        model(torch.tensor([[3, 4, 5]]))
    model.requires_grad_(False)
    with HiddenStates(model.lm_head):
        assert fingerprint(model) == before
    assert fingerprint(fresh_model("llama")) != before, "another model"


def test_nothing_is_held() -> None:
    model = model_with_settings()
    model.model.layers[0].self_attn.bound = types.MethodType(lambda self: None, model)
    kept = fingerprint(model)
    watched = weakref.ref(model)
    del model
    gc.collect()
    assert watched() is None
    assert kept
