"""ReDrafter heads from data to disk: the loss, what training changes and what not, resuming, refusals, the command."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cli import run, save_tiny_model
from helpers.models import counting_model, fresh_model, prompts, same_as_plain
from helpers.redrafter import KINDS, random_head
from helpers.training import batch, changed, texts, weights
from torch.nn.functional import cross_entropy
from transformers import TrainerCallback

from jacobi import LookaheadError
from jacobi import Path as TreePath
from lookahead import bundled
from lookahead.heads.redrafter.head import RecurrentPasses
from lookahead.heads.redrafter.training import TrainedRecurrent, fresh_head
from lookahead.redrafter import RecurrentHead, ReDrafter, ReDrafterSettings, fit, train
from lookahead.training.data import IGNORE, Example
from lookahead.training.drafter import BesideModel
from lookahead.training.evaluation import score_drafter
from lookahead.training.items import Item

SETTINGS = ReDrafterSettings(unroll=2, block_size=12, batch_size=2, epochs=1.0, min_steps=0, learning_rate=1e-3)
ITEMS = [
    Item(f"item {number}", text * 3) for number, text in enumerate(["def f(a):\n    return a\n", "import os\n\n"] * 4)
]


def model_of(**changes: Any) -> Any:
    return fresh_model("llama", **changes).float()


@pytest.mark.parametrize("targets", ["tokens", "model"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_loss_is_that_of_what_the_head_says_when_it_drafts(kind: str, targets: Any) -> None:
    """Step s at token i scores token i + 2 + s, having read the model at i and tokens i + 1 to i + 1 + s."""
    model, head = fresh_model("llama"), random_head(**KINDS[kind])
    settings = dataclasses.replace(SETTINGS, unroll=3, targets=targets)
    given = batch()
    learner = BesideModel(model, TrainedRecurrent(head, settings), 1.0)
    loss = learner(**given)["loss"]
    total = torch.zeros(())
    seen = learner.look(**given)
    for step in range(3):
        each, right = [], []
        for row, (line, labels) in enumerate(zip(seen.tokens.tolist(), seen.labels, strict=True)):
            for place in range(len(line) - 2 - step):
                wanted = int(labels[place + 2 + step])
                if wanted == IGNORE:
                    continue
                states = seen.states["last"][row : row + 1, place : place + 1]
                passes = RecurrentPasses(head, lambda states=states: states, 0, model.get_input_embeddings(), 48)
                passes.write(TreePath([0], [line[place + 1]]))
                (said,) = passes.after([tuple(line[place + 2 : place + 2 + step])])
                assert said is not None
                scores = torch.zeros(48).scatter(0, torch.tensor(said[0]), torch.tensor(said[1]))
                target = torch.tensor(wanted)
                if targets == "model":
                    target = seen.logits[row, place + 1 + step].float().softmax(-1)
                each.append(cross_entropy(scores, target))
                right.append(float(said[0][0] == wanted))
        assert learner.parts[f"loss_{step}"].item() == pytest.approx(torch.stack(each).mean().item(), rel=1e-4)
        assert learner.parts[f"right_{step}"].item() == pytest.approx(sum(right) / len(right))
        total += torch.stack(each).mean()
    assert loss.item() == pytest.approx(total.item(), rel=1e-4)


def test_parts_of_a_loss_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model, found = model_of(), []
    for size in (1 << 22, 48 * 5):
        monkeypatch.setattr("lookahead.training.drafter._LOGITS", {"cpu": size, "cuda": size})
        learner = BesideModel(model, TrainedRecurrent(fresh_head(model, SETTINGS), SETTINGS), 1.0)
        loss = learner(**batch())["loss"]
        loss.backward()
        found.append((loss.detach(), [weight.grad for weight in learner.drafter.parameters()]))
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("changes", [{}, {"rnn": False, "exit_size": 24, "num_layers": 1}], ids=["rnn", "sums"])
def test_the_model_stays_as_it_was(tmp_path: Path, changes: Any) -> None:
    model, settings = model_of(), dataclasses.replace(SETTINGS, **changes)
    before, fresh = weights(model), weights(fresh_head(model, settings))
    head = train(model, texts(), settings, tmp_path)
    assert not changed(before, model) and not model.training and not head.training
    assert changed(fresh, head) == {name for name, _ in head.named_parameters()}, "every weight has learnt something"


@pytest.mark.usefixtures("augmented")
@pytest.mark.parametrize("rnn", [True, False], ids=["rnn", "sums"])
def test_training_lowers_the_loss_and_raises_what_a_pass_writes(tmp_path: Path, rnn: bool) -> None:
    model = counting_model(period=7).float()
    counted = [Example.of([(start + place) % 7 + 1 for place in range(12)]) for start in range(7)] * 4
    settings = dataclasses.replace(SETTINGS, epochs=4.0, learning_rate=1e-2, unroll=4, rnn=rnn)
    fresh, learnt = fresh_head(model, settings), train(model, counted, settings, tmp_path)
    parts = [score_drafter(model, TrainedRecurrent(head, settings), counted[:7])[0] for head in (fresh, learnt)]
    assert parts[1]["loss_0"] < 0.5 * parts[0]["loss_0"]
    assert parts[1]["right_3"] > 0.9
    given = {"input_ids": torch.tensor([[1, 2, 3, 4]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
    steps = []
    for head in (fresh, learnt):
        strategy = ReDrafter(head, nodes=4, seed=0, sources=("redrafter",))
        steps.append(same_as_plain(model, given, strategy, max_new_tokens=24).stats.steps)
    assert steps[1] < 0.6 * steps[0]


class StopAt(TrainerCallback):
    """As if the process were ended after the checkpoint of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


