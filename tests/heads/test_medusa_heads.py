"""Medusa's heads: what they compute, beside which models they run, and how the hub sees them."""

import gc
import json
import pathlib
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.checkpoints import assert_same
from helpers.medusa import HIDDEN, drawn, states
from helpers.models import F32, F64, MODELS, VOCAB, fresh_model, tiny_model
from helpers.refusals import refuses
from huggingface_hub import ModelCard, PyTorchModelHubMixin, hub_mixin
from torch import Tensor, nn

from jacobi import LookaheadError
from lookahead.heads.medusa import source
from lookahead.heads.medusa.source import fast_heads
from lookahead.medusa import MedusaHeads, output_layer, output_sizes
from lookahead.models.output_layer import copyable_weight, placement


def by_hand(heads: MedusaHeads, head: int, hidden: Tensor) -> Tensor:
    """The state of one head, from the formula of the paper."""
    state = hidden
    for layer in range(heads.num_layers):
        weight = heads.get_parameter(f"blocks.{head}.{layer}.linear.weight")
        bias = heads.get_parameter(f"blocks.{head}.{layer}.linear.bias")
        inner = state @ weight.T + bias
        state = state + inner * inner.sigmoid()
    return state


class Quantised(nn.Module):
    """An output layer whose weight is packed in integers."""

    def __init__(self, features: bool = True, weight: bool = True) -> None:
        super().__init__()
        if features:
            self.in_features, self.out_features = HIDDEN, VOCAB
        name = "weight" if weight else "qweight"
        self.register_buffer(name, torch.ones(VOCAB * HIDDEN // 8, 1, dtype=torch.int32))
        self.register_buffer("scales", torch.ones(VOCAB, dtype=F32))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden[..., :1].expand(*hidden.shape[:-1], VOCAB).to(hidden.dtype)


def model_with(layer: nn.Module) -> Any:
    model = fresh_model("llama")
    model.lm_head = layer
    return model


@pytest.mark.parametrize("own_output", [False, True])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_fresh_heads_are_the_models_own_output_layer(name: str, own_output: bool) -> None:
    model = tiny_model(name)
    heads = MedusaHeads.for_model(model, 3, 2, own_output)
    assert (heads.num_heads, heads.num_layers, heads.own_output) == (3, 2, own_output)
    output = output_layer(model)
    hidden = states(2, 5, dtype=model.dtype)
    logits = heads(hidden, output)
    torch.testing.assert_close(logits, output(hidden).expand(3, 2, 5, VOCAB))
    assert torch.equal(heads.states(hidden), hidden.expand(3, 2, 5, HIDDEN))
    assert all(weight.requires_grad for weight in heads.parameters())
    heads.check(model)


def test_own_output_layers_have_no_bias() -> None:
    model = model_with(nn.Linear(HIDDEN, VOCAB, dtype=F64))
    output = output_layer(model)
    for own_output, bias in ((False, 0.0), (True, output.bias)):
        logits = MedusaHeads.for_model(model, 2, own_output=own_output)(states(3), output)
        torch.testing.assert_close(logits[1], output(states(3)) - bias)


@pytest.mark.parametrize("own_output", [False, True])
def test_heads_compute_the_formula(own_output: bool) -> None:
    model = tiny_model("llama")
    heads = drawn(MedusaHeads.for_model(model, 3, 2, own_output))
    hidden, output = states(2, 5), output_layer(model)
    logits = heads(hidden, output)
    for head in range(3):
        state = by_hand(heads, head, hidden)
        torch.testing.assert_close(heads.states(hidden)[head], state)
        weight = heads.get_parameter(f"outputs.{head}.weight") if own_output else output.weight
        torch.testing.assert_close(logits[head], state @ weight.T)
    assert not torch.equal(logits[0], logits[1])


def test_every_block_has_weights_of_its_own() -> None:
    heads = MedusaHeads(HIDDEN, VOCAB, num_heads=3, num_layers=2, own_output=True)
    assert len({weight.data_ptr() for weight in heads.parameters()}) == 3 * 2 * 2 + 3
    model = tiny_model("llama")
    shared = MedusaHeads.for_model(model, 2)
    refuses("use the model's output layer: expected it as the second argument", shared, states(1))
    copies = MedusaHeads.for_model(model, 2, 1, own_output=True)
    pointers = {weight.data_ptr() for weight in copies.outputs.parameters()}
    assert len(pointers) == 2 and output_layer(model).weight.data_ptr() not in pointers


@pytest.mark.parametrize("own_output", [False, True])
def test_the_best_candidates(own_output: bool) -> None:
    model = tiny_model("llama")
    heads = drawn(MedusaHeads.for_model(model, 3, 1, own_output))
    hidden, output = states(2), output_layer(model)
    values, ids = heads.top(hidden, output, 5)
    expected = heads(hidden, output).float().log_softmax(-1)
    assert values.dtype is F32 and values.shape == ids.shape == (3, 2, 5)
    order = expected.argsort(-1, descending=True)[..., :5]
    assert torch.equal(ids, order)
    torch.testing.assert_close(values, expected.gather(-1, order))
    assert heads.top(hidden, output, VOCAB)[1].sort(-1).values[0, 0].tolist() == list(range(VOCAB))
    for count in (0, VOCAB + 1):
        refuses(f"{count} candidates are asked of each head: expected 1 to {VOCAB}", heads.top, hidden, output, count)


@pytest.mark.parametrize("own_output", [False, True])
@pytest.mark.parametrize("dtype", [F32, torch.bfloat16])
def test_heads_in_another_dtype_than_the_model(dtype: torch.dtype, own_output: bool) -> None:
    model = tiny_model("llama")
    heads = drawn(MedusaHeads.for_model(model, 2, 1, own_output))
    exact = heads(states(3), output_layer(model))
    heads.to(dtype)
    got = heads(states(3), output_layer(model))
    assert got.dtype is (dtype if own_output else F64)
    tolerance = 1e-4 if dtype is F32 else 0.3
    torch.testing.assert_close(got.double(), exact, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [F32, torch.bfloat16, torch.float16])
def test_fresh_heads_have_the_models_dtype(dtype: torch.dtype) -> None:
    model = fresh_model("llama").to(dtype)
    for own_output in (False, True):
        heads = MedusaHeads.for_model(model, 2, 1, own_output)
        assert {weight.dtype for weight in heads.parameters()} == {dtype}
        assert heads(states(1, dtype=dtype), output_layer(model)).dtype is dtype
        assert placement(model) == (torch.device("cpu"), dtype)


@pytest.mark.parametrize(
    "layer", [Quantised(), Quantised(weight=False), Quantised(features=False)], ids=["packed", "renamed", "config"]
)
def test_a_quantised_output_layer(layer: Quantised) -> None:
    model = model_with(layer).bfloat16()
    layer.scales = layer.scales.float()
    assert output_sizes(model) == (HIDDEN, VOCAB)
    heads = MedusaHeads.for_model(model, 2)
    assert {weight.dtype for weight in heads.parameters()} == {torch.bfloat16}
    heads.check(model)
    hidden = states(2, dtype=torch.bfloat16)
    assert torch.equal(heads(hidden, layer)[1], layer(hidden))
    with pytest.raises(LookaheadError, match="The output layer of LlamaForCausalLM, a Quantised, cannot be copied"):
        MedusaHeads.for_model(model, 2, own_output=True)


def test_an_offloaded_output_layer() -> None:
    model = fresh_model("llama")
    model.lm_head = model.lm_head.to("meta")
    model.lm_head._hf_hook = SimpleNamespace(execution_device="cpu")
    heads = MedusaHeads.for_model(model, 2)
    assert {weight.device.type for weight in heads.parameters()} == {"cpu"}
    assert not any(weight.any() for weight in heads.parameters())
    assert copyable_weight(model.lm_head) is None
    refuses("not a quantised, sharded or offloaded one", MedusaHeads.for_model, model, 2, own_output=True)


def test_sizes_are_those_of_the_output_layer() -> None:
    model = fresh_model("llama")
    model.lm_head = nn.Linear(24, 40, bias=False)
    assert output_sizes(model) == (24, 40)
    model.lm_head = nn.Embedding(40, 24)  # no features are named, so the weight tells
    assert output_sizes(model) == (24, 40)


def refuse() -> None:
    raise NotImplementedError


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (tiny_model("llama").model, "The output layer of LlamaModel cannot be reached"),
        (SimpleNamespace(get_output_embeddings=refuse), "cannot be reached"),
        (nn.Linear(2, 2), "The output layer of Linear cannot be reached: expected get_output_embeddings"),
        (SimpleNamespace(get_output_embeddings=lambda: None), "of SimpleNamespace cannot be reached.*got NoneType"),
        (SimpleNamespace(get_output_embeddings=lambda: torch.ones(2)), "cannot be reached.*got Tensor"),
        (SimpleNamespace(get_output_embeddings=nn.Identity), "sizes of the output layer .* a Identity, cannot be seen"),
    ],
)
def test_models_without_an_output_layer_are_refused(model: Any, message: str) -> None:
    heads = MedusaHeads(HIDDEN, VOCAB)
    for action in (MedusaHeads.for_model, heads.check):
        refuses(message, action, model)


