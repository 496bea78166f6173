"""``lookahead convert`` of EAGLE and ReDrafter heads."""

import json
from pathlib import Path

import torch
from helpers.cli import run
from helpers.eagle import random_network
from helpers.redrafter import random_head

from lookahead.eagle import EagleHead
from lookahead.redrafter import RecurrentHead


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
