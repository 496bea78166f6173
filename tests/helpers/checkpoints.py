"""Checkpoints of heads in every format, written by hand."""

import json
import pathlib
from typing import Any

import torch
from helpers.medusa import HIDDEN, drawn, states
from helpers.models import VOCAB, tiny_model
from safetensors.torch import save_file
from torch import Tensor

from lookahead.medusa import MedusaHeads, output_layer

Tensors = dict[str, Tensor]
BASE = {"model.embed_tokens.weight": torch.ones(VOCAB, 4), "lm_head.weight": torch.ones(VOCAB, 4)}


def made(num_heads: int = 3, num_layers: int = 2, own_output: bool = True) -> MedusaHeads:
    """Random heads beside the tiny Llama."""
    return drawn(MedusaHeads.for_model(tiny_model("llama"), num_heads, num_layers, own_output))


def named(heads: MedusaHeads, layer_name: str, output_name: str) -> Tensors:
    """The tensors under one format's names of a head's layers and of its output."""
    tensors = {}
    for head, blocks in enumerate(heads.blocks):
        for layer, block in enumerate(blocks.children()):
            for part in ("weight", "bias"):
                tensors[f"{layer_name.format(head, layer)}.{part}"] = block.get_parameter(f"linear.{part}")
        if heads.own_output:
            tensors[f"{output_name.format(head, heads.num_layers)}.weight"] = heads.get_parameter(
                f"outputs.{head}.weight"
            )
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def medusa(heads: MedusaHeads, prefix: str = "") -> Tensors:
    """The tensors as FasterDecoding/Medusa names them: a Sequential for each head."""
    return named(heads, prefix + "{}.{}.linear", prefix + "{}.{}")


def vllm(heads: MedusaHeads, prefix: str = "", bias: bool = True) -> Tensors:
    """The tensors as vLLM names them."""
    tensors = named(heads, prefix + "blocks.{}.layers.{}", prefix + "lm_heads.{}")
    return {name: tensor for name, tensor in tensors.items() if bias or not name.endswith(".bias")}


def store(folder: pathlib.Path, file: str, tensors: Tensors, **config: Any) -> pathlib.Path:
    """A checkpoint of one file, with config.json if there is anything in it."""
    folder.mkdir(parents=True, exist_ok=True)
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file)
    else:
        torch.save(tensors, folder / file)
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def shard(folder: pathlib.Path, tensors: Tensors, suffix: str = "safetensors") -> pathlib.Path:
    """A sharded model: every third tensor in each of three files."""
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    shards = {name: f"{stem}-{1 + index % 3:05}-of-00003.{suffix}" for index, name in enumerate(sorted(tensors))}
    for file in set(shards.values()):
        store(folder, file, {name: tensor for name, tensor in tensors.items() if shards[name] == file})
    index = {"metadata": {"total_size": 1}, "weight_map": shards}
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))
    return folder


def assert_same(read: MedusaHeads, heads: MedusaHeads) -> None:
    """Assert equal shapes and weights, and that both compute the same."""
    for name in ("hidden_size", "num_heads", "num_layers", "own_output"):
        assert getattr(read, name) == getattr(heads, name), name
    assert read.state_dict().keys() == heads.state_dict().keys()
    for name, tensor in heads.state_dict().items():
        assert torch.equal(read.state_dict()[name], tensor), name
    output = output_layer(tiny_model("llama"))
    assert torch.equal(read(states(2), output), heads(states(2), output))
    assert not read.training and all(weight.requires_grad for weight in read.parameters())


PUBLISHED = {"base_model_name_or_path": "owner/model", "medusa_num_heads": 3, "medusa_num_layers": 2}
SERVED = {"model_type": "medusa", "num_heads": 3, "num_hidden_layers": 2, "vocab_size": VOCAB, "hidden_size": HIDDEN}
