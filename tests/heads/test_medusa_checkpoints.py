"""Heads in every published format, written here by hand, and everything that is refused."""

import json
import logging
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.checkpoints import BASE, PUBLISHED, SERVED, Tensors, assert_same, made, medusa, shard, store, vllm
from helpers.medusa import HIDDEN, drawn
from helpers.models import VOCAB, fresh_model, tiny_model
from helpers.refusals import refuses
from helpers.toy import examples
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from lookahead.heads import storage
from lookahead.medusa import MedusaHeads, output_layer, read_heads, write_heads

HEADS, FULL = "Medusa, version {}", "full model with heads (Medusa, version {})"


def whole(heads: MedusaHeads) -> Tensors:
    """The tensors of a full model with heads."""
    return BASE | medusa(heads, "medusa_head.")


FORMATS: dict[str, tuple[Callable[[pathlib.Path, MedusaHeads], pathlib.Path], str]] = {
    "pt": (lambda f, h: store(f, "medusa_lm_head.pt", medusa(h), **PUBLISHED), HEADS),
    "safetensors": (lambda f, h: store(f, "medusa_lm_head.safetensors", medusa(h), **PUBLISHED), HEADS),
    "no config": (lambda f, h: store(f, "medusa_lm_head.pt", medusa(h)), HEADS),
    "file": (lambda f, h: store(f, "heads.pt", medusa(h), **PUBLISHED) / "heads.pt", HEADS),
    "other name": (lambda f, h: store(f, "heads.safetensors", medusa(h), **PUBLISHED), HEADS),
    "prefix": (lambda f, h: store(f, "medusa_lm_head.pt", medusa(h, "medusa_head."), **PUBLISHED), HEADS),
    "full": (lambda f, h: store(f, "model.safetensors", whole(h), **PUBLISHED), FULL),
    "full bin": (lambda f, h: store(f, "pytorch_model.bin", whole(h), **PUBLISHED), FULL),
    "full shards": (lambda f, h: shard(f, whole(h)), FULL),
    "full bin shards": (lambda f, h: shard(f, whole(h), "bin"), FULL),
    "index": (lambda f, h: shard(f, whole(h)) / "model.safetensors.index.json", FULL),
}


