"""How a head's file counts layers is found out by texts, without their padding."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.eagle import random_network
from helpers.models import VOCAB, fresh_model, same_as_plain
from torch import Tensor

import lookahead
from lookahead.bundled import BUNDLED_EAGLE
from lookahead.eagle import Eagle, EagleHead
from lookahead.models.hidden_states import HiddenStates, tapped
from lookahead.sources.eagle import counting
from lookahead.sources.eagle.network import EagleNetwork

LAYERS = 7
TEXT = torch.randint(7, VOCAB, (1, 20), generator=torch.Generator().manual_seed(0))


def a_model() -> Any:
    """Each layer adds three times as much as the one before it, so that states are not alike."""
    model = fresh_model("llama", 2, num_hidden_layers=LAYERS, initializer_range=0.5)
    with torch.no_grad():
        for index, layer in enumerate(model.model.layers):
            for part in (layer.self_attn.o_proj, layer.mlp.down_proj):
                part.weight.mul_(3.0**index)
    return model


def a_head_that_likes(model: Any, tap: str, index: int) -> EagleNetwork:
    """Wired so that it knows TEXT by what ``tap`` reads; its file says ``index``."""
    network = random_network(3, features=1, feature_layers=(index,))
    with torch.no_grad():
        with HiddenStates(tapped(model, (tap,))) as hidden:
            hidden.expect()
            states = hidden.take(model(TEXT).logits)[0][0, :-2]
        wanted = torch.nn.functional.one_hot(TEXT[0, 2:], VOCAB).double() * 20
        network.layers[0].self_attn.o_proj.weight.zero_()
        network.layers[0].mlp.down_proj.weight.zero_()
        network.norm.weight.fill_(1.0)
        network.fc.weight.copy_(torch.eye(32))
        network.lm_head.weight.copy_(torch.linalg.lstsq(network.norm(states), wanted).solution.T)
    return network


def padded(*rows: Tensor) -> dict[str, Tensor]:
    length = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for line, row in enumerate(rows):
        ids[line, length - len(row) :], mask[line, length - len(row) :] = row, 1
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.usefixtures("augmented")
@pytest.mark.parametrize(("said", "read"), [(4, 5), (LAYERS - 1, LAYERS)], ids=["inside", "the last layer gives it"])
def test_the_count_is_the_one_under_which_texts_are_likelier(said: int, read: int) -> None:
    """Where the user says which it is, nobody asks."""
    model = a_model()
    tap = "norm" if read == LAYERS else f"layer.{read}"
    network = a_head_that_likes(model, tap, said)
    head, given = EagleHead(network), EagleHead(network, feature_layers=(said,))
    for each, expected in ((head, tap), (given, f"layer.{said}")):
        assert each.taps(model) == (f"layer.{said}",)
        same_as_plain(model, {"input_ids": TEXT}, Eagle(each), max_new_tokens=4)
        assert each.taps(model) == (expected,)
    right = EagleHead(a_head_that_likes(model, f"layer.{said}", said))
    same_as_plain(model, {"input_ids": TEXT}, Eagle(right), max_new_tokens=4)
    assert right.taps(model) == (f"layer.{said}",)
    assert counting.is_told(model, right)


@pytest.mark.usefixtures("augmented")
def test_padding_says_nothing_and_the_longest_text_is_asked() -> None:
    model = a_model()
    head = EagleHead(a_head_that_likes(model, "layer.5", 4))
    same_as_plain(model, padded(TEXT[0, :3], TEXT[0]), Eagle(head), max_new_tokens=4)
    assert head.taps(model) == ("layer.5",)


@pytest.mark.usefixtures("augmented")
def test_what_is_open_is_asked_again() -> None:
    """Short texts say nothing, whatever padding is before them; one that says little is added to the next."""
    model = a_model()
    head = EagleHead(a_head_that_likes(model, "layer.5", 4))
    short = padded(TEXT[0, :8], TEXT[0, :5])
    short = {name: torch.nn.functional.pad(each, (30, 0)) for name, each in short.items()}
    same_as_plain(model, short, Eagle(head), max_new_tokens=4)
    assert not counting.is_told(model, head)
    assert head.taps(model) == ("layer.4",)
    same_as_plain(model, {"input_ids": TEXT}, Eagle(head), max_new_tokens=4)
    assert head.taps(model) == ("layer.5",)


def test_a_head_that_does_not_care_is_not_asked_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    model, network = a_model(), random_network(3, features=1, feature_layers=(4,))
    head, asked = EagleHead(network), []
    monkeypatch.setattr(counting, "_likelihoods", lambda *given: asked.append(1) or [torch.zeros(62), torch.zeros(62)])
    for _ in range(20):
        head.told_by(model, lambda: [[1] * 64])
    assert len(asked) == 9, "512 tokens, 62 at a time"
    assert head.taps(model) == ("layer.4",)


def test_a_call_under_way_keeps_its_taps() -> None:
    """Whatever another call finds out meanwhile."""
    model = a_model()
    head = EagleHead(a_head_that_likes(model, "layer.5", 4))
    noted = head.taps(model)
    head.told_by(model, lambda: TEXT.tolist())
    assert head.taps(model) != noted
    assert head.taps(model, noted) == noted


@pytest.mark.parametrize("shift", [0, 1])
def test_the_bundled_head_is_read_either_way(shift: int, tmp_path: Path) -> None:
    """Its last feature is what the last layer gives."""
    model, tokenizer = lookahead.load_bundled()
    config = json.loads((BUNDLED_EAGLE / "config.json").read_text())
    ids = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [index - shift for index in ids]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((BUNDLED_EAGLE / "model.safetensors").read_bytes())
    head = EagleHead.from_pretrained(tmp_path, model=model)
    text = "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n"
    head.told_by(model, lambda: [tokenizer(text)["input_ids"]])
    assert head.taps(model) == ("layer.2", "layer.4", "norm")
