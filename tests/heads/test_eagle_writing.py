"""EAGLE heads that are written: both formats, from one to the other, and what is refused."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from helpers.eagle import random_network
from helpers.models import VOCAB, fresh_model, prompts, same_as_plain
from safetensors.torch import load_file, save_file

from jacobi import LookaheadError
from lookahead.eagle import Eagle, EagleHead
from lookahead.heads.eagle.files import Format
from lookahead.heads.eagle.network import EagleNetwork

LAYERS = (2, 3, 4)
KINDS: dict[str, Any] = {
    "eagle-1": {"version": 1, "vocab_size": VOCAB},
    "own embeddings": {"version": 1, "own_embeddings": VOCAB, "fusion_bias": True, "vocab_size": VOCAB},
    "eagle-3": {"version": 3, "feature_layers": LAYERS, "base_model": "some/model"},
    "usual layers": {"version": 3, "layers": 2},
    "qwen": {"version": 3, "feature_layers": LAYERS, "attention_bias": True, "norm_before_residual": True},
    "qwen3": {"version": 3, "layers": 2, "query_key_norm": True},
    "qwen3, eagle-1": {"version": 1, "vocab_size": VOCAB, "query_key_norm": True},
    "normed": {"version": 3, "feature_norms": "each", "norm_output": True},
    "normed together": {"version": 3, "feature_norms": "all"},
    "small vocabulary": {"version": 3, "draft_vocab_size": 20},
    "the model's output": {"version": 3, "own_output": False, "draft_vocab_size": None},
    "lines of the model's output": {"version": 3, "own_output": False, "draft_vocab_size": 20},
    "long": {"version": 3, "rope": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
}


def same(one: EagleNetwork, other: EagleNetwork) -> None:
    assert one.sizes == other.sizes
    mine, theirs = one.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("kind", KINDS)
def test_heads_go_from_one_format_to_the_other_and_back(kind: str, tmp_path: Path) -> None:
    """Sizes and every bit of every tensor stay, whichever way they go first."""
    network = random_network(**KINDS[kind])
    for first, second in (get_args(Format), get_args(Format)[::-1]):
        head = EagleHead(network)
        for step, form in enumerate((first, second, first)):
            folder = tmp_path / first / str(step)
            head.save_pretrained(folder, format=form)
            head = EagleHead.from_pretrained(folder)
            same(head.network, network)


def test_names_are_the_published_ones(tmp_path: Path) -> None:
    network = random_network(3, feature_layers=LAYERS, draft_vocab_size=20, base_model="some/model")
    EagleHead(network).save_pretrained(tmp_path / "ours")
    tensors, config = load_file(tmp_path / "ours" / "model.safetensors"), read_config(tmp_path / "ours")
    layer = [f"self_attn.{part}_proj" for part in "qkvo"] + [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
    layer += ["hidden_norm", "input_layernorm", "post_attention_layernorm"]
    outside = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    assert set(tensors) == {f"midlayer.{name}.weight" for name in layer} | outside
    assert tensors["t2d"].tolist() == [token % 2 == 0 and token < 40 for token in range(VOCAB)]
    assert (tensors["d2t"] + torch.arange(20)).tolist() == list(range(0, 40, 2))
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["draft_vocab_size"], config["vocab_size"], config["rope_theta"]) == (20, VOCAB, 10000.0)
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == list(LAYERS)

    EagleHead(network).save_pretrained(tmp_path / "theirs", format="speculators")
    tensors, config = load_file(tmp_path / "theirs" / "model.safetensors"), read_config(tmp_path / "theirs")
    assert set(tensors) == {f"layers.0.{name}.weight" for name in layer} | outside
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "eagle3"
    assert config["speculators_config"]["verifier"]["name_or_path"] == "some/model"
    assert config["transformer_layer_config"]["num_attention_heads"] == network.sizes.heads

    EagleHead(random_network(1)).save_pretrained(tmp_path / "first", format="speculators")
    names = set(load_file(tmp_path / "first" / "model.safetensors"))
    assert {"fusion_fc.weight", "transformer.self_attn.q_proj.weight"} <= names


def read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


@pytest.mark.usefixtures("augmented")
def test_without_an_output_layer_lines_of_the_models_are_taken(tmp_path: Path) -> None:
    """They are those that d2t names, or t2d where there is no d2t; the texts are plain decoding's."""
    model = fresh_model("llama", num_hidden_layers=7)
    network = random_network(3, draft_vocab_size=20)
    assert network.lm_head is not None
    with torch.no_grad():
        network.lm_head.weight.copy_(model.lm_head.weight[:40:2])
    states = torch.randn(5, 32, dtype=torch.float64)
    for number, left in enumerate((("lm_head.weight",), ("lm_head.weight", "d2t"))):
        folder = tmp_path / str(number)
        EagleHead(network).save_pretrained(folder, format="speculators")
        tensors = load_file(folder / "model.safetensors")
        save_file({name: tensors[name] for name in tensors if name not in left}, folder / "model.safetensors")
        head = EagleHead.from_pretrained(folder, model=model)
        assert head.network.lm_head is None
        scores = [each.logits(states, model.lm_head) for each in (network, head.network)]
        torch.testing.assert_close(*scores)
        for settings in ({}, {"do_sample": True}):
            same_as_plain(model, prompts(3), Eagle(head, nodes=8, seed=0), max_new_tokens=16, **settings)


def test_heads_that_cannot_be_written(tmp_path: Path) -> None:
    head = EagleHead(random_network(3))
    with pytest.raises(LookaheadError, match="cannot be written as 'gguf': expected one of safeailab, speculators"):
        head.save_pretrained(tmp_path, format="gguf")  # type: ignore[arg-type]
    with torch.no_grad():
        head.network.fc.weight[0, 0] = torch.nan
    with pytest.raises(LookaheadError, match=r"fc.weight holds NaN or infinite numbers"):
        head.save_pretrained(tmp_path)
    unknown = random_network(3, draft_vocab_size=20, vocab_size=None)
    with pytest.raises(LookaheadError, match="scores 20 tokens up to 38 of a vocabulary of unknown size"):
        EagleHead(unknown).save_pretrained(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(LookaheadError, match="cannot be written"):
        EagleHead(random_network(1)).save_pretrained(tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
