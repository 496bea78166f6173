"""Heads that are trained beside a model, from data to disk: what changes and what not, resuming, refusals, commands."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cli import run
from helpers.encoder_decoders import seq2seq_model
from helpers.models import VOCAB, counting_model, fresh_model, prompts, same_as_plain
from helpers.refusals import refuses
from helpers.training import StopAt, changed, texts, weights

from jacobi import LookaheadError
from lookahead import bundled, eagle, redrafter
from lookahead.eagle import EagleSettings, train
from lookahead.heads.block.settings import BlockSettings
from lookahead.heads.eagle.training import fresh_head
from lookahead.heads.medusa.settings import MedusaSettings
from lookahead.redrafter import ReDrafterSettings
from lookahead.registry import KINDS
from lookahead.training.data import Example
from lookahead.training.items import Item

SMALL: dict[str, Any] = {"block_size": 12, "batch_size": 2, "epochs": 1.0, "min_steps": 0, "learning_rate": 1e-3}
SETTINGS: dict[str, Any] = {
    "eagle-3": EagleSettings(unroll=2, **SMALL),
    "eagle-3 with lines of the model's output": EagleSettings(unroll=2, own_output=False, draft_vocab=20, **SMALL),
    "block": BlockSettings(places=4, draft_vocab=20, rank=8, **SMALL),
    "redrafter": ReDrafterSettings(unroll=2, **SMALL),
    "redrafter, sums": ReDrafterSettings(unroll=2, rnn=False, exit_size=24, num_layers=1, **SMALL),
}
TWO = ("eagle-3", "redrafter")
ITEMS = [
    Item(f"item {number}", text * 3) for number, text in enumerate(["def f(a):\n    return a\n", "import os\n\n"] * 4)
]


def recipe(name: str) -> Any:
    return next(KINDS[kind] for kind in ("eagle", "block", "redrafter") if name.startswith(kind)).part("recipe")


def model_of(**changes: Any) -> Any:
    return fresh_model("llama", num_hidden_layers=4, **changes).float()


@pytest.mark.parametrize("name", SETTINGS)
def test_the_model_stays_as_it_was(tmp_path: Path, name: str) -> None:
    model, settings = model_of(), SETTINGS[name]
    before, flags = weights(model), [weight.requires_grad for weight in model.parameters()]
    fresh = weights(recipe(name).fresh(model, settings, texts()).head)
    head = recipe(name).trained(model, texts(), settings, tmp_path)
    assert not changed(before, model) and not model.training and not head.training
    assert [weight.requires_grad for weight in model.parameters()] == flags
    learnt = {each for each, _ in head.named_parameters()}
    assert changed(fresh, head) == learnt, "every weight has learnt something"
    stored = tmp_path / "drafter" / "checkpoint-4" / "trainable.safetensors"
    assert stored.stat().st_size < 4.1 * sum(weight.numel() for weight in head.parameters()) + 5000


@pytest.mark.usefixtures("augmented")
@pytest.mark.parametrize("name", SETTINGS)
def test_training_lowers_the_loss_and_raises_what_a_pass_writes(tmp_path: Path, name: str) -> None:
    model, kind = counting_model(period=7).float(), recipe(name)
    counted = [Example.of([(start + place) % 7 + 1 for place in range(12)]) for start in range(7)] * 4
    settings = dataclasses.replace(SETTINGS[name], epochs=8.0 if name == "block" else 4.0, learning_rate=1e-2)
    if name.startswith("eagle"):
        settings = dataclasses.replace(settings, feature_layers=(0, 1, 1))
    fresh = kind.fresh(model, settings, counted)
    learnt = kind(kind.trained(model, counted, settings, tmp_path), settings)
    parts = [each.score(model, counted[:7])[0] for each in (fresh, learnt)]
    assert parts[1]["loss_0"] < 0.5 * parts[0]["loss_0"]
    assert parts[1]["right_0"] > 0.9
    given = {"input_ids": torch.tensor([[1, 2, 3, 4]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
    steps = []
    for each in (fresh, learnt):
        strategy = kind.strategy(each.head, nodes=4, seed=0, sources=(kind.source,))
        steps.append(same_as_plain(model, given, strategy, max_new_tokens=24).stats.steps)
    assert steps[1] < 0.6 * steps[0]


@pytest.mark.parametrize("name", TWO)
def test_a_resumed_training_ends_with_the_same_head(tmp_path: Path, name: str) -> None:
    settings, train = dataclasses.replace(SETTINGS[name], epochs=2.0, save_steps=3), recipe(name).trained
    whole = train(model_of(), texts(), settings, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(model_of(), texts(), settings, tmp_path / "parts", callbacks=[StopAt("drafter", 3)])
    parts = train(model_of(), texts(), settings, tmp_path / "parts", resume=True)
    assert not changed(weights(whole), parts)


@pytest.mark.parametrize("name", TWO)
def test_a_loss_that_is_not_finite_ends_the_training(tmp_path: Path, name: str) -> None:
    model = model_of()
    with torch.no_grad():
        model.model.embed_tokens.weight[5] = math.nan
    with pytest.raises(LookaheadError, match=r"The loss is nan at step [12], so training stops here"):
        recipe(name).trained(model, [*texts(3), Example.of([5] * 12)], SETTINGS[name], tmp_path)


@pytest.mark.parametrize("kind", ["medusa", *TWO])
def test_settings_of_another_kind_are_refused(tmp_path: Path, kind: str) -> None:
    train = KINDS["medusa"].part("recipe").trained if kind == "medusa" else recipe(kind).trained
    other = SETTINGS["redrafter" if kind != "redrafter" else "eagle-3"]
    refuses(r"settings must be \w+Settings: got ", train, model_of(), texts(), other, tmp_path)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (MedusaSettings, {"method": "medusa-3"}, "method='medusa-3': expected one of medusa-1, medusa-2"),
        (MedusaSettings, {"backbone": "all"}, "backbone='all': expected one of lora, full"),
        (MedusaSettings, {"schedule": "linear"}, "schedule='linear'"),
        (MedusaSettings, {"precision": "int8"}, "precision='int8'"),
        (MedusaSettings, {"num_heads": 0}, "num_heads=0: expected an integer from 1 on"),
        (MedusaSettings, {"batch_size": 0}, "batch_size=0: expected an integer from 1 on"),
        (MedusaSettings, {"accumulate": 1.5}, "accumulate=1.5: expected an integer from 1 on"),
        (MedusaSettings, {"min_steps": -1}, "min_steps=-1: expected 0 or more"),
        (MedusaSettings, {"num_layers": 0}, "num_layers=0: expected at least 1, or 0 with own_output"),
        (MedusaSettings, {"block_size": 5}, "block_size=5: expected at least 6, so that the last of 4 heads"),
        (MedusaSettings, {"learning_rate": 0.0}, "learning_rate=0.0: expected a number above 0"),
        (MedusaSettings, {"epochs": math.nan}, "epochs=nan: expected a number above 0"),
        (MedusaSettings, {"max_minutes": 0.0}, "max_minutes=0.0"),
        (MedusaSettings, {"lambda_0": math.inf}, "lambda_0=inf"),
        (MedusaSettings, {"warmup": 1.0}, "warmup=1.0: expected at least 0 and below 1"),
        (MedusaSettings, {"lora_dropout": -0.1}, "lora_dropout=-0.1"),
        (MedusaSettings, {"distil": True, "method": "medusa-2", "backbone": "full"}, "without the adapter"),
        (EagleSettings, {"unroll": 0}, "unroll=0: expected an integer from 1 on"),
        (EagleSettings, {"block_size": 8}, "block_size=8: expected at least 9, so that step 6 has a token to predict"),
        (EagleSettings, {"draft_vocab": 0}, "draft_vocab=0: expected an integer from 1 on"),
        (EagleSettings, {"feed_forward": 0}, "feed_forward=0"),
        (EagleSettings, {"feature_layers": (-1,)}, r"feature_layers=\(-1,\): expected layer numbers"),
        (EagleSettings, {"decay": 0.0}, "decay=0.0: expected a number above 0"),
        (ReDrafterSettings, {"unroll": 0}, "unroll=0: expected an integer from 1 on"),
        (ReDrafterSettings, {"block_size": 6}, "block_size=6: expected at least 7, so that step 4 has a token"),
        (ReDrafterSettings, {"num_layers": -1}, "num_layers=-1: expected 0 or more"),
        (ReDrafterSettings, {"exit_size": 0}, "exit_size=0: expected an integer from 1 on"),
        (ReDrafterSettings, {"targets": "words"}, "targets='words': expected one of tokens, model"),
    ],
)
def test_impossible_settings_are_refused(kind: Any, settings: dict[str, Any], message: str) -> None:
    refuses(message, kind, **settings)


def test_published_rates_are_those_of_their_papers() -> None:
    """At the published width, and as each paper's rate goes with it."""
    assert (EagleSettings().rate(4096), EagleSettings().rate(2048)) == (5e-5, 1e-4)
    assert (ReDrafterSettings().rate(4096), ReDrafterSettings().rate(1024)) == (1e-3, 2e-3)
    assert EagleSettings(learning_rate=0.5).rate(4096) == ReDrafterSettings(learning_rate=0.5).rate(64) == 0.5


