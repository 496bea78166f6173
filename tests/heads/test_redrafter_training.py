"""ReDrafter's loss, and which settings are refused."""

import dataclasses
from typing import Any

import pytest
import torch
from helpers.models import fresh_model
from helpers.redrafter import KINDS, random_head
from helpers.training import batch
from torch.nn.functional import cross_entropy

from jacobi import LookaheadError
from jacobi import Path as TreePath
from lookahead.heads.redrafter.head import RecurrentPasses
from lookahead.heads.redrafter.training import TrainedRecurrent
from lookahead.redrafter import ReDrafterSettings
from lookahead.training.data import IGNORE
from lookahead.training.drafter import BesideModel

SETTINGS = ReDrafterSettings(unroll=2, block_size=12, batch_size=2, epochs=1.0, min_steps=0, learning_rate=1e-3)


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
        monkeypatch.setattr("lookahead.training.data._LOGITS", {"cpu": size, "cuda": size})
        learner = BesideModel(model, TrainedRecurrent.fresh(model, SETTINGS), 1.0)
        loss = learner(**batch())["loss"]
        loss.backward()
        found.append((loss.detach(), [weight.grad for weight in learner.drafter.parameters()]))
    torch.testing.assert_close(found[0], found[1])


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
