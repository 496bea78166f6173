"""A head's numbers of layers say what these read, or with ``layers="outputs"`` what they give."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.eagle import random_network, write_head
from helpers.models import VOCAB, fresh_model, same_as_plain

import lookahead
from jacobi import LookaheadError
from lookahead.bundled import BUNDLED_EAGLE
from lookahead.eagle import Eagle, EagleHead
from lookahead.heads.eagle.network import EagleNetwork
from lookahead.models.hidden_states import HiddenStates, tapped

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


def states(model: Any, tap: str) -> torch.Tensor:
    with torch.no_grad(), HiddenStates(tapped(model, (tap,))) as hidden:
        hidden.expect()
        return hidden.take(model(TEXT).logits)[0][0, :-2]


def a_head_that_knows(model: Any, tap: str, index: int) -> EagleNetwork:
    """Wired so that it knows TEXT by what ``tap`` reads; its file says ``index``."""
    network = random_network(3, features=1, feature_layers=(index,))
    with torch.no_grad():
        wanted = torch.nn.functional.one_hot(TEXT[0, 2:], VOCAB).double() * 20
        network.layers[0].self_attn.o_proj.weight.zero_()
        network.layers[0].mlp.down_proj.weight.zero_()
        network.norm.weight.fill_(1.0)
        network.fc.weight.copy_(torch.eye(32))
        network.lm_head.weight.copy_(torch.linalg.lstsq(network.norm(states(model, tap)), wanted).solution.T)
    return network


def right(model: Any, head: EagleHead) -> float:
    """The share of TEXT's tokens that come first by the states which the head reads."""
    (tap,) = head.taps(model)
    with torch.no_grad():
        best = head.network.lm_head(head.network.norm(states(model, tap))).argmax(-1)
    return float((best == TEXT[0, 2:]).double().mean())


@pytest.mark.usefixtures("augmented")
@pytest.mark.parametrize(("said", "read"), [(4, 5), (LAYERS - 1, LAYERS)], ids=["inside", "the last layer gives it"])
def test_numbers_say_what_layers_give_if_the_user_says_so(said: int, read: int, tmp_path: Path) -> None:
    model = a_model()
    tap = "norm" if read == LAYERS else f"layer.{read}"
    network = a_head_that_knows(model, tap, said)
    misread, head = EagleHead(network), EagleHead(network, layers="outputs")
    assert (misread.taps(model), head.taps(model)) == ((f"layer.{said}",), (tap,))
    assert right(model, head) == 1.0 > right(model, misread)
    for each in (misread, head):
        same_as_plain(model, {"input_ids": TEXT}, Eagle(each), max_new_tokens=8)
    folder = write_head(tmp_path / "file", network)
    read_as = {
        layers: EagleHead.from_pretrained(folder, model=model, layers=layers) for layers in ("inputs", "outputs")
    }
    assert read_as["inputs"].taps(model) == EagleHead.from_pretrained(folder).taps(model) == (f"layer.{said}",)
    assert read_as["outputs"].taps(model) == (tap,)
    given = EagleHead.from_pretrained(folder, feature_layers=(1,), layers="outputs")
    assert given.taps(model) == ("layer.2",), "the user's numbers count likewise"


@pytest.mark.parametrize("form", ["safeailab", "speculators"])
def test_what_is_saved_says_what_layers_read(form: Any, tmp_path: Path) -> None:
    head = EagleHead(random_network(3, feature_layers=(1, 2, 6)), layers="outputs")
    head.save_pretrained(tmp_path, format=form)
    assert EagleHead.from_pretrained(tmp_path).feature_layers == (2, 3, 7)


def test_layers_that_say_nothing_are_refused(tmp_path: Path) -> None:
    network = random_network(3, feature_layers=(1, 2, 6))
    for wrong in ("output", None, 1, ["inputs"]):
        with pytest.raises(LookaheadError, match=r"layers= must be one of 'inputs', 'outputs': got "):
            EagleHead(network, layers=wrong)  # type: ignore[arg-type]
        with pytest.raises(LookaheadError, match=r"layers= must be one of 'inputs', 'outputs': got "):
            EagleHead.from_pretrained(tmp_path / "none", layers=wrong)  # type: ignore[arg-type]
    for unnumbered in (random_network(3), random_network(1)):
        with pytest.raises(LookaheadError, match=r"this EAGLE head names none: expected them by feature_layers="):
            EagleHead(unnumbered, layers="outputs")
    with pytest.raises(LookaheadError, match=r"reads \[2, 3, 8\], and Llama.* has 7 layers"):
        EagleHead(random_network(3, feature_layers=(1, 2, 7)), layers="outputs").check(a_model())


@pytest.mark.parametrize("layers", ["inputs", "outputs"])
def test_the_bundled_head_is_read_either_way(layers: Any, tmp_path: Path) -> None:
    """Its last feature is what the last layer gives; read wrongly it drafts worse, and the text stays."""
    model, tokenizer = lookahead.load_bundled()
    config = json.loads((BUNDLED_EAGLE / "config.json").read_text())
    ids = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [index - (layers == "outputs") for index in ids]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((BUNDLED_EAGLE / "model.safetensors").read_bytes())
    head = EagleHead.from_pretrained(tmp_path, model=model, layers=layers)
    misread = EagleHead(head.network, tuple(index - 1 for index in head.feature_layers))
    assert head.taps(model) == ("layer.2", "layer.4", "norm")
    assert misread.taps(model) == ("layer.1", "layer.3", "layer.5")
    text = "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci("
    inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
    settings = {"max_new_tokens": 48, "return_dict_in_generate": True, "do_sample": False}
    outputs = [
        model.generate(**inputs, **settings, custom_generate=Eagle(each, sources=("eagle",), nodes=8, seed=0))
        for each in (head, misread)
    ]
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    assert outputs[0].stats.mean_acceptance_length > outputs[1].stats.mean_acceptance_length