# --- from data to disk ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "fit"), [("eagle-3", eagle.fit), ("redrafter", redrafter.fit)])
def test_a_head_its_card_and_its_evaluation_are_written(folder: Path, tmp_path: Path, name: str, fit: Any) -> None:
    model, tokenizer = bundled.load_model(folder, dtype=torch.float32)
    changes: dict[str, Any] = {"block_size": 32, "distil": True, "answer_tokens": 12}
    if name == "eagle-3":
        changes["feature_layers"] = (1, 1, 1)
    settings, told, source = dataclasses.replace(SETTINGS[name], **changes), set[str](), recipe(name).source
    small: dict[str, Any] = {"name": "tiny", "evaluation_prompts": 1, "new_tokens": 6}
    given = (model, tokenizer, ITEMS[1:], ITEMS[:1], tmp_path / "out", settings)
    evaluation = fit(*given, report=lambda stage, done, logs: told.add(stage), **small)
    assert told == {"answering", "drafter", "evaluating"}
    document = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert document == json.loads(json.dumps(evaluation.to_dict()))
    assert set(evaluation.parts) == {"loss_0", "right_0", "loss_1", "right_1"}
    assert set(evaluation.tokens_per_pass["sampled"]) == {"free sources", source, f"{source} and free sources"}
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"# {recipe(name).fresh(model, settings).title} for tiny" in card
    assert f"| loss_0 | {evaluation.parts['loss_0']:.3f} |" in card
    head = KINDS[source].part("head").from_pretrained(tmp_path / "out")
    assert {weight.dtype for weight in head.parameters()} == {torch.float16}
    refuses("holds a training; continue it with --resume", fit, *given)