def test_a_resumed_training_ends_with_the_same_head(tmp_path: Path) -> None:
    settings = dataclasses.replace(SETTINGS, epochs=2.0, save_steps=3)
    whole = train(model_of(), texts(), settings, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(model_of(), texts(), settings, tmp_path / "parts", callbacks=[StopAt(3)])
    parts = train(model_of(), texts(), settings, tmp_path / "parts", resume=True)
    assert not changed(weights(whole), parts)


def test_a_loss_that_is_not_finite_ends_the_training(tmp_path: Path) -> None:
    model = model_of()
    with torch.no_grad():
        model.model.embed_tokens.weight[5] = math.nan
    with pytest.raises(LookaheadError, match=r"The loss is nan at step [12], so training stops here"):
        train(model, [*texts(3), Example.of([5] * 12)], SETTINGS, tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"unroll": 0}, "unroll=0: expected an integer from 1 on"),
        ({"block_size": 6}, "block_size=6: expected at least 7, so that step 4 has a token to predict"),
        ({"num_layers": -1}, "num_layers=-1: expected 0 or more"),
        ({"exit_size": 0}, "exit_size=0: expected an integer from 1 on"),
        ({"targets": "words"}, "targets='words': expected one of tokens, model"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(LookaheadError, match=message):
        ReDrafterSettings(**settings)


# --- from data to disk ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose tokens are bytes."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


def test_a_head_its_card_and_its_evaluation_are_written(folder: Path, tmp_path: Path) -> None:
    model, tokenizer = bundled.load_model(folder, dtype=torch.float32)
    settings = dataclasses.replace(SETTINGS, block_size=32, distil=True, answer_tokens=12)
    small: dict[str, Any] = {"evaluation_prompts": 1, "new_tokens": 6}
    evaluation = fit(model, tokenizer, ITEMS[1:], ITEMS[:1], tmp_path / "out", settings, name="tiny", **small)
    assert evaluation is not None
    assert set(evaluation.parts) == {"loss_0", "right_0", "loss_1", "right_1"}
    assert set(evaluation.tokens_per_pass["sampled"]) == {"free sources", "redrafter", "redrafter and free sources"}
    card = (tmp_path / "out" / "README.md").read_text()
    assert "# ReDrafter head for tiny" in card
    assert f"| loss_0 | {evaluation.parts['loss_0']:.3f} |" in card
    head = RecurrentHead.from_pretrained(tmp_path / "out")
    assert {weight.dtype for weight in head.parameters()} == {torch.float16}


@pytest.mark.usefixtures("augmented")
def test_a_trained_heads_texts_are_plain_decodings(tmp_path: Path) -> None:
    train(model_of(), texts(), SETTINGS, tmp_path / "run").save_pretrained(tmp_path / "head")
    model = fresh_model("llama")
    strategy = ReDrafter(RecurrentHead.from_pretrained(tmp_path / "head", model=model), nodes=8, seed=0)
    for number in (1, 3):
        for settings in ({"do_sample": False}, {"do_sample": True, "temperature": 0.8}):
            same_as_plain(model, prompts(number), strategy, max_new_tokens=20, **settings)


def test_train_redrafter_trains_and_tells(folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for number, item in enumerate(ITEMS[:3]):
        (data / f"{number}.py").write_text(item.text + "#" * number)
    small = ("--block-size", 32, "--epochs", 1, "--min-steps", 0, "--unroll", 2, "--targets", "model")
    given = ("train-redrafter", "--model", folder, "--data", data, "-o", tmp_path / "out", *small)
    ran = run(*given)
    assert ran.status == 0 and ran.err.startswith("Encoding: 0%")  # progress alone
    for told in ("loss_0 ", "right_1 ", "free sources ", "redrafter and free sources "):
        assert told in ran.words
    assert json.loads(run(*given, "--resume", "--json").out)["output"] == str(tmp_path / "out")
