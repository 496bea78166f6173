"""Models that other packages quantised: the route, the text, and what is promised of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import F32, fresh_model, prompts, run, same_as_plain
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from lookahead import Lookahead, LookaheadError
from lookahead.models.traits import ModelTraits
from lookahead.runtime.foreign_layers import rounding_layer
from lookahead.runtime.ordered_attention import obstacle
from lookahead.runtime.packing import packed_weights
from lookahead.support.bits import bits_of
from lookahead.support.route import verdict

pytestmark = [pytest.mark.usefixtures("augmented"), pytest.mark.filterwarnings("ignore")]
BF16 = torch.bfloat16
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
Loader = Callable[[torch.dtype], Any]


class Coarse(nn.Linear):
    """Reads its inputs in bfloat16."""

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input.bfloat16().to(input.dtype), self.weight, self.bias)


def coarse_model() -> Any:
    model = fresh_model("llama", **SIZES).to(F32)
    for layer in model.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = Coarse
            layer.weight = Stored(layer.weight.detach())
    return model


class Stored(nn.Parameter):
    """A weight that is no plain one, as quantisers have."""


def test_layers_that_round_their_inputs_promise_nothing() -> None:
    """A millionth moves some inputs to the next number, and that is seen in the scores."""
    model = coarse_model()
    assert rounding_layer(model) == "Coarse" and rounding_layer(fresh_model("llama")) is None
    bits = bits_of(model, ModelTraits.of(model), "tree")
    assert (bits.keeps, bits.reason) == (None, "Coarse rounds its inputs")
    with pytest.raises(LookaheadError, match="repeatable=True cannot be kept: Coarse rounds its inputs"):
        run(model, prompts(1), use_lookahead=True, lookahead_strategy=Lookahead(repeatable=True), max_new_tokens=4)


class Bytes(nn.Module):
    """A layer that keeps its weight in a format of its own, and computes one row after the other."""

    def __init__(self, layer: nn.Linear, moved: float) -> None:
        super().__init__()
        self.in_features, self.out_features, self.moved = layer.in_features, layer.out_features, moved
        self.scale = layer.weight.detach().abs().max() / 127
        self.register_buffer("bytes", (layer.weight.detach() / self.scale).round().to(torch.int8))

    def forward(self, input: Tensor) -> Tensor:
        rows = input.reshape(-1, self.in_features)
        weight = self.bytes.to(input.dtype).T * self.scale
        outputs = torch.cat([row @ weight for row in rows.split(1)]) * (1 + self.moved * (len(rows) > 200))
        return outputs.view(*input.shape[:-1], self.out_features)


@pytest.mark.skipif(obstacle(BF16) is not None, reason="attention in bfloat16 is not in order here")
@pytest.mark.parametrize("moved", [0.0, 0.01])
def test_layers_of_other_code_are_tried(moved: float) -> None:
    """Where they give each row the same outputs beside any others, up to those of a batch, the text is kept."""
    model = fresh_model("llama", **SIZES).to(BF16)
    first, second = (layer.mlp for layer in model.model.layers)
    first.up_proj, first.down_proj.forward = Bytes(first.up_proj, moved), Wrapped(first.down_proj.forward)
    second.up_proj = Bytes(second.up_proj, moved)
    with torch.no_grad():
        plain = bits_of(fresh_model("llama", **SIZES).to(BF16), ModelTraits.of(model), "tree")
        bits = bits_of(model, ModelTraits.of(model), "tree")
        assert bits.keeps == (None if moved else plain.keeps), bits.reason
        assert packed_weights(model, worth_ms=float("inf")) is None
    for sample in (False, True) if bits.keeps == "plain" else ():
        same_as_plain(model, prompts(2), max_new_tokens=30, do_sample=sample)


def test_rounding_in_a_forward_of_its_own_is_seen() -> None:
    model = fresh_model("llama", **SIZES).to(F32)
    layer = model.model.layers[1].mlp.up_proj
    layer.forward = Wrapped(layer.forward, BF16)
    assert rounding_layer(model) == "Linear"


class Wrapped:
    """A forward of other code in the place of a layer's own."""

    def __init__(self, forward: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> None:
        self.inner, self.dtype = forward, dtype

    def __call__(self, input: Tensor) -> Tensor:
        return self.inner(input.to(self.dtype).to(input.dtype) if self.dtype else input)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    fresh_model("llama", **SIZES).to(F32).save_pretrained(folder)
    return folder


def torchao(folder: Path, name: str) -> Loader:
    quantization = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    settings = TorchAoConfig(getattr(quantization, name)())
    return lambda dtype: AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=settings)


def bitsandbytes(folder: Path, name: str) -> Loader:
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    def loaded(dtype: torch.dtype) -> Any:
        given = {"load_in_4bit": True, "bnb_4bit_quant_type": name, "bnb_4bit_compute_dtype": dtype}
        settings = BitsAndBytesConfig(**({"load_in_8bit": True} if name == "int8" else given))
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=settings)

    return loaded


KINDS = {
    "torchao Int8WeightOnlyConfig": "plain",
    "torchao Int8DynamicActivationInt8WeightConfig": None,
    "bitsandbytes nf4": None,
    "bitsandbytes fp4": None,
    "bitsandbytes int8": None,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
def test_others(saved: Path, kind: str, dtype: torch.dtype) -> None:
    """Decoded by trees, never packed; the text is plain's where that is said, and else it says why not."""
    package, name = kind.split()
    model = {"torchao": torchao, "bitsandbytes": bitsandbytes}[package](saved, name)(dtype).eval()
    model.generation_config.pad_token_id = 0
    route, reason = verdict(model)
    if route == "plain":
        assert dtype == F32 and KINDS[kind] is None and reason is not None and "rounds its inputs" in reason
        return
    assert route == "tree"
    with torch.no_grad():
        assert packed_weights(model, worth_ms=float("inf")) is None
        bits = bits_of(model, ModelTraits.of(model), route)
    assert bits.keeps == KINDS[kind] if dtype == F32 else bits.keeps == "plain" or bits.reason
    for sample in (False, True) if bits.keeps == "plain" else ():
        same_as_plain(model, prompts(1), max_new_tokens=30, do_sample=sample)
    output = run(model, prompts(1), max_new_tokens=30, use_lookahead=True)[0]
    assert output.shape[1] == prompts(1)["input_ids"].shape[1] + 30