@pytest.mark.usefixtures("augmented")
@pytest.mark.parametrize("name", TWO)
def test_a_trained_heads_texts_are_plain_decodings(tmp_path: Path, name: str) -> None:
    kind = recipe(name)
    kind.trained(model_of(), texts(), SETTINGS[name], tmp_path / "run").save_pretrained(tmp_path / "head")
    model = fresh_model("llama", num_hidden_layers=4)
    head = KINDS[kind.source].part("head").from_pretrained(tmp_path / "head", model=model)
    for batch in (1, 3):
        for settings in ({"do_sample": False}, {"do_sample": True, "temperature": 0.8}):
            same_as_plain(model, prompts(batch), kind.strategy(head, nodes=8, seed=0), max_new_tokens=20, **settings)


@pytest.mark.parametrize(
    ("kind", "own"), [("eagle", ("--feature-layers", "0,1,1")), ("redrafter", ("--targets", "model"))]
)
@pytest.mark.usefixtures("brief_evaluation")
def test_train_trains_and_tells(folder: Path, tmp_path: Path, kind: str, own: tuple[str, ...]) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for number, item in enumerate(ITEMS[:3]):
        (data / f"{number}.py").write_text(item.text + "#" * number)
    small = ("--block-size", 32, "--epochs", 1, "--min-steps", 0, "--unroll", 2)
    given = ("--model", folder, "--data", data, "-o", tmp_path / "out", *small, *own)
    ran = run("train", "--kind", kind, *given)
    assert ran.status == 0 and ran.err.startswith("Encoding: 0%")  # progress alone
    for told in ("loss_0 ", "right_1 ", "free sources ", f"{kind} and free sources "):
        assert told in ran.words
    again = json.loads(run(f"train-{kind}", *given, "--resume", "--json").out)  # as it once was called
    assert again["output"] == str(tmp_path / "out")
    assert again["training"]["settings"]["unroll"] == 2
    if kind == "eagle":
        assert again["training"]["settings"]["feature_layers"] == [0, 1, 1]


