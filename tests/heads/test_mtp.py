"""Multi-token prediction: texts stay plain decoding's in every layout, and layers that know the model are right."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.hybrids import counting_hybrid
from helpers.models import F64, VOCAB, prompts, run, same_as_plain, taught, tiny_model
from helpers.mtp import FAMILIES, deepseek, loaded, qwen, with_layers, written

from jacobi import LookaheadError
from lookahead import Jacobi, Lookahead
from lookahead.models.names import CACHE
from lookahead.mtp import Mtp, MtpHeads
from lookahead.registry import strategy_from
from lookahead.runtime.linear import PaidTest


@pytest.mark.usefixtures("augmented")
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("family", [family for family in FAMILIES if "renamed" not in family])
def test_texts_do_not_change(family: str, layers: int, tmp_path: Path) -> None:
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


@pytest.mark.usefixtures("augmented")
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("batch", [1, 3])
def test_layers_that_know_the_model_are_right_to_the_end(layers: int, batch: int, tmp_path: Path) -> None:
    """Also deeper than there are layers, at every pass but the first ones."""
    model = counting(deepseek(hidden_size=VOCAB))
    read = loaded(written(tmp_path, model, knowing_deepseek(model, layers)), model)
    output = same_as_plain(read, prompts(batch), Mtp(nodes=5, seed=0, sources=("mtp",)), max_new_tokens=60)
    assert output.stats.steps <= 2 + 59 / 5


@pytest.mark.usefixtures("augmented")
@pytest.mark.parametrize(("order", "prefix"), [("hidden", "model.mtp_layers"), ("embed", "mtp_layers")])
def test_mimo_and_speculators_join_in_another_order(order: str, prefix: str, tmp_path: Path) -> None:
    """Of the same names; a layer that reads the wrong half would know nothing of the token."""
    model = FAMILIES["mimo"][0]()
    model = type(model)(type(model.config)(**model.config.to_dict() | {"hidden_size": VOCAB})).double().eval()
    counting(model)
    tensors = knowing(FAMILIES["mimo"][1](model, prefix=prefix), order)
    read = loaded(written(tmp_path, model, tensors), model)
    output = same_as_plain(read, prompts(1), Mtp(nodes=5, seed=0, sources=("mtp",)), max_new_tokens=60)
    assert output.stats.steps <= 2 + 59 / 5


@pytest.mark.usefixtures("augmented")
def test_linear_drafts_of_a_hybrid_are_right_to_the_end(tmp_path: Path) -> None:
    model = counting_hybrid("qwen3_next")
    read = loaded(written(tmp_path, model, knowing_qwen(model)), model)
    strategy = Mtp(nodes=5, seed=0, sources=("mtp",))
    output = same_as_plain(read, prompts(1), strategy, max_new_tokens=40, tolerance=1e-2)
    assert output.stats.steps <= 2 + 39 / 5


@pytest.mark.usefixtures("augmented")
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_prompts_of_which_few_hidden_states_are_seen(family: str, tmp_path: Path) -> None:
    """Read in chunks, given as embeddings, or behind a cache that is continued; drafts are as good as ever."""
    model = counting(deepseek(hidden_size=VOCAB)) if family == "deepseek_v3" else counting_hybrid(family)
    tensors = knowing_deepseek(model) if family == "deepseek_v3" else knowing_qwen(model)
    read = loaded(written(tmp_path, model, tensors), model)
    strategy, inputs = Mtp(nodes=5, seed=0, sources=("mtp",)), prompts(1)
    settings: dict[str, Any] = {"max_new_tokens": 40, "tolerance": 1e-2}
    outputs = [
        same_as_plain(read, inputs, strategy, prefill_chunk_size=5, **settings),
        same_as_plain(read, _embedded(read, inputs), strategy, **settings),
    ]
    before = read.generate(**inputs, max_new_tokens=4, return_dict_in_generate=True)
    text, kept = before.sequences, before[CACHE]
    longer = {"input_ids": text, "attention_mask": torch.ones_like(text), CACHE: kept}
    plain = read.generate(**longer | {CACHE: copy.deepcopy(kept)}, max_new_tokens=40)
    ours = {"return_dict_in_generate": True, "use_lookahead": True, "lookahead_strategy": strategy}
    outputs.append(read.generate(**longer, max_new_tokens=40, **ours))
    assert outputs[-1].sequences.tolist() == plain.tolist()
    assert all(output.stats.steps <= 2 + 39 / 5 for output in outputs)


def _embedded(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    embeddings = model.get_input_embeddings()(inputs["input_ids"]).detach()
    return {"inputs_embeds": embeddings, "attention_mask": inputs["attention_mask"]}


@pytest.mark.usefixtures("augmented")
def test_layers_promise_that_a_linear_models_test_pays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of its tokens, also where the text never repeats, by which free sources are judged."""
    asked: list[int] = []

    def allows(self: Any, hoped: int) -> bool:
        asked.append(hoped)
        return hoped >= 4

    monkeypatch.setattr(PaidTest, "allows", allows)
    model = with_layers(tmp_path, "qwen3_next")
    output = same_as_plain(model, prompts(1), Mtp(nodes=3, seed=0), max_new_tokens=20, tolerance=1e-3)
    assert max(asked) >= 4
    assert output.stats.drafted


@pytest.mark.usefixtures("augmented")
def test_a_layers_own_head_and_embedding_are_used(tmp_path: Path) -> None:
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


@pytest.mark.usefixtures("augmented")
def test_use_mtp_with_other_strategies(tmp_path: Path) -> None:
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
        with pytest.raises(LookaheadError, match=match):
            model.generate(**inputs, **refused)
    with pytest.raises(LookaheadError, match="not loaded from a checkpoint"):
        tiny_model("llama").generate(**inputs)


def test_settings() -> None:
    with pytest.raises(LookaheadError, match=r"Mtp\(heads=\) must be MtpHeads"):
        Mtp(3)  # type: ignore[arg-type]
    with pytest.raises(LookaheadError, match=r"must name 'mtp'"):
        Mtp(sources=("suffix",))
    assert strategy_from(Mtp("folder", nodes=4).to_dict()) == Mtp("folder", nodes=4)
    assert Lookahead(nodes=7, sources=("suffix",), seed=3).predicting() == Mtp(
        nodes=7, sources=("mtp", "suffix"), seed=3
    )