@pytest.mark.parametrize("own_output", [True, False], ids=["own", "shared"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_read(name: str, own_output: bool, tmp_path: pathlib.Path) -> None:
    heads = made(own_output=own_output)
    write, title = FORMATS[name]
    read = MedusaHeads.as_stored(write(tmp_path / "heads", heads))
    assert_same(read, heads)
    assert read.stored["format"] == title.format(1 if own_output else 2)
    assert "remarks" not in read.stored
    assert read.vocab_size == (VOCAB if own_output else None)
    assert_same(MedusaHeads.from_pretrained(write(tmp_path / "heads", heads)), heads)


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_vllms_format_is_read(file: str, prefix: str, tmp_path: pathlib.Path) -> None:
    heads = made()
    read = MedusaHeads.as_stored(store(tmp_path, file, vllm(heads, prefix), **SERVED))
    assert_same(read, heads)
    assert read.stored == {"format": "vLLM", "files": [file]}


def test_vllms_blocks_may_have_no_bias(tmp_path: pathlib.Path) -> None:
    heads = made()
    for name, weight in heads.named_parameters():
        if name.endswith("bias"):
            weight.data.zero_()
    assert_same(read_heads(store(tmp_path, "model.safetensors", vllm(heads, bias=False))), heads)


@pytest.mark.parametrize("name", ["lm_heads.0.weight", "lm_head.weight"])
def test_vllms_one_output_layer_is_the_models(name: str, tmp_path: pathlib.Path) -> None:
    model, heads = tiny_model("llama"), made(own_output=False)
    tensors = vllm(heads) | {name: output_layer(model).weight.detach().clone()}
    folder = store(tmp_path, "model.safetensors", tensors, original_lm_head=True)
    assert_same(read_heads(folder), heads)
    assert read_heads(folder).vocab_size == VOCAB
    assert_same(read_heads(folder, model), heads)
    half = {key: tensor.half() for key, tensor in tensors.items()}
    assert read_heads(store(tmp_path, "model.safetensors", half), model).vocab_size == VOCAB
    store(tmp_path, "model.safetensors", tensors | {name: torch.randn(VOCAB, HIDDEN)})
    refuses("says original_lm_head, but its output layer is not that of Llama", read_heads, folder, model)


@given(st.integers(1, 12), st.integers(0, 3), st.booleans())
@examples(25)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, num_heads: int, num_layers: int, own: bool
) -> None:
    heads = made(num_heads, max(num_layers, int(not own)), own)
    folder = tmp_path_factory.mktemp("heads")
    write_heads(heads, folder)
    (file,) = folder.glob("*.safetensors")
    held = load_file(file)
    expected = medusa(heads)
    assert held.keys() == expected.keys()
    assert all(torch.equal(held[name], tensor) for name, tensor in expected.items())
    assert_same(read_heads(folder), heads)


def test_tensors_win_over_a_wrong_config(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    heads = made()
    wrong = {"medusa_num_heads": 2, "medusa_num_layers": 1, "hidden_size": 4096, "vocab_size": 32000}
    with caplog.at_level(logging.WARNING, "lookahead"):
        read = MedusaHeads.as_stored(store(tmp_path, "medusa_lm_head.pt", medusa(heads), **wrong))
    assert_same(read, heads)
    assert read.vocab_size == VOCAB
    assert len(read.stored["remarks"]) == 4
    assert "config.json says medusa_num_heads 2, and the tensors 3" in caplog.text
    served = {"num_heads": 5, "num_hidden_layers": 2, "original_lm_head": True}
    read = MedusaHeads.as_stored(store(tmp_path / "vllm", "model.safetensors", vllm(heads), **served))
    assert_same(read, heads)
    assert [remark.split(",")[0] for remark in read.stored["remarks"]] == [
        "config.json says num_heads 5",
        "config.json says original_lm_head",
    ]


def test_the_config_adds_what_tensors_do_not_tell(tmp_path: pathlib.Path) -> None:
    heads = made(own_output=False)
    folder = store(tmp_path, "medusa_lm_head.pt", medusa(heads), vocab_size=VOCAB, **PUBLISHED)
    assert read_heads(folder).vocab_size == VOCAB
    assert read_heads(folder).base_model == "owner/model"
    full = store(tmp_path / "full", "model.safetensors", whole(heads))
    assert read_heads(full).base_model == str(full)
    assert read_heads(full).vocab_size is None
    assert read_heads(full, tiny_model("llama")).vocab_size == VOCAB


def test_only_the_heads_of_a_full_model_are_read(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = made()
    shard(tmp_path, whole(heads))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    for name in BASE:
        index["weight_map"][name] = "model-of-gigabytes.safetensors"  # which is not even there
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = MedusaHeads.as_stored(tmp_path)
    assert_same(found, heads)
    assert found.stored["files"] == [f"model-{part:05}-of-00003.safetensors" for part in (1, 2, 3)]
    read = []
    real = storage.safe_open

    class Watched:
        def __init__(self, *args: Any, **settings: Any) -> None:
            self.file = real(*args, **settings)

        def keys(self) -> Any:
            return self.file.keys()

        def get_tensor(self, name: str) -> Tensor:
            read.append(name)
            return self.file.get_tensor(name)

    monkeypatch.setattr(storage, "safe_open", Watched)
    read_heads(store(tmp_path / "one", "model.safetensors", whole(heads)))
    assert sorted(read) == sorted(medusa(heads, "medusa_head."))


def test_dtypes_are_kept_and_mixed_ones_widened(tmp_path: pathlib.Path) -> None:
    tensors = medusa(made())
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        half = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        read = read_heads(store(tmp_path, "medusa_lm_head.pt", half))
        assert {weight.dtype for weight in read.parameters()} == {dtype}
        tensors["0.0.linear.bias"] = tensors["0.0.linear.bias"].half()
    mixed = {name: tensor.to(torch.bfloat16 if "linear" in name else torch.float16) for name, tensor in tensors.items()}
    read = read_heads(store(tmp_path, "medusa_lm_head.pt", mixed))
    assert {weight.dtype for weight in read.parameters()} == {torch.float32}
    assert torch.equal(read.get_parameter("outputs.2.weight"), mixed["2.2.weight"].float())


def test_safetensors_are_preferred_and_heads_over_models(tmp_path: pathlib.Path) -> None:
    heads = made()
    store(tmp_path, "medusa_lm_head.safetensors", medusa(heads))
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"not read")
    store(tmp_path, "model.safetensors", BASE)
    assert MedusaHeads.as_stored(tmp_path).stored["files"] == ["medusa_lm_head.safetensors"]


def test_the_config_of_a_full_model_is_not_mistaken_for_that_of_heads(tmp_path: pathlib.Path) -> None:
    model = fresh_model("llama")
    model.save_pretrained(tmp_path)
    heads = drawn(MedusaHeads.for_model(model, 3, 1))
    tensors = load_file(tmp_path / "model.safetensors")
    store(tmp_path, "model.safetensors", tensors | medusa(heads, "medusa_head."))
    read = MedusaHeads.as_stored(tmp_path, model=model)
    assert_same(read, heads)
    assert "remarks" not in read.stored and read.vocab_size == VOCAB