def test_a_small_draft_vocabulary_has_the_most_frequent_tokens() -> None:
    model = model_of()
    frequent = [7, 3, 40, 11, 5]
    examples = [Example.of(frequent * 3 + [1, 2], [True] * 15 + [True, False])]
    head = fresh_head(model, dataclasses.replace(SETTINGS["eagle-3"], draft_vocab=5), examples)
    ids = head.network.scored()
    assert ids.tolist() == sorted(frequent)
    torch.testing.assert_close(head.network.lm_head.weight, model.lm_head.weight[ids].float())


def test_a_fresh_head_begins_as_the_models_last_layer() -> None:
    model = model_of(num_key_value_heads=2)
    head = fresh_head(model, dataclasses.replace(SETTINGS["eagle-3"], feature_layers=(1, 2, 4), feed_forward=80))
    ours, theirs = head.network.layers[0], model.model.layers[-1]
    assert torch.equal(ours.self_attn.k_proj.weight[:, 32:], theirs.self_attn.k_proj.weight)
    assert torch.equal(ours.hidden_norm.weight, theirs.input_layernorm.weight)
    width = theirs.mlp.up_proj.weight.shape[0]
    assert width < 80
    assert torch.equal(ours.mlp.up_proj.weight[:width], theirs.mlp.up_proj.weight)
    assert not ours.mlp.down_proj.weight[:, width:].any(), "what is wider gives nothing yet"
    passed_on = head.network.fc.weight[:, 32:64].diagonal().mean().item()
    assert passed_on == pytest.approx(1.0, abs=0.05), "the feature of layer 2, the last that is not the output"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"draft_vocab": VOCAB + 1}, f"draft_vocab={VOCAB + 1}: Llama.* has {VOCAB} tokens"),
        ({"feature_layers": (1, 2, 9)}, r"reads \[1, 2, 9\], and Llama.* has 4 layers"),
        ({"block_size": 513}, "has positions for 512 tokens"),
    ],
)
def test_settings_that_do_not_fit_the_model_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    refuses(message, train, model_of(), texts(), dataclasses.replace(SETTINGS["eagle-3"], **settings), tmp_path)
    assert not any(tmp_path.iterdir())


def test_models_that_no_head_can_learn_from(tmp_path: Path) -> None:
    model = model_of()
    model.lm_head.register_forward_hook(lambda module, inputs, output: output.detach())
    with pytest.raises(LookaheadError, match="passes no gradient on to the heads before it"):
        train(model, texts(), dataclasses.replace(SETTINGS["eagle-3"], own_output=False), tmp_path)
    with pytest.raises(LookaheadError, match="is an encoder-decoder model: EAGLE heads need a causal one"):
        train(seq2seq_model("t5"), texts(), SETTINGS["eagle-3"], tmp_path)
    assert not any(tmp_path.iterdir())