def test_heads_of_another_model_are_refused() -> None:
    model = tiny_model("llama")
    refuses(f"have a vocabulary of 50, and LlamaForCausalLM has one of {VOCAB}", MedusaHeads(HIDDEN, 50).check, model)
    with pytest.raises(LookaheadError, match=f"hidden size of 16 and belong to a/b, and .* has one of {HIDDEN}"):
        MedusaHeads(16, VOCAB, base_model="a/b").check(model)
    MedusaHeads(HIDDEN, None).check(model)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["blocks.1.0.linear.weight", "blocks.0.1.linear.bias", "outputs.1.weight"])
def test_broken_heads_are_refused(name: str, value: float) -> None:
    model = tiny_model("llama")
    heads = MedusaHeads.for_model(model, 2, 2, own_output=True)
    heads.get_parameter(name).data.flatten()[3] = value
    refuses(f"The heads are broken: 1 of .* numbers of {name} are NaN or infinite", heads.check, model)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_size": 0}, "hidden_size=0: expected an integer from 1 on"),
        ({"vocab_size": -1}, "vocab_size=-1"),
        ({"vocab_size": None, "own_output": True}, "vocab_size=None"),
        ({"num_heads": 0}, "num_heads=0"),
        ({"num_heads": 1.5}, "num_heads=1.5"),
        ({"num_layers": 0}, "num_layers=0: expected an integer from 1 on"),
        ({"num_layers": -1, "own_output": True}, "num_layers=-1: expected an integer from 0 on"),
    ],
)
def test_impossible_sizes_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(LookaheadError, match=f"MedusaHeads cannot have {message}"):
        MedusaHeads(**{"hidden_size": HIDDEN, "vocab_size": VOCAB} | settings)


