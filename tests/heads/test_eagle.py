"""EAGLE heads: files, what they compute, and texts that stay plain decoding's."""

import json
import random
from pathlib import Path as FilePath
from typing import Any

import pytest
import torch
from helpers.drafting import questions
from helpers.eagle import random_network, tensors_of, write_head
from helpers.models import VOCAB, fresh_model, prompts, same_as_plain, successor_model, tiny_model
from safetensors.torch import save_file
from torch import Tensor

from jacobi import LookaheadError, Path
from lookahead.eagle import Eagle, EagleHead
from lookahead.heads.eagle.network import EagleNetwork, PairCache
from lookahead.heads.eagle.strategy import eagle_passes

LAYERS = (2, 3, 4)
KINDS: dict[str, Any] = {
    "eagle-1": lambda: random_network(1),
    "own embeddings": lambda: random_network(1, own_embeddings=VOCAB, fusion_bias=True),
    "eagle-3": lambda: random_network(3, feature_layers=LAYERS),
    "qwen": lambda: random_network(3, feature_layers=LAYERS, attention_bias=True, norm_before_residual=True),
    "qwen3": lambda: random_network(3, feature_layers=LAYERS, layers=2, query_key_norm=True),
    "normed": lambda: random_network(3, feature_layers=LAYERS, feature_norms="each"),
    "small vocabulary": lambda: random_network(3, feature_layers=LAYERS, draft_vocab_size=20),
}


@pytest.mark.parametrize("binary", [False, True], ids=["safetensors", "bin"])
@pytest.mark.parametrize("kind", KINDS)
def test_heads_are_read_as_they_were_written(kind: str, binary: bool, tmp_path: FilePath) -> None:
    network = KINDS[kind]()
    for speculators in {False, network.sizes.version == 3}:
        folder = write_head(tmp_path / str(speculators), network, binary=binary, speculators=speculators)
        if network.sizes.norm_before_residual and not speculators:
            config = json.loads((folder / "config.json").read_text()) | {"norm_before_residual": True}
            (folder / "config.json").write_text(json.dumps(config))
        model = fresh_model("llama", num_hidden_layers=7)
        head = EagleHead.from_pretrained(folder, model=model)
        expected, read = network.state_dict(), head.network.state_dict()
        assert read.keys() == expected.keys()
        assert all(torch.equal(read[name], tensor) for name, tensor in expected.items())
        assert head.network.sizes.feature_layers == network.sizes.feature_layers
        assert head.network.sizes.norm_before_residual == network.sizes.norm_before_residual
        assert head.network.sizes.base_model == ("some/model" if speculators else None)


