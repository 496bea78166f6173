"""``lookahead.tune``: a curve, what it recommends, and where it was saved; nothing is measured for wrong arguments."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.models import counting_model, fresh_model, letters_tokenizer, tiny_model
from transformers import GenerationMixin

import lookahead
from lookahead import Lookahead, LookaheadError, StepTimes, tuning
from lookahead.chat_format import CHAT_PROMPTS, PROMPTS

TEMPLATE = "{% for message in messages %}<{{ message['content'] }}>{% endfor %}"
SHORT: dict[str, Any] = {"seconds": 0.4, "new_tokens": 4}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[int]]]:
    """The prompts that were decoded."""
    seen: list[list[int]] = []
    generate = GenerationMixin.generate

    def noting(self: Any, inputs: Any, **settings: Any) -> Any:
        seen.append(inputs[0].tolist())
        return generate(self, inputs, **settings)

    monkeypatch.setattr(GenerationMixin, "generate", noting)
    yield seen


def test_what_is_found(curves: Path, asked: list[list[int]]) -> None:
    model, told = counting_model(), []
    state = torch.get_rng_state()
    found = lookahead.tune(
        model, prompts=[[1, 2, 3]], seconds=3, new_tokens=8, batch=2, report=lambda *at: told.append(at)
    )
    assert torch.equal(torch.get_rng_state(), state), "no draw of the user's"
    assert isinstance(found.curve, StepTimes) and found.curve.about["batch"] == 2
    assert set(curves.iterdir()) == set(found.saved) and found.saved
    assert found.curve.to_dict() in [StepTimes.load(file).to_dict() for file in found.saved]
    assert (found.context, asked[0]) == (3 + 4, [1, 2, 3])
    assert len(found.budgets) + len(found.published) + found.left_out == len(tuning.SIZES)
    for row in (*found.budgets, *found.published):
        cost = found.curve.ms(round(row["drafted"]) + 1, 7) / found.plain_curve.ms(1, 7)
        assert row["S"] >= 1.0 and row["speedup"] == pytest.approx(row["S"] / cost)
    best = tuning.best(found.budgets)
    assert found.nodes == (best["nodes"] if best["drafted"] and best["speedup"] > 1.0 else 0)
    best = tuning.best(found.published)
    sizes = {name: getattr(found, name) for name in ("window_size", "ngram_size", "verification_set_size")}
    assert sizes.items() <= best.items()
    for stage in ("passes", "drafts"):
        shares = [share for name, share in told if name == stage]
        assert shares == sorted(shares) and shares[-1] == 1.0 and len(shares) > 3
    assert [name for name, _ in told] == sorted((name for name, _ in told), reverse=True), "passes come first"
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.nodes = 3  # type: ignore[misc]
    settings = {"max_new_tokens": 8, "do_sample": False}
    plain = model.generate(torch.tensor([[1, 2, 3]]), **settings)
    for strategy in (Lookahead(tuning=found.curve), Lookahead(**sizes)):
        assert torch.equal(model.generate(torch.tensor([[1, 2, 3]]), custom_generate=strategy, **settings), plain)


def test_nothing_is_recommended_that_was_not_drafted(curves: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where time is up after the prompt, traced passes alone promise a speedup."""
    drafted = {"nodes": 4, "drafted": 2.0, "speedup": 0.7}
    assert tuning.best([drafted, {"nodes": 8, "drafted": 0.0, "speedup": 1.2}]) is drafted
    assert tuning.best([drafted, {"nodes": 8, "drafted": 1.0, "speedup": 0.8}])["nodes"] == 8
    monkeypatch.setattr(tuning, "_acceptance", lambda *given: (1.5, 0.0))
    curves = [StepTimes(about=tuning.describe(fresh_model("llama"))) for _ in range(2)]
    for curve, ms in zip(curves, (1.0, 2.0), strict=True):
        curve.put(1, 7, ms)
    monkeypatch.setattr(tuning, "sweep_all", lambda *given, **settings: curves)
    found = lookahead.tune(fresh_model("llama"), prompts=[[1, 2, 3]], new_tokens=8)
    assert found.nodes == 0 and found.budgets[0]["speedup"] == pytest.approx(3.0)


