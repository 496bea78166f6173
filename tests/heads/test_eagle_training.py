"""EAGLE heads from data to disk: what training changes and what not, resuming, refusals, the command."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cli import run, save_tiny_model
from helpers.encoder_decoders import seq2seq_model
from helpers.models import VOCAB, counting_model, fresh_model, prompts, same_as_plain
from helpers.training import changed, texts, weights
from transformers import TrainerCallback

from jacobi import LookaheadError
from lookahead import bundled
from lookahead.eagle import Eagle, EagleHead, EagleSettings, fit, train
from lookahead.heads.eagle.fresh import fresh_head
from lookahead.heads.eagle.training import TrainedEagle
from lookahead.training.data import Example
from lookahead.training.evaluation import score_drafter
from lookahead.training.items import Item

SETTINGS = EagleSettings(unroll=2, block_size=12, batch_size=2, epochs=1.0, min_steps=0, learning_rate=1e-3)
FIRST = dataclasses.replace(SETTINGS, version="eagle-1")
ITEMS = [
    Item(f"item {number}", text * 3) for number, text in enumerate(["def f(a):\n    return a\n", "import os\n\n"] * 4)
]


def model_of(**changes: Any) -> Any:
    return fresh_model("llama", num_hidden_layers=4, **changes).float()


@pytest.mark.parametrize("settings", [SETTINGS, FIRST], ids=["eagle-3", "eagle-1"])
def test_the_model_stays_as_it_was(tmp_path: Path, settings: EagleSettings) -> None:
    model = model_of()
    before, flags = weights(model), [weight.requires_grad for weight in model.parameters()]
    fresh = weights(fresh_head(model, settings))
    head = train(model, texts(), settings, tmp_path)
    assert not changed(before, model) and not model.training and not head.training
    assert [weight.requires_grad for weight in model.parameters()] == flags
    learnt = {name for name, _ in head.named_parameters()}
    assert changed(fresh, head) == learnt, "every weight has learnt something"
    stored = tmp_path / "drafter" / "checkpoint-4" / "trainable.safetensors"
    assert stored.stat().st_size < 4.1 * sum(weight.numel() for weight in head.parameters()) + 5000


@pytest.mark.usefixtures("augmented")
@pytest.mark.parametrize("settings", [SETTINGS, FIRST], ids=["eagle-3", "eagle-1"])
def test_training_lowers_the_loss_and_raises_what_a_pass_writes(tmp_path: Path, settings: EagleSettings) -> None:
    model = counting_model(period=7).float()
    counted = [Example.of([(start + place) % 7 + 1 for place in range(12)]) for start in range(7)] * 4
    layers = (0, 1, 1) if settings.version == "eagle-3" else ()
    settings = dataclasses.replace(settings, epochs=4.0, learning_rate=1e-2, feature_layers=layers)
    fresh, learnt = fresh_head(model, settings, counted), train(model, counted, settings, tmp_path)
    parts = [score_drafter(model, TrainedEagle(head, settings), counted[:7])[0] for head in (fresh, learnt)]
    assert parts[1]["loss_0"] < 0.5 * parts[0]["loss_0"]
    assert parts[1]["right_0"] > 0.9
    given = {"input_ids": torch.tensor([[1, 2, 3, 4]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
    steps = []
    for head in (fresh, learnt):
        strategy = Eagle(head, nodes=4, seed=0, sources=("eagle",))
        steps.append(same_as_plain(model, given, strategy, max_new_tokens=24).stats.steps)
    assert steps[1] < 0.6 * steps[0]


def test_a_small_draft_vocabulary_has_the_most_frequent_tokens() -> None:
    model = model_of()
    frequent = [7, 3, 40, 11, 5]
    examples = [Example.of(frequent * 3 + [1, 2], [True] * 15 + [True, False])]
    head = fresh_head(model, dataclasses.replace(SETTINGS, draft_vocab=5), examples)
    ids = head.network.scored()
    assert ids.tolist() == sorted(frequent)
    assert head.network.lm_head is not None
    torch.testing.assert_close(head.network.lm_head.weight, model.lm_head.weight[ids].float())


def test_a_fresh_head_begins_as_the_models_last_layer() -> None:
    model = model_of(num_key_value_heads=2)
    head = fresh_head(model, dataclasses.replace(SETTINGS, feature_layers=(1, 2, 4), feed_forward=80))
    ours, theirs = head.network.layers[0], model.model.layers[-1]
    assert torch.equal(ours.self_attn.k_proj.weight[:, 32:], theirs.self_attn.k_proj.weight)
    assert torch.equal(ours.hidden_norm.weight, theirs.input_layernorm.weight)
    width = theirs.mlp.up_proj.weight.shape[0]
    assert width < 80
    assert torch.equal(ours.mlp.up_proj.weight[:width], theirs.mlp.up_proj.weight)
    assert not ours.mlp.down_proj.weight[:, width:].any(), "what is wider gives nothing yet"
    passed_on = head.network.fc.weight[:, 32:64].diagonal().mean().item()
    assert passed_on == pytest.approx(1.0, abs=0.05), "the feature of layer 2, the last that is not the output"


class StopAt(TrainerCallback):
    """As if the process were ended after the checkpoint of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