def naive(
    network: EagleNetwork, features: Tensor, tokens: list[int], drafted: list[int], embed: Any, output: Any
) -> Tensor:
    """Scores after ``drafted``, from nothing: stable pairs in one pass, then one pair after the other."""
    cache = PairCache(network.sizes.layers)
    count = len(tokens)
    embedded = embed(torch.tensor(tokens))
    mask = torch.ones(count, count, dtype=torch.bool).tril()
    out = network(network.joined(features, embedded), embedded, torch.arange(count), cache, mask)[-1:]
    for step, token in enumerate(drafted):
        embedded = embed(torch.tensor([token]))
        mask = torch.ones(1, count + step + 1, dtype=torch.bool)
        states = network.joined(out, embedded, fed_back=True)
        out = network(states, embedded, torch.tensor([count + step]), cache, mask)
    return network.logits(out, output)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_heads_cache_is_the_text(kind: str) -> None:
    """After any sequence of questions and texts it says what it says from scratch."""
    network, rng = KINDS[kind](), random.Random(1)
    model = fresh_model("llama")
    embed, output = network.embed_tokens or model.get_input_embeddings(), model.lm_head
    width = network.fc.in_features if network.sizes.version == 3 else 32
    torch.manual_seed(0)
    for _ in range(4):
        now = torch.zeros(0)
        passes = eagle_passes(network, lambda: now, 1, embed, output, VOCAB)  # noqa: B023
        text = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 6))]
        now = torch.randn(2, len(text) + 2, width, dtype=torch.float64)  # the row is padded on the left
        held, following = now[1, -len(text) :], [*text[1:], rng.randrange(VOCAB)]
        passes.start(text)
        passes.write(Path([0], following[-1:]))
        for _ in range(5):
            for branch, said in questions(passes, rng):
                with torch.no_grad():
                    scores = naive(network, held, following, list(branch), embed, output)
                tokens, logits = said or ([], [])
                ids = tokens if network.d2t is None else [int(token) // 2 for token in tokens]
                chances = scores.log_softmax(-1)[torch.tensor(ids)].float()
                torch.testing.assert_close(chances, torch.tensor(logits), atol=1e-3, rtol=1e-4)
            nodes, new = sorted(rng.sample(range(5), rng.randint(1, 3))), [rng.randrange(VOCAB) for _ in range(3)]
            now = torch.randn(2, 5, width, dtype=torch.float64)
            passes.write(Path(nodes, new[: len(nodes)]))
            held, following = torch.cat([held, now[1, nodes]]), following + new[: len(nodes)]


@pytest.mark.usefixtures("augmented")
@pytest.mark.parametrize("kind", KINDS)
def test_texts_do_not_change(kind: str) -> None:
    model, head = fresh_model("llama", num_hidden_layers=5), EagleHead(KINDS[kind]())
    alone, automatic = Eagle(head, nodes=8, seed=0, sources=("eagle",)), Eagle(head)
    for batch, sample, strategy in ((1, False, alone), (1, True, automatic), (3, False, automatic), (3, True, alone)):
        settings = {"do_sample": sample, "max_new_tokens": 20, "eos_token_id": [5, 6], "output_scores": True}
        output = same_as_plain(model, prompts(batch), strategy, **settings)
        assert output.stats.steps


@pytest.mark.usefixtures("augmented")
def test_a_head_that_knows_the_model_is_right_to_the_end() -> None:
    """Wired so that it gives what the model does: the embedding of a token says which one follows."""
    model = successor_model({token: (token * 5 + 1) % VOCAB for token in range(VOCAB)})
    network = random_network(1, target_size=VOCAB, hidden_size=VOCAB)
    with torch.no_grad():
        network.fc.weight.copy_(torch.cat([torch.eye(VOCAB), torch.zeros(VOCAB, VOCAB)], dim=1))
        network.layers[0].self_attn.o_proj.weight.zero_()
        network.layers[0].mlp.down_proj.weight.zero_()
    strategy = Eagle(EagleHead(network), nodes=5, seed=0, sources=("eagle",))
    output = same_as_plain(model, prompts(1), strategy, max_new_tokens=60)
    assert output.stats.steps <= 2 + 59 / 5, "every pass but the first ones keeps five drafted tokens"


def test_broken_files(tmp_path: FilePath) -> None:
    network = random_network(3, feature_layers=LAYERS)

    def refused(match: str, name: str, **changes: Any) -> None:
        folder = write_head(tmp_path / name, network)
        tensors = tensors_of(network) | {key: value for key, value in changes.items() if value is not None}
        tensors = {key: value for key, value in tensors.items() if key not in changes or changes[key] is not None}
        save_file({key.replace("__", "."): value for key, value in tensors.items()}, folder / "model.safetensors")
        with pytest.raises(LookaheadError, match=match):
            EagleHead.from_pretrained(folder)

    refused("lacks midlayer|lacks layers.0.mlp.up_proj.weight", "missing", **{"midlayer.mlp.up_proj.weight": None})
    refused("has heads.0 besides", "foreign", heads__0=torch.ones(2))
    refused("it has no fc.weight, but", "none", **{"fc.weight": None})
    refused(r"norm.weight is \[3\], expected \[32\]", "shape", **{"norm.weight": torch.ones(3)})
    refused("holds torch.float64 or infinite", "nan", **{"norm.weight": torch.full((32,), torch.nan).double()})
    refused("d2t is torch.int64 .* expected", "short", d2t=torch.arange(3))
    refused("one twice", "twice", d2t=-torch.arange(VOCAB))


def test_heads_of_other_models(tmp_path: FilePath) -> None:
    model = fresh_model("llama", num_hidden_layers=7)
    for network, match in (
        (random_network(1, hidden_size=16, target_size=16), "features of size 16, and Llama.* has 32"),
        (random_network(1, own_embeddings=40), "embeddings for 40, and Llama.* has 48"),
        (random_network(3, feature_layers=(1, 2, 9)), r"reads \[1, 2, 9\], and Llama.* has 7 layers"),
        (random_network(3, draft_vocab_size=60), "scores 60 tokens, and Llama.* has 48"),
    ):
        folder = write_head(tmp_path / match[:4], network)
        with pytest.raises(LookaheadError, match=match):
            EagleHead.from_pretrained(folder, model=model)
    usual = EagleHead(random_network(3))
    assert usual.taps(model) == ("layer.2", "layer.3", "layer.4")
    with pytest.raises(LookaheadError, match=r"usual ones are \[2, 1, -1\]"):
        usual.check(tiny_model("llama"))


def test_a_head_that_names_another_model_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    model = fresh_model("llama")
    for name, warnings in (
        ("", 0),
        ("here/Some-Model", 0),
        ("models--them--Some-Model/snapshots/1", 0),
        ("here/other/", 1),
    ):
        model.config.name_or_path = model.name_or_path = name
        named = EagleHead(random_network(1, base_model="them/some-model"))
        for _ in range(2):
            caplog.clear()
            named.check(model)
            assert len(caplog.records) == warnings, name
            warnings = 0


def test_settings() -> None:
    head = EagleHead(random_network(1))
    with pytest.raises(LookaheadError, match=r"Eagle\(head=\) must be an EagleHead"):
        Eagle(3)  # type: ignore[arg-type]
    with pytest.raises(LookaheadError, match=r"must name 'eagle'"):
        Eagle(head, sources=("suffix",))
    with pytest.raises(LookaheadError, match="does not exist"):
        Eagle("nowhere")
    assert Eagle(head, nodes=4).to_dict()["head"] == "EagleHead"