@pytest.mark.parametrize(
    "prompts",
    [
        [[3, 4, 5]],
        [(3, 4, 5)],
        [[[3, 4, 5]]],
        torch.tensor([[3, 4, 5]]),
        [torch.tensor([3, 4, 5])],
        [np.array([3, 4, 5])],
    ],
)
def test_token_ids_in_any_shape(prompts: Any, curves: Path, asked: list[list[int]]) -> None:
    lookahead.tune(fresh_model("llama"), prompts=prompts, **SHORT)
    assert {tuple(ids) for ids in asked} == {(3, 4, 5)}


@pytest.mark.parametrize("template", [None, TEMPLATE])
@pytest.mark.parametrize("raw", [False, True])
def test_texts_in_the_template(template: str | None, raw: bool, curves: Path, asked: list[list[int]]) -> None:
    model, tokenizer = fresh_model("llama"), letters_tokenizer()
    tokenizer.chat_template = template
    lookahead.tune(model, tokenizer, prompts=["abc"], raw=raw, **SHORT)
    text = "<abc>" if template and not raw else "abc"
    assert asked[0] == tokenizer(text)["input_ids"]
    asked.clear()
    lookahead.tune(model, tokenizer, raw=raw, **SHORT)
    first = CHAT_PROMPTS[0] if template and not raw else PROMPTS[0]
    assert asked[0] == tokenizer(f"<{first}>" if template and not raw else first)["input_ids"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "None where a tokenizer is given: got None"),
        ({"prompts": []}, r"prompts must be a list of texts, or of lists of token ids.*: got \[\]"),
        ({"prompts": "abc"}, "prompts must be a list of texts.*: got 'abc'"),
        ({"prompts": {"input_ids": [[1]]}}, "prompts must be a list of texts.*: got {'input_ids'"),
        ({"prompts": ["abc"]}, "a text where a tokenizer is given: got 'abc'"),
        ({"prompts": [1, 2]}, "A prompt must be a list of token ids.*: got 1"),
        ({"prompts": [[1.5]]}, r"A prompt must be a list of token ids.*: got \[1.5\]"),
        ({"prompts": [[]]}, "The prompt is empty"),
        ({"prompts": [[1], [4_000]], "new_tokens": 8}, "Token id 4000 is outside the vocabulary"),
        ({"prompts": [[1]], "seconds": 0}, "seconds must be a number above 0: got 0"),
        ({"prompts": [[1]], "seconds": float("nan")}, "seconds must be a number above 0: got nan"),
        ({"prompts": [[1]], "seconds": "3"}, "seconds must be a number above 0: got '3'"),
        ({"prompts": [[1]], "new_tokens": 1.5}, "new_tokens must be a whole number above 0: got 1.5"),
        ({"prompts": [[1]], "batch": True}, "batch must be a whole number above 0: got True"),
        ({"prompts": [[1]], "model": "folder"}, "model must be a loaded model.*: got 'folder'"),
        ({"prompts": [[1] * 60], "new_tokens": 30}, "A prompt of 60 tokens with 30 new ones.*past the model's 64"),
        ({"prompts": [[1] * 65]}, "The prompt reaches position 64"),
    ],
)
def test_wrong_arguments(given: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "sweep_all", lambda *args, **settings: pytest.fail("passes were measured"))
    model = given.pop("model", tiny_model("gpt2"))
    with pytest.raises(LookaheadError, match=message):
        lookahead.tune(model, **given)


def test_a_model_in_training_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "sweep_all", lambda *args, **settings: pytest.fail("passes were measured"))
    with pytest.raises(LookaheadError, match=r"training mode.*call model.eval\(\)"):
        lookahead.tune(fresh_model("gpt2").train(), prompts=[[1]], new_tokens=8)


def test_the_models_own_settings_do_not_matter(curves: Path) -> None:
    """Drafts are tried greedily, whatever its generation_config says."""
    model = fresh_model("llama")
    wanted = {"num_beams": 4, "do_sample": True, "temperature": 0.5, "max_length": 5, "return_dict_in_generate": False}
    model.generation_config.update(**wanted)
    assert lookahead.tune(model, prompts=[[1, 2, 3]], **SHORT).budgets[0]["S"] >= 1.0
    assert wanted.items() <= model.generation_config.to_dict().items()


def test_where_nothing_can_be_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LOOKAHEAD_CACHE", str(tmp_path / "file" / "curves"))
    assert lookahead.tune(fresh_model("llama"), prompts=[[1, 2, 3]], **SHORT).saved == ()