def test_a_resumed_training_ends_with_the_same_head(tmp_path: Path) -> None:
    settings = dataclasses.replace(SETTINGS, epochs=2.0, save_steps=3, draft_vocab=20)
    whole = train(model_of(), texts(), settings, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(model_of(), texts(), settings, tmp_path / "parts", callbacks=[StopAt(3)])
    parts = train(model_of(), texts(), settings, tmp_path / "parts", resume=True)
    assert not changed(weights(whole), parts)


def test_a_loss_that_is_not_finite_ends_the_training(tmp_path: Path) -> None:
    model = model_of()
    examples = [*texts(3), Example.of([5] * 12)]
    with torch.no_grad():
        model.model.embed_tokens.weight[5] = math.nan
    with pytest.raises(LookaheadError, match=r"The loss is nan at step [12], so training stops here"):
        train(model, examples, SETTINGS, tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"version": "eagle-4"}, "version='eagle-4': expected one of eagle-3, eagle-1"),
        ({"unroll": 0}, "unroll=0: expected an integer from 1 on"),
        ({"block_size": 8}, "block_size=8: expected at least 9, so that step 6 has a token to predict"),
        ({"draft_vocab": 9, "own_output": False}, "draft_vocab=9: expected 1 or more, and own_output=True"),
        ({"feed_forward": 0}, "feed_forward=0"),
        ({"feature_layers": (-1,)}, r"feature_layers=\(-1,\): expected layer numbers"),
        ({"noise": -1.0}, "noise=-1.0: expected 0 or more"),
        ({"decay": 0.0}, "decay=0.0: expected a number above 0"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(LookaheadError, match=message):
        EagleSettings(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"draft_vocab": VOCAB + 1}, f"draft_vocab={VOCAB + 1}: Llama.* has {VOCAB} tokens"),
        ({"feature_layers": (1, 2, 9)}, r"reads \[1, 2, 9\], and Llama.* has 4 layers"),
        ({"block_size": 513}, "has positions for 512 tokens"),
    ],
)
def test_settings_that_do_not_fit_the_model_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(LookaheadError, match=message):
        train(model_of(), texts(), dataclasses.replace(SETTINGS, **settings), tmp_path)
    assert not any(tmp_path.iterdir())


def test_models_that_no_head_can_learn_from(tmp_path: Path) -> None:
    model = model_of()
    model.lm_head.register_forward_hook(lambda module, inputs, output: output.detach())
    with pytest.raises(LookaheadError, match="passes no gradient on to the heads before it"):
        train(model, texts(), dataclasses.replace(SETTINGS, own_output=False), tmp_path)
    with pytest.raises(LookaheadError, match="is an encoder-decoder model: EAGLE heads need a causal one"):
        train(seq2seq_model("t5"), texts(), SETTINGS, tmp_path)
    assert not any(tmp_path.iterdir())


