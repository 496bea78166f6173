"""What MTP layers say: what they say from scratch, whatever was asked before, and what transformers' own code says."""

import random
from pathlib import Path as FilePath
from typing import Any

import pytest
import torch
from helpers.drafting import questions
from helpers.models import F64, VOCAB, prompts
from helpers.mtp import FAMILIES, with_layers
from torch import Tensor
from transformers import cache_utils, modeling_layers

from jacobi import Path
from lookahead.heads import pairs
from lookahead.heads.pairs import PairPasses
from lookahead.mtp import MtpHeads

_SEVERAL = {"deepseek_v3", "deepseek_v32", "qwen3_next", "mimo_v2", "inkling"}


def passes_of(model: Any, heads: MtpHeads, features: Any, row: int = 0) -> PairPasses:
    networks = [(layer, layer.cache()) for layer in heads.networks()]
    weight = heads.first.fc.weight
    return PairPasses(networks, weight, features, row, heads.embedder(model), model.lm_head, VOCAB)


def naive(model: Any, heads: MtpHeads, features: Tensor, tokens: list[int], drafted: list[int]) -> Tensor:
    """Scores after ``drafted``, from nothing: each layer over the text and the tokens that it may read of the draft,
    then one pair after the other."""
    layers, embed, count = heads.networks(), heads.embedder(model), len(tokens)
    caches = [layer.cache() for layer in layers]
    out, text = features, tokens + drafted
    for turn, (layer, cache) in enumerate(zip(layers, caches, strict=True)):
        if turn <= len(drafted):
            embedded = embed(torch.tensor(text[turn : turn + count]))
            mask, places = torch.ones(count, count, dtype=torch.bool).tril(), torch.arange(turn, turn + count)
            out = layer(layer.joined(out, embedded), embedded, places, cache, mask)
            cache.crop(count)
    out = out[-1:]
    for step in range(len(layers), len(drafted) + 1):
        layer, cache = layers[step % len(layers)], caches[step % len(layers)]
        embedded, place = embed(torch.tensor([drafted[step - 1]])), torch.tensor([count + step - 1])
        mask = torch.ones(1, cache.length + 1, dtype=torch.bool)
        out = layer(layer.joined(out, embedded, fed_back=True), embedded, place, cache, mask)
    return layers[len(drafted) % len(layers)].logits(out, model.lm_head)[0]


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() & _SEVERAL))
@torch.no_grad()
def test_the_caches_are_the_text(family: str, layers: int, tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch) -> None:
    """After any sequence of questions and texts, with branches that were given up; texts are read in chunks."""
    monkeypatch.setattr(pairs, "_CHUNK", 4)
    rng, model = random.Random(1), with_layers(tmp_path, family, layers)
    heads, width = MtpHeads.from_pretrained(model=model), model.config.hidden_size
    torch.manual_seed(0)
    for _ in range(2):
        now = torch.zeros(0)
        passes = passes_of(model, heads, lambda: now, 1)  # noqa: B023
        text = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))]
        now = torch.randn(2, rng.randint(1, len(text) + 2), width, dtype=model.dtype)  # padding, or a prompt's end
        count = min(len(text), now.shape[1])
        held, following = now[1, -count:], [*text[len(text) - count + 1 :], rng.randrange(VOCAB)]
        passes.start(text)
        passes.write(Path([0], following[-1:]))
        for _ in range(5):
            for branch, said in questions(passes, rng):
                scores = naive(model, heads, held, following, list(branch))
                assert said is not None
                chances = scores.log_softmax(-1)[torch.from_numpy(said[0]).long()].float()
                torch.testing.assert_close(chances, torch.from_numpy(said[1]), atol=1e-3, rtol=1e-4)
            nodes, new = sorted(rng.sample(range(5), rng.randint(1, 3))), [rng.randrange(VOCAB) for _ in range(3)]
            now = torch.randn(2, 5, width, dtype=model.dtype)
            passes.write(Path(nodes, new[: len(nodes)]))
            held, following = torch.cat([held, now[1, nodes]]), following + new[: len(nodes)]


@pytest.mark.parametrize(
    ("family", "layers"),
    [(family, layers) for family in ("deepseek_v3", "glm4_moe") for layers in (1, 2, 3)]
    + [("inkling, renamed", 1), ("inkling, renamed", 2)],
)
@pytest.mark.skipif(not hasattr(modeling_layers, "MtpModel"), reason="an older version")
@torch.no_grad()
def test_drafts_are_transformers_own(family: str, layers: int, tmp_path: FilePath) -> None:
    """As far as transformers drafts: each layer once."""
    model = with_layers(tmp_path, family, layers)
    model.config.num_mtp_layers = layers
    if family.startswith("inkling"):
        model.config.chain_hidden_post_norm = True
    else:
        model._keys_to_ignore_on_load_unexpected = [r"layers\.[2-9]\."]  # by which transformers finds them
    theirs = modeling_layers.MtpModel.from_pretrained(model)
    if model.dtype is F64:
        theirs.set_experts_implementation("eager")
    for seed in range(4):
        ids = prompts(1, seed=seed)["input_ids"]
        prompt, states = ids[:, :-1], model(ids[:, :-1], output_hidden_states=True).hidden_states[-1]
        places = torch.arange(1, ids.shape[1])[None]
        cache = cache_utils.MtpCache(config=model.config.get_mtp_config())
        expected, logits, _ = theirs(ids[:, 1:], states, None, places, cache)
        passes = passes_of(model, MtpHeads.from_pretrained(model=model), lambda: states)  # noqa: B023
        passes.start(prompt[0].tolist())
        passes.write(Path([0], ids[0, -1:].tolist()))
        for depth in range(layers):
            (said,) = passes.after([tuple(expected[0, :depth].tolist())])
            assert said is not None and said[0][0] == expected[0, depth]
            chances = logits[0, depth].log_softmax(-1)[torch.from_numpy(said[0]).long()].float()
            torch.testing.assert_close(chances, torch.from_numpy(said[1]), atol=1e-4, rtol=1e-5)
