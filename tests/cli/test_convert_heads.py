"""``lookahead convert``: from the published formats of heads into this library's."""

import json
import pathlib
from pathlib import Path
from typing import Any

import torch
from helpers.checkpoints import BASE, PUBLISHED, SERVED, assert_same, made, medusa, store, vllm
from helpers.cli import run
from helpers.eagle import random_network
from helpers.medusa import HIDDEN, drawn, states
from helpers.models import VOCAB, fresh_model
from helpers.redrafter import random_head
from safetensors.torch import load_file
from typer.testing import CliRunner

from lookahead.cli import app
from lookahead.eagle import EagleHead
from lookahead.medusa import MedusaHeads, read_heads
from lookahead.redrafter import RecurrentHead


def convert(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["convert", "--kind", "medusa", *map(str, arguments)])


def test_the_command_converts_every_format(tmp_path: pathlib.Path) -> None:
    heads = made()
    source = store(tmp_path / "pt", "medusa_lm_head.pt", medusa(heads), **PUBLISHED | {"medusa_num_heads": 5})
    result = convert(source, tmp_path / "made")
    assert result.exit_code == 0, result.output
    rows = [" ".join(line.split()) for line in result.stdout.splitlines()]
    for row in ("format Medusa, version 1", "files medusa_lm_head.pt", "heads 3", "layers 2", "output layers own"):
        assert row in rows
    assert "config.json says medusa_num_heads 5" in " ".join(rows)
    assert "in the format of medusa." in " ".join(rows)
    assert_same(read_heads(tmp_path / "made"), heads)
    served = store(
        tmp_path / "vllm", "model.safetensors", vllm(heads), **SERVED | {"base_model_name_or_path": "owner/model"}
    )
    result = convert(served, tmp_path / "back", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["read"] == {
        "format": "vLLM",
        "files": ["model.safetensors"],
        "heads": 3,
        "layers": 2,
        "output_layers": "own",
        "hidden_size": HIDDEN,
        "vocabulary": VOCAB,
        "dtype": "float64",
        "parameters": sum(weight.numel() for weight in heads.parameters()),
        "base_model": "owner/model",
    }
    assert document["written"] == "medusa"
    assert_same(MedusaHeads.from_pretrained(tmp_path / "back"), heads)
    assert load_file(tmp_path / "back" / "medusa_lm_head.safetensors").keys() == medusa(heads).keys()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "made", "pt", "vllm"]


def test_the_command_checks_heads_against_a_model(tmp_path: pathlib.Path) -> None:
    model = fresh_model("llama")
    model.save_pretrained(tmp_path / "model")
    heads = drawn(MedusaHeads.for_model(model, 2, own_output=False))
    copied = vllm(heads) | {"lm_heads.0.weight": model.lm_head.weight.detach().clone()}
    source = store(tmp_path / "vllm", "model.safetensors", copied, original_lm_head=True)
    result = convert(source, tmp_path / "back", "--model", tmp_path / "model")
    assert result.exit_code == 0, result.output
    read = MedusaHeads.from_pretrained(tmp_path / "back")
    assert torch.equal(read(states(2), model.lm_head), heads(states(2), model.lm_head))
    other = fresh_model("llama", hidden_size=64)
    other.save_pretrained(tmp_path / "other")
    refused = convert(source, tmp_path / "no", "--model", tmp_path / "other")
    assert refused.exit_code == 2 and "heads are those of another model" in " ".join(refused.output.split())
    assert not (tmp_path / "no").exists()


def test_the_command_overwrites_only_by_force(tmp_path: pathlib.Path) -> None:
    heads = made()
    source = store(tmp_path / "pt", "medusa_lm_head.pt", medusa(heads))
    target = store(tmp_path / "target", "old.safetensors", BASE)
    refused = convert(source, target)
    assert refused.exit_code == 2 and "--force" in refused.output
    assert [path.name for path in target.iterdir()] == ["old.safetensors"]
    assert convert(source, target, "--force").exit_code == 0
    assert sorted(path.name for path in target.iterdir()) == ["README.md", "config.json", "medusa_lm_head.safetensors"]
    for inside in (source, source / "medusa_lm_head.pt"):
        refused = convert(inside, source, "--force")
        assert refused.exit_code == 2 and "which would be replaced" in " ".join(refused.output.split())
    assert [path.name for path in source.iterdir()] == ["medusa_lm_head.pt"]
    broken = medusa(heads) | {"0.0.linear.bias": torch.full((HIDDEN,), float("inf"))}
    refused = convert(store(tmp_path / "pt", "medusa_lm_head.pt", broken), tmp_path / "new")
    assert refused.exit_code == 2 and "heads are broken" in refused.output
    assert not (tmp_path / "new").exists()


def test_a_head_is_converted_and_back(tmp_path: Path) -> None:
    network = random_network(3, feature_layers=(2, 3, 4))
    EagleHead(network).save_pretrained(tmp_path / "one")
    ran = run("convert", "--kind", "eagle", tmp_path / "one", tmp_path / "two", "--to", "speculators")
    assert ran.status == 0 and "in the format of speculators" in ran.words
    assert json.loads((tmp_path / "two" / "config.json").read_text())["speculators_model_type"] == "eagle3"
    document = json.loads(run("convert", "--kind", "eagle", tmp_path / "two", tmp_path / "three", "--json").out)
    assert (document["written"], document["read"]["feature_layers"]) == ("safeailab", [2, 3, 4])
    back = EagleHead.from_pretrained(tmp_path / "three").network.state_dict()
    assert all(torch.equal(back[name], tensor) for name, tensor in network.state_dict().items())


def test_what_cannot_be_converted_is_told_in_a_line(tmp_path: Path) -> None:
    EagleHead(random_network(1)).save_pretrained(tmp_path / "one")
    for target, message in (
        (tmp_path / "one", "which would be replaced"),
        (tmp_path, "is not empty|would be replaced"),
    ):
        ran = run("convert", "--kind", "eagle", tmp_path / "one", target)
        assert (ran.status, ran.out, ran.err.count("\n")) == (2, "", 1)
        assert any(part in ran.err for part in message.split("|"))
    assert run("convert", "--kind", "eagle", tmp_path / "none", tmp_path / "two").status == 2
    assert not (tmp_path / "two").exists()


def test_a_redrafter_head_is_written_as_apples_are(tmp_path: Path) -> None:
    head = random_head()
    head.save_pretrained(tmp_path / "one")
    document = json.loads(run("convert-redrafter", tmp_path / "one", tmp_path / "two", "--json").out)
    assert (document["written"], document["read"]["rnn"]) == ("apple", True)
    back = RecurrentHead.from_pretrained(tmp_path / "two").state_dict()
    assert all(torch.equal(back[name], tensor) for name, tensor in head.state_dict().items())
    refused = run("convert", "--kind", "redrafter", tmp_path / "one", tmp_path / "three", "--to", "speculators")
    assert refused.status == 2 and "--to speculators: expected one of apple for --kind redrafter" in refused.err