# --- from data to disk ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose tokens are bytes."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"draft_vocab": 99999}, "draft_vocab=99999"), ({"feature_layers": (1, 1, 99)}, r"reads \[1, 1, 99\]")],
)
def test_what_does_not_fit_leaves_no_folder(
    changes: dict[str, Any], message: str, folder: Path, tmp_path: Path
) -> None:
    """So that the same folder is free for the settings that do."""
    model, tokenizer = bundled.load_model(folder, dtype=torch.float32)
    settings = dataclasses.replace(SETTINGS, block_size=32, **changes)
    with pytest.raises(LookaheadError, match=message):
        fit(model, tokenizer, ITEMS[1:], ITEMS[:1], tmp_path / "out", settings)
    assert not (tmp_path / "out").exists()


def test_a_head_its_card_and_its_evaluation_are_written(folder: Path, tmp_path: Path) -> None:
    model, tokenizer = bundled.load_model(folder, dtype=torch.float32)
    layers = tuple(range(len(model.model.layers)))[-1:] * 3
    settings = dataclasses.replace(SETTINGS, block_size=32, feature_layers=layers, distil=True, answer_tokens=12)
    told: set[str] = set()
    evaluation = fit(
        model,
        tokenizer,
        ITEMS[1:],
        ITEMS[:1],
        tmp_path / "out",
        settings,
        name="tiny",
        evaluation_prompts=1,
        new_tokens=6,
        report=lambda stage, done, logs: told.add(stage),
    )
    assert evaluation is not None and told == {"answering", "drafter", "evaluating"}
    assert json.loads((tmp_path / "out" / "evaluation.json").read_text()) == json.loads(
        json.dumps(evaluation.to_dict())
    )
    assert set(evaluation.parts) == {"loss_0", "right_0", "loss_1", "right_1"}
    assert set(evaluation.tokens_per_pass["sampled"]) == {"free sources", "eagle", "eagle and free sources"}
    card = (tmp_path / "out" / "README.md").read_text()
    assert "# EAGLE-3 head for tiny" in card and f"| loss_0 | {evaluation.parts['loss_0']:.3f} |" in card
    head = EagleHead.from_pretrained(tmp_path / "out")
    assert {weight.dtype for weight in head.parameters()} == {torch.float16}
    assert (head.network.sizes.base_model, head.feature_layers) == ("tiny", layers)
    with pytest.raises(LookaheadError, match="holds a training; continue it with --resume"):
        fit(model, tokenizer, ITEMS[1:], ITEMS[:1], tmp_path / "out", settings)


@pytest.mark.usefixtures("augmented")
def test_a_trained_heads_texts_are_plain_decodings(tmp_path: Path) -> None:
    model = fresh_model("llama", num_hidden_layers=4)
    head = train(model.float(), texts(), dataclasses.replace(SETTINGS, draft_vocab=20), tmp_path / "run")
    head.save_pretrained(tmp_path / "head")
    model = fresh_model("llama", num_hidden_layers=4)
    strategy = Eagle(EagleHead.from_pretrained(tmp_path / "head", model=model), nodes=8, seed=0)
    for batch in (1, 3):
        for settings in ({"do_sample": False}, {"do_sample": True, "temperature": 0.8}):
            same_as_plain(model, prompts(batch), strategy, max_new_tokens=20, **settings)


def test_train_eagle_trains_and_tells(folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for number, item in enumerate(ITEMS[:3]):
        (data / f"{number}.py").write_text(item.text + "#" * number)
    small = ("--block-size", 32, "--epochs", 1, "--min-steps", 0, "--unroll", 2, "--feature-layers", "0,1,1")
    given = ("train-eagle", "--model", folder, "--data", data, "-o", tmp_path / "out", *small)
    ran = run(*given)
    assert ran.status == 0 and ran.err.startswith("Encoding: 0%")  # progress alone
    for told in ("loss_0 ", "right_1 ", "free sources ", "eagle and free sources "):
        assert told in ran.words
    again = json.loads(run(*given, "--resume", "--json").out)
    assert again["output"] == str(tmp_path / "out")
    assert again["training"]["settings"]["feature_layers"] == [0, 1, 1]
    bad = run("train-eagle", "--model", folder, "--data", data, "-o", tmp_path / "no", "--feature-layers", "0,x")
    assert (bad.status, bad.out) == (2, "") and "--feature-layers 0,x: expected numbers" in bad.err
