"""Layers of 8 and 4 bits: how near they are, that rows are alike beside any others, and what is refused."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from helpers.models import F32, fresh_model, prompts, run, same_as_plain
from helpers.refusals import refuses
from torch import nn

from lookahead import Lookahead, quantize
from lookahead.models.code_safety import is_safe
from lookahead.models.traits import ModelTraits
from lookahead.runtime import quantised_layers
from lookahead.runtime.foreign_layers import rows_are_alike
from lookahead.runtime.packing import packed_weights
from lookahead.runtime.quantised_layers import (
    Int4Linear,
    Int8Linear,
    QuantisedLinear,
    adds_exactly,
    int8_layers,
    perplexity,
)
from lookahead.support.bits import Texts, bits_of

pytestmark = [
    pytest.mark.usefixtures("augmented"),
    pytest.mark.skipif(not adds_exactly(), reason="no exact kernel for products of bytes here"),
]
BF16 = torch.bfloat16


def model_of(name: str = "llama", **changes: Any) -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2} | changes
    return fresh_model(name, **sizes).to(BF16)


def layer_of(inputs: int, outputs: int, bias: bool) -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(inputs, outputs, bias=bias).to(BF16)


def made(kind: str, layer: nn.Linear) -> QuantisedLinear:
    return Int4Linear(layer) if kind == "int4" else int8_layers([layer])[0]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("kind", "most"), [("int8", 0.02), ("int4", 0.12)])
@torch.no_grad()
def test_outputs_are_near_and_alike_beside_any_rows(kind: str, most: float, bias: bool) -> None:
    layer = layer_of(96, 80, bias)
    quantised = made(kind, layer)
    given = torch.randn(3, 5, 96).to(BF16)
    expected, outputs = layer(given).float(), quantised(given)
    assert outputs.dtype == BF16 and outputs.shape == expected.shape
    assert (outputs.float() - expected).std() < most * expected.std()
    assert rows_are_alike(quantised, BF16) and not any(each.requires_grad for each in quantised.buffers())
    assert torch.equal(quantised(given[1:2, 2:3]), outputs[1:2, 2:3])
    assert quantised(given[:0]).shape == (0, 5, 80)
    assert torch.equal(quantised(torch.zeros(1, 96, dtype=BF16))[0], layer(torch.zeros(1, 96, dtype=BF16))[0])


@torch.no_grad()
def test_layers_that_read_the_same_input_compute_as_one() -> None:
    """Each takes its part once; who asks again, or for another input, has all computed anew."""
    layers = [layer_of(32, 16, False), layer_of(32, 48, True)]
    alone, together = [int8_layers([layer])[0] for layer in layers], int8_layers(layers)
    assert together[0].packed is together[1].packed
    given, other = torch.randn(2, 3, 32).to(BF16), torch.randn(2, 3, 32).to(BF16)
    for place, input in [(0, given), (1, given), (1, given), (0, other), (1, given), (0, given)]:
        assert torch.equal(together[place](input), alone[place](input))


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_texts_are_plain_ones(kind: Any) -> None:
    """Bit by bit, as every row of a quantised layer is alike, and attention is plain decoding's, node by node."""
    model = quantize(model_of(), kind)
    with torch.no_grad():
        bits = bits_of(model, ModelTraits.of(model), "tree", texts=Texts(positions=60))
    for sample in (False, True):
        output = same_as_plain(model, prompts(1), Lookahead(nodes=8), max_new_tokens=40, do_sample=sample)
        assert output.stats is not None and not output.stats.plain
        assert output.stats.bits == {bits.keeps or bits.reason: 1}
    if bits.limits is not None:
        assert bits.keeps == "plain"


def test_the_output_layer_leaves_the_embeddings() -> None:
    model = model_of(tie_word_embeddings=True)
    embeddings = model.get_input_embeddings().weight
    before = embeddings.clone()
    assert model.lm_head.weight is embeddings
    quantize(model, "int4")
    assert type(model.lm_head) is Int8Linear and not model.config.tie_word_embeddings
    assert type(model.model.layers[0].mlp.up_proj) is Int4Linear
    model.tie_weights()
    assert type(model.lm_head) is Int8Linear
    assert model.get_input_embeddings().weight is embeddings and torch.equal(embeddings, before)


@torch.no_grad()
def test_passes_are_safe_and_nothing_is_packed() -> None:
    model = quantize(model_of())
    assert is_safe(model)
    assert packed_weights(model, worth_ms=float("inf")) is None


def test_copies_and_casts_keep_the_weights_and_nothing_is_saved(tmp_path: Any) -> None:
    model = quantize(model_of())
    twin = deepcopy(model)
    assert run(twin, prompts(1), max_new_tokens=8)[0].tolist() == run(model, prompts(1), max_new_tokens=8)[0].tolist()
    assert model.to(F32).lm_head.scales is twin.lm_head.scales
    refuses("cannot be saved", model.save_pretrained, tmp_path)


def test_perplexity() -> None:
    model = model_of()
    ids = prompts(1)["input_ids"]
    logits = model(input_ids=ids).logits[0, :-1].float()
    expected = nn.functional.cross_entropy(logits, ids[0, 1:]).exp().item()
    assert perplexity(model, ids) == pytest.approx(expected)


def broken() -> dict[str, tuple[Any, Any, str]]:
    odd = model_of(intermediate_size=72)
    return {
        "unknown": (model_of(), "int3", "must be 'int8' or 'int4': got 'int3'"),
        "twice": (quantize(model_of()), "int8", "LlamaForCausalLM is quantised already"),
        "place": (model_of().to("meta"), "int8", "LlamaForCausalLM is on meta"),
        "dtype": (model_of().to(F32), "int8", "has weights in float32: load it with"),
        "none": (fresh_model("gpt2").transformer.to(BF16), "int8", "has no linear layers"),
        "odd": (odd, "int4", r"layers.0.mlp.up_proj, .* of LlamaForCausalLM cannot take int4"),
    }


@pytest.mark.parametrize("case", ["unknown", "twice", "place", "dtype", "none", "odd"])
def test_what_is_refused(case: str) -> None:
    model, bits, message = broken()[case]
    before = list(map(type, model.modules()))
    refuses(message, quantize, model, bits)
    assert list(map(type, model.modules())) == before


def test_machines_without_an_exact_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantised_layers, "adds_exactly", lambda: False)
    refuses("no exact kernel", quantize, model_of())
