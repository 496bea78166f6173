"""Multi-token prediction: texts stay plain decoding's in every layout, and layers say what transformers' own say."""

import random
from pathlib import Path as FilePath
from typing import Any

import pytest
import torch
from helpers.drafting import questions, with_few_hidden_states
from helpers.hybrids import counting_hybrid
from helpers.models import F64, VOCAB, prompts, run, same_as_plain, taught, tiny_model
from helpers.mtp import FAMILIES, deepseek, loaded, qwen, with_layers, written
from helpers.refusals import refuses
from torch import Tensor
from transformers import cache_utils, modeling_layers

from jacobi import Path
from lookahead import Jacobi, Lookahead
from lookahead.heads import pairs
from lookahead.heads.pairs import PairPasses
from lookahead.mtp import Mtp, MtpHeads
from lookahead.registry import strategy_from

pytestmark = pytest.mark.usefixtures("augmented")

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


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("family", [family for family in FAMILIES if "renamed" not in family])
def test_texts_do_not_change(family: str, layers: int, tmp_path: FilePath) -> None:
    model = with_layers(tmp_path, family, layers)
    assert len(MtpHeads.of(model).layers) == layers
    tolerance = None if model.dtype is F64 else 1e-3
    for batch, sample in ((1, True), (3, False)) if layers == 1 else ((3, True),):
        strategy = Mtp(nodes=6, seed=0, sources=("mtp",)) if batch > 1 else Mtp()
        settings = {"do_sample": sample, "max_new_tokens": 12, "eos_token_id": [5, 6]}
        output = same_as_plain(model, prompts(batch), strategy, tolerance=tolerance, **settings)
    assert output.stats.drafted or "images" in family, "a model that is not on record is tested first"
    if layers == 1:
        plain, _ = run(model, prompts(1), max_new_tokens=8)
        ours, _ = run(model, prompts(1), max_new_tokens=8, use_lookahead=True, use_mtp=True)
        assert ours.tolist() == plain.tolist()


def counting(model: Any) -> Any:
    """The next token follows from the last one alone."""
    return taught(model, {token: (5 * token + 1) % VOCAB for token in range(VOCAB)}, 8.0 * VOCAB**0.5)


def knowing(tensors: dict[str, Any], order: str = "embed") -> dict[str, Any]:
    """MTP layers that give the embedding of the token they read."""
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        elif name.endswith(("norm.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight")):
            tensor.fill_(1.0)
        elif name.endswith(("eh_proj.weight", "fc.weight", "input_proj.weight")):
            halves = (torch.eye(len(tensor)), torch.zeros(len(tensor), len(tensor)))
            tensor.copy_(torch.cat(halves if order == "embed" else halves[::-1], dim=1))
    return tensors


def knowing_deepseek(model: Any, layers: int = 1) -> dict[str, Any]:
    tensors = knowing(FAMILIES["deepseek_v3"][1](model, layers))
    return {name: each for name, each in tensors.items() if "embed_tokens" not in name and "head.head" not in name}


def knowing_qwen(model: Any) -> dict[str, Any]:
    """Norms of Qwen3-Next count from 1."""
    tensors = {name: tensor.float() for name, tensor in qwen(model).items()}
    return {name: torch.zeros_like(each) if "norm" in name else each for name, each in knowing(tensors).items()}


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("batch", [1, 3])
def test_layers_that_know_the_model_are_right_to_the_end(layers: int, batch: int, tmp_path: FilePath) -> None:
    """Also deeper than there are layers, at every pass but the first ones."""
    model = counting(deepseek(hidden_size=VOCAB))
    read = loaded(written(tmp_path, model, knowing_deepseek(model, layers)), model)
    output = same_as_plain(read, prompts(batch), Mtp(nodes=5, seed=0, sources=("mtp",)), max_new_tokens=60)
    assert output.stats.steps <= 2 + 59 / 5