@pytest.mark.parametrize("own_output", [False, True])
def test_saved_heads_are_read_back(own_output: bool, tmp_path: pathlib.Path) -> None:
    model = tiny_model("llama")
    heads = drawn(MedusaHeads.for_model(model, 3, 2, own_output))
    heads.base_model = "owner/model"
    heads.save_pretrained(tmp_path / "heads")
    assert json.loads((tmp_path / "heads" / "config.json").read_text()) == {
        "base_model_name_or_path": "owner/model",
        "medusa_num_heads": 3,
        "medusa_num_layers": 2,
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "version": "1" if own_output else "2",
    }
    read = MedusaHeads.from_pretrained(tmp_path / "heads")
    assert (read.base_model, read.vocab_size) == ("owner/model", VOCAB)
    assert_same(read, heads)


def test_heads_read_for_a_model_take_its_place(tmp_path: pathlib.Path) -> None:
    model = tiny_model("llama")
    drawn(MedusaHeads.for_model(model, 2)).half().save_pretrained(tmp_path)
    assert {weight.dtype for weight in MedusaHeads.from_pretrained(tmp_path).parameters()} == {torch.float16}
    assert {weight.dtype for weight in MedusaHeads.from_pretrained(tmp_path, model=model).parameters()} == {F64}
    assert MedusaHeads.from_pretrained(tmp_path, map_location="meta").blocks[0][0].linear.weight.is_meta
    refuses("hidden size of 32", MedusaHeads.from_pretrained, tmp_path, model=fresh_model("llama", hidden_size=16))


