"""Checkpoints that have no MTP layers, or broken ones: told by name, before any pass."""

import json
from pathlib import Path

import pytest
import torch
from helpers.models import fresh_model, prompts, tiny_model
from helpers.mtp import FAMILIES, behind, deepseek, loaded, with_layers, written
from helpers.refusals import refuses
from safetensors.torch import load_file, save_file
from torch import Tensor

from jacobi import LookaheadError
from lookahead.mtp import Mtp, MtpHeads


@pytest.mark.parametrize(
    ("match", "changes"),
    [
        ("MTP layer 0 lacks a weight: expected one of embed_norm, enorm", {"enorm.weight": None}),
        (
            "no whole decoder layer of DeepseekV3ForCausalLM: it lacks self_attn.o_proj.weight",
            {"self_attn.o_proj.weight": None},
        ),
        ("it has self_attn.sinks besides", {"self_attn.sinks": torch.ones(4)}),
        (r"fc is \[32, 32\], expected \[32, 64\] for DeepseekV3", {"eh_proj.weight": torch.ones(32, 32)}),
        (r"norm is \[16\], expected \[32\]", {"shared_head.norm.weight": torch.ones(16)}),
        (r"self_attn.o_proj.weight is \[32, 8\], expected \[32, 32\]", {"self_attn.o_proj.weight": torch.ones(32, 8)}),
        ("2.hnorm.weight holds infinite numbers or NaN", {"hnorm.weight": torch.full((32,), torch.nan)}),
        (
            r"self_attn.o_proj.weight is torch.float8_e4m3fn: expected bfloat16, .* or FP8 with weight_scale_inv",
            {"self_attn.o_proj.weight": torch.ones(32, 32).to(torch.float8_e4m3fn)},
        ),
        (
            "MTP layer 0 gives NaN or infinite numbers",
            {"mlp.shared_experts.down_proj.weight": torch.full((32, 16), 1e308, dtype=torch.float64)},
        ),
        ("qweight is torch.int32", {"self_attn.o_proj.weight": None, "self_attn.o_proj.qweight": torch.ones(4).int()}),
        (
            r"weight_scale_inv is \[2, 2\], expected \[1, 1\] for blocks of \[128, 128\] of \[32, 32\]",
            {
                "self_attn.o_proj.weight": torch.ones(32, 32).to(torch.float8_e4m3fn),
                "self_attn.o_proj.weight_scale_inv": torch.ones(2, 2),
            },
        ),
        (
            "No MTP layers for DeepseekV3ForCausalLM in .*model.safetensors: expected tensors like",
            {"eh_proj.weight": None},
        ),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_broken_layers(match: str, changes: dict[str, Tensor | None], tmp_path: Path) -> None:
    """A checkpoint with its MTP tensors changed by their names in the layer; ``None`` leaves one out."""
    model = deepseek()
    changes = {f"model.layers.2.{name}": tensor for name, tensor in changes.items()}
    tensors = {name: tensor for name, tensor in (behind(model) | changes).items() if tensor is not None}
    refuses(match, MtpHeads.from_pretrained, model=loaded(written(tmp_path, model, tensors), model))


def test_layers_that_cannot_be_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_layers(tmp_path, "mimo")
    monkeypatch.setattr(type(model.model), "forward", lambda *_, **__: {}["states of other layers"])
    with pytest.raises(LookaheadError, match=r"a Qwen2Model of one layer, cannot be run by itself: 'states of other"):
        MtpHeads.from_pretrained(model=model)


@pytest.mark.usefixtures("augmented")
def test_no_layers_in_the_models_own_file(tmp_path: Path) -> None:
    model = fresh_model("llama")
    model.save_pretrained(tmp_path)
    read = loaded(tmp_path, model)
    with pytest.raises(LookaheadError, match=r"No MTP layers for LlamaForCausalLM in .*/model.safetensors: expected"):
        read.generate(**prompts(1), max_new_tokens=4, use_lookahead=True, use_mtp=True)
    refuses("does not exist", read.generate, **prompts(1), max_new_tokens=4, custom_generate=Mtp("nowhere"))


def test_gaps_between_layers(tmp_path: Path) -> None:
    model = deepseek()
    tensors = {name.replace("layers.3.", "layers.4."): tensor for name, tensor in behind(model, 2).items()}
    with pytest.raises(LookaheadError, match=r"MTP layers are numbered \[0, 2\]"):
        MtpHeads.from_pretrained(model=loaded(written(tmp_path, model, tensors), model))


def test_truncated_files(tmp_path: Path) -> None:
    model = with_layers(tmp_path, "deepseek_v3")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    refuses("cannot be read as safetensors", MtpHeads.from_pretrained, model=model)


def test_shards_and_pickles(tmp_path: Path) -> None:
    """A model's MTP layers may lie in a shard of their own; and pickles are read without running their code."""
    model = with_layers(tmp_path / "whole", "deepseek_v3")
    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    expected = MtpHeads.from_pretrained(model=model).state_dict()
    shards = {name: "b.safetensors" if "layers.2." in name else "a.safetensors" for name in tensors}
    folder = tmp_path / "shards"
    folder.mkdir()
    for shard in ("a.safetensors", "b.safetensors"):
        save_file({name: each for name, each in tensors.items() if shards[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    other = tmp_path / "pickle"
    other.mkdir()
    torch.save(tensors, other / "pytorch_model.bin")
    for source in (folder, folder / "b.safetensors", other):
        read = MtpHeads.from_pretrained(source, model=model).state_dict()
        assert read.keys() == expected.keys()
        assert all(torch.equal(read[name], tensor) for name, tensor in expected.items())
    (folder / "b.safetensors").unlink()
    refuses(r"names b.safetensors, which is not there", MtpHeads.from_pretrained, folder, model=model)


def test_layers_of_other_models(tmp_path: Path) -> None:
    model = with_layers(tmp_path, "mimo")
    heads = MtpHeads.from_pretrained(model=model)
    message = r"belong to a Qwen2Model of 32 channels, and Llama.* is a LlamaModel of 32"
    refuses(message, Mtp(heads).check, tiny_model("llama"))
    refuses(r"is a Qwen2Model of 64", Mtp(heads).check, fresh_model("qwen2", hidden_size=64))
    with pytest.raises(LookaheadError, match=r"embed_norm is \[32\], expected \[64\] for Qwen2ForCausalLM"):
        MtpHeads.from_pretrained(tmp_path, model=fresh_model("qwen2", hidden_size=64))


def test_layers_are_read_once_a_model(tmp_path: Path) -> None:
    model = with_layers(tmp_path, "mimo")
    heads = MtpHeads.of(model)
    assert MtpHeads.of(model) is heads
    assert heads.source == str(tmp_path / "model.safetensors")


@pytest.mark.skipif("inkling" not in FAMILIES, reason="an older version")
def test_inkling_under_both_names(tmp_path: Path) -> None:
    """Those of its checkpoints, and those of transformers' class."""
    states = [
        MtpHeads.from_pretrained(model=with_layers(tmp_path / family, family)).state_dict()
        for family in ("inkling", "inkling, renamed")
    ]
    assert all(torch.equal(states[1][name], tensor) for name, tensor in states[0].items())


@pytest.mark.parametrize("size", [16, 24])
def test_weights_of_fp8_blocks(size: int, tmp_path: Path) -> None:
    """As DeepSeek-V3's are stored: each block has its scale; the last ones may be smaller."""
    model = deepseek()
    tensors = behind(model)
    name = "model.layers.2.self_attn.o_proj.weight"
    torch.manual_seed(0)
    weight = (torch.randint(-8, 9, (32, 32)) / 4).to(torch.float8_e4m3fn)
    scale = torch.tensor([[0.5, 2.0], [4.0, 0.25]])
    tensors |= {name: weight, f"{name}_scale_inv": scale}
    expected = weight.double()
    for row in (0, 1):
        for column in (0, 1):
            rows, columns = (slice(part * size, (part + 1) * size) for part in (row, column))
            expected[rows, columns] *= scale[row, column]
    read = loaded(written(tmp_path, model, tensors), model)
    told = json.loads((tmp_path / "config.json").read_text())
    told["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [size, size]}
    (tmp_path / "config.json").write_text(json.dumps(told))
    heads = MtpHeads.from_pretrained(model=read)
    assert torch.equal(heads.first.decoder.layers[0].self_attn.o_proj.weight, expected)