@pytest.mark.parametrize(("order", "prefix"), [("hidden", "model.mtp_layers"), ("embed", "mtp_layers")])
def test_mimo_and_speculators_join_in_another_order(order: str, prefix: str, tmp_path: FilePath) -> None:
    """Of the same names; a layer that reads the wrong half would know nothing of the token."""
    model = FAMILIES["mimo"][0]()
    model = type(model)(type(model.config)(**model.config.to_dict() | {"hidden_size": VOCAB})).double().eval()
    counting(model)
    tensors = knowing(FAMILIES["mimo"][1](model, prefix=prefix), order)
    read = loaded(written(tmp_path, model, tensors), model)
    output = same_as_plain(read, prompts(1), Mtp(nodes=5, seed=0, sources=("mtp",)), max_new_tokens=60)
    assert output.stats.steps <= 2 + 59 / 5


def test_drafts_of_a_hybrid_are_right_to_the_end(tmp_path: FilePath) -> None:
    model = counting_hybrid("qwen3_next")
    read = loaded(written(tmp_path, model, knowing_qwen(model)), model)
    strategy = Mtp(nodes=5, seed=0, sources=("mtp",))
    output = same_as_plain(read, prompts(1), strategy, max_new_tokens=40, tolerance=1e-2)
    assert output.stats.steps <= 2 + 39 / 5


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_prompts_of_which_few_hidden_states_are_seen(family: str, tmp_path: FilePath) -> None:
    """Drafts are as good as ever."""
    model = counting(deepseek(hidden_size=VOCAB)) if family == "deepseek_v3" else counting_hybrid(family)
    tensors = knowing_deepseek(model) if family == "deepseek_v3" else knowing_qwen(model)
    read = loaded(written(tmp_path, model, tensors), model)
    strategy = Mtp(nodes=5, seed=0, sources=("mtp",))
    outputs = with_few_hidden_states(read, strategy, max_new_tokens=40, tolerance=1e-2)
    assert all(output.stats.steps <= 2 + 39 / 5 for output in outputs)


def test_a_layers_own_head_and_embedding_are_used(tmp_path: FilePath) -> None:
    """Where they are not copies of the model's, as here, where the model's own would say other tokens."""
    model = counting(deepseek(hidden_size=VOCAB))
    tensors = knowing(FAMILIES["deepseek_v3"][1](model))
    tensors["model.layers.2.embed_tokens.weight"] = model.get_input_embeddings().weight.detach().flip(1)
    tensors["model.layers.2.shared_head.head.weight"] = model.lm_head.weight.detach().flip(1)
    read = loaded(written(tmp_path, model, tensors), model)
    heads = MtpHeads.from_pretrained(model=read)
    assert heads.first.embed is not None and heads.first.head is not None
    output = same_as_plain(read, prompts(1), Mtp(heads, nodes=5, seed=0, sources=("mtp",)), max_new_tokens=60)
    assert output.stats.steps <= 2 + 59 / 5


def test_use_mtp_with_other_strategies(tmp_path: FilePath) -> None:
    model = with_layers(tmp_path, "deepseek_v3")
    inputs = prompts(1) | {"max_new_tokens": 4, "use_lookahead": True, "use_mtp": True}
    for strategy in (Lookahead(nodes=3), Lookahead(sources=("suffix",)), Mtp(), {"strategy": "mtp"}):
        model.generate(**inputs, lookahead_strategy=strategy)
    for refused, match in (
        ({"lookahead_strategy": Jacobi()}, "Jacobi takes no use_mtp: expected Lookahead"),
        ({"lookahead_strategy": Lookahead(window_size=3)}, "Lookahead takes no use_mtp"),
        ({"lookahead_strategy": Lookahead(draft_model=1)}, "both say what drafts"),
        ({"assistant_early_exit": 1}, "use_mtp and an assistant both say what drafts"),
    ):
        refuses(match, model.generate, **inputs, **refused)
    refuses("not loaded from a checkpoint", tiny_model("llama").generate, **inputs)


def test_settings() -> None:
    refuses(r"Mtp\(heads=\) must be MtpHeads", Mtp, 3)
    refuses(r"must name 'mtp'", Mtp, sources=("suffix",))
    assert strategy_from(Mtp("folder", nodes=4).to_dict()) == Mtp("folder", nodes=4)
    assert Lookahead(nodes=7, sources=("suffix",), seed=3).predicting() == Mtp(
        nodes=7, sources=("mtp", "suffix"), seed=3
    )