def test_the_model_card_says_what_the_heads_are(tmp_path: pathlib.Path) -> None:
    heads = MedusaHeads(HIDDEN, VOCAB, 3, 1, base_model="owner/model")
    heads.save_pretrained(tmp_path)
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.library_name == "lookahead"
    assert {"medusa", "speculative-decoding"} <= set(card.data.tags)
    assert card.data.base_model == "owner/model"
    assert "3 Medusa heads of 1 residual block each" in card.text
    assert "for owner/model" in card.text and "arxiv.org/abs/2401.10774" in card.text
    local = MedusaHeads(HIDDEN, None, 1, 2, base_model=str(tmp_path)).generate_model_card()
    assert local.data.base_model is None and str(tmp_path) not in str(local)
    assert "vocabulary" not in local.text and "residual blocks each" in local.text
    (tmp_path / "README.md").write_text("mine")
    heads.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine", "a card of the user's own is kept"
    assert "base_model" not in MedusaHeads(HIDDEN, VOCAB).generate_model_card().data.to_dict()


def test_heads_can_be_pushed_to_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    uploaded: dict[str, Any] = {}

    class Hub:
        def __init__(self, token: str | None = None) -> None:
            uploaded["token"] = token

        def create_repo(self, repo_id: str, **_settings: Any) -> Any:
            return SimpleNamespace(repo_id=repo_id)

        def upload_folder(self, repo_id: str, folder_path: pathlib.Path, **_settings: Any) -> str:
            uploaded[repo_id] = sorted(path.name for path in folder_path.iterdir())
            return "a commit"

    monkeypatch.setattr(hub_mixin, "HfApi", Hub)
    heads = MedusaHeads(HIDDEN, VOCAB)
    assert isinstance(heads, PyTorchModelHubMixin)
    assert heads.push_to_hub("owner/heads", token="secret") == "a commit"
    assert uploaded == {"token": "secret", "owner/heads": ["README.md", "config.json", "medusa_lm_head.safetensors"]}


# --- all heads at once -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("num_heads", "num_layers", "own"), [(1, 1, True), (3, 2, False), (4, 4, True)])
def test_stacked_blocks_are_the_heads(num_heads: int, num_layers: int, own: bool, dtype: torch.dtype) -> None:
    model = tiny_model("llama")
    heads = drawn(MedusaHeads.for_model(model, num_heads, num_layers, own)).to(dtype)
    fast = fast_heads(heads)
    assert fast is not heads
    for hidden in (states(1), states(5)):
        got, expected = fast(hidden, output_layer(model)), heads(hidden, output_layer(model))
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


def test_copies_follow_the_weights() -> None:
    """They are kept from call to call, and made again when a weight has changed or moved."""
    model = tiny_model("llama")
    heads, layer, hidden = drawn(MedusaHeads.for_model(model, 2)), output_layer(model), states(1)
    fast_heads(heads)
    (kept,) = source._stacks.of(heads).values()
    fast_heads(heads)
    assert list(source._stacks.of(heads).values()) == [kept]
    drawn(heads, seed=5)
    torch.testing.assert_close(fast_heads(heads)(hidden, layer), heads(hidden, layer), atol=1e-5, rtol=1e-4)
    heads.to(F32)
    torch.testing.assert_close(fast_heads(heads)(hidden, layer), heads(hidden, layer), atol=1e-5, rtol=1e-4)
    (kept,) = source._stacks.of(heads).values()
    gone = weakref.ref(kept)
    del heads, kept
    gc.collect()
    assert gone() is None


def test_what_is_no_plain_block_runs_as_it_is() -> None:
    """Hooks, adapted or quantised layers, large ones, heads without blocks, classes of the user's."""
    model = tiny_model("llama")

    class Own(MedusaHeads):
        pass

    hooked, inner, adapted = (drawn(MedusaHeads.for_model(model, 2)) for _ in range(3))
    hooked.register_forward_hook(lambda *_: None)
    inner.blocks[1][0].linear.register_forward_pre_hook(lambda *_: None)
    adapted.blocks[0][0].linear = nn.Sequential(nn.Linear(HIDDEN, HIDDEN))
    without = MedusaHeads(HIDDEN, VOCAB, 2, num_layers=0, own_output=True)
    with torch.inference_mode():
        frozen = drawn(MedusaHeads.for_model(model, 2))
    for heads in (hooked, inner, adapted, without, frozen, Own(HIDDEN, VOCAB), MedusaHeads(1200, 5, 1)):
        assert fast_heads(heads) is heads
