"""EAGLE's published trees, which layers a head reads, and heads that are written in both formats."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from helpers.drafting import Told
from helpers.eagle import random_network, write_head
from helpers.models import VOCAB, fresh_model, prompts, same_as_plain
from helpers.refusals import refuses
from safetensors.torch import load_file, save_file

import lookahead
from jacobi import LookaheadError
from lookahead.bundled import BUNDLED_EAGLE
from lookahead.eagle import Eagle, EagleHead
from lookahead.heads.base import fixed_tree
from lookahead.heads.eagle.files import Format
from lookahead.heads.eagle.network import EagleNetwork
from lookahead.heads.eagle.strategy import FIXED, ranked_again
from lookahead.models.hidden_states import HiddenStates, tapped

DEPTH = 7
TEXT = torch.randint(7, VOCAB, (1, 20), generator=torch.Generator().manual_seed(0))


def a_model() -> Any:
    """Each layer adds three times as much as the one before it, so that states are not alike."""
    model = fresh_model("llama", 2, num_hidden_layers=DEPTH, initializer_range=0.5)
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
@pytest.mark.parametrize(("said", "read"), [(4, 5), (DEPTH - 1, DEPTH)], ids=["inside", "the last layer gives it"])
def test_numbers_say_what_layers_give_if_the_user_says_so(said: int, read: int, tmp_path: Path) -> None:
    model = a_model()
    tap = "norm" if read == DEPTH else f"layer.{read}"
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
        refuses(r"layers= must be one of 'inputs', 'outputs': got ", EagleHead, network, layers=wrong)
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


SAID = {
    (): ("AB", (-0.2, -1.7)),
    ("A",): ("CD", (-0.5, -1.0)),
    ("B",): ("EF", (-0.1, -2.5)),
    ("A", "C"): ("GH", (-0.3, -1.4)),
    ("A", "D"): ("IJ", (-0.2, -1.9)),
}
SIZES = {"top_k": 2, "depth": 2, "total_tokens": 6}


def test_the_example_worked_out_by_hand() -> None:
    passes = Told(SAID)
    tree = ranked_again(0, passes, room=9, **SIZES)
    assert "".join(map(chr, tree.tokens[1:])) == "ACDGI"
    assert tree.parents[1:] == [0, 1, 1, 2, 3]
    assert tree.depths[1:] == [1, 2, 2, 3, 3]
    assert passes.asked == [[""], ["A", "B"], ["AC", "AD"]]


def test_a_tree_is_as_deep_as_there_is_room() -> None:
    tree = ranked_again(0, Told(SAID), room=1, **SIZES)
    assert tree.depths == [0, 1, 1]
    assert len(ranked_again(0, Told({}), room=5, **SIZES)) == 1
    chain = ranked_again(0, Told(SAID), room=9, chain=True, **SIZES)
    assert "".join(map(chr, chain.tokens[1:])) == "ACG"


def test_of_equals_the_one_made_first_is_kept() -> None:
    """A child that is certain is worth as much as its parent, which has to be in the tree with it."""
    said = {(): ("AB", (-1.0, -1.0)), ("A",): ("C", (0.0,)), ("B",): ("D", (0.0,))}
    tree = ranked_again(0, Told(said), room=9, top_k=2, depth=1, total_tokens=4)
    assert "".join(map(chr, tree.tokens[1:])) == "ABC"


def test_the_fixed_tree() -> None:
    assert len(FIXED) == 25
    assert {ranks[:-1] for ranks in FIXED if len(ranks) > 1} <= set(FIXED)
    tree = fixed_tree(FIXED, 0, Told(SAID), room=2)
    assert "".join(map(chr, tree.tokens[1:])) == "ABCDEF"
    assert tree.parents[1:] == [0, 0, 1, 1, 2, 2]
    chain = fixed_tree(FIXED, 0, Told(SAID), room=9, chain=True)
    assert "".join(map(chr, chain.tokens[1:])) == "ACG"


@pytest.mark.usefixtures("augmented")
@pytest.mark.parametrize("tree", ["eagle-1", "eagle-2"])
def test_texts_do_not_change(tree: Any) -> None:
    model = fresh_model("llama", num_hidden_layers=5)
    for version in (1, 3):
        head = EagleHead(random_network(version, feature_layers=(2, 3, 4) if version == 3 else ()))
        strategy = Eagle(head, tree=tree, top_k=3, depth=2, total_tokens=12)
        for batch, sample in ((1, version == 3), (3, version == 1)):
            output = same_as_plain(model, prompts(batch), strategy, max_new_tokens=20, do_sample=sample)
            assert output.stats.drafted > 20


def test_settings() -> None:
    head = EagleHead(random_network(1))
    for settings, match in (
        ({"tree": "eagle-4"}, "tree=.* must be one of 'eagle-1', 'eagle-2'"),
        ({"tree": "eagle-2", "nodes": 4}, "nodes=.* belongs to the automatic mode: got tree='eagle-2'"),
        ({"top_k": 0}, "top_k=.* must be at least 1"),
        ({"total_tokens": 1}, "total_tokens=.* must be at least 2"),
    ):
        refuses(match, Eagle, head, **settings)


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
    refuses(r"fc.weight holds NaN or infinite numbers", head.save_pretrained, tmp_path)
    unknown = random_network(3, draft_vocab_size=20, vocab_size=None)
    refuses("scores 20 tokens up to 38 of a vocabulary of unknown size", EagleHead(unknown).save_pretrained, tmp_path)
    (tmp_path / "file").write_text("")
    refuses("cannot be written", EagleHead(random_network(1)).save_pretrained, tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
