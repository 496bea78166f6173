"""The self-test put off: plain passes until a draft is worth it, and the same text whatever it says."""

import logging
import math
from typing import Any

import pytest
import torch
import transformers
from helpers.models import fresh_model, prompts, same_as_plain
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from lookahead import Jacobi, Lookahead, LookaheadError
from lookahead.models.conformance import recorded_version
from lookahead.runtime.tree import FusedModel
from lookahead.support import deferred_test as postponed
from lookahead.support import self_test
from lookahead.support.deferred_test import PostponedTest, can_wait
from lookahead.support.self_test import is_tested

pytestmark = [
    pytest.mark.usefixtures("augmented"),
    pytest.mark.skipif(
        recorded_version() != transformers.__version__, reason="nothing waits in versions that are not on record"
    ),
]


@pytest.fixture
def hopeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short first calls are left to transformers' own loop, as outside of tests."""
    monkeypatch.setattr(postponed, "_HOPELESS", 2.0 * postponed._COST)


@pytest.fixture
def views(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that drafts were prepared for."""
    made: list[str] = []
    make = FusedModel.__init__

    def noted(self: FusedModel, model: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        made.append(type(model).__name__)
        make(self, model, *args, **kwargs)

    monkeypatch.setattr(FusedModel, "__init__", noted)
    return made


class Heard(BaseStreamer):
    """What a streamer is put."""

    def __init__(self) -> None:
        self.tokens: list[Any] = []

    def put(self, value: Any) -> None:
        self.tokens.append(value.flatten().tolist())

    def end(self) -> None:
        self.tokens.append("end")


class Derived(LlamaForCausalLM):
    """Somebody's own class."""


def repeating() -> PreTrainedModel:
    """A model of a class on record that nothing is known of yet, and whose texts repeat themselves."""
    return fresh_model("llama")


def test_waits_for_a_draft_that_pays() -> None:
    """A short call is too short for the test; a long one has it, and both texts are plain decoding's."""
    model = repeating()
    same_as_plain(model, prompts(1), max_new_tokens=8)
    assert not is_tested(model)
    stats = same_as_plain(model, prompts(1), max_new_tokens=160).stats
    assert is_tested(model)
    assert stats.accepted > 0


@pytest.mark.usefixtures("hopeless")
@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
def test_a_call_too_short_for_drafts(views: list[str], sample: bool) -> None:
    """It is transformers' own loop's, text, random numbers and streamed tokens included, until enough was written."""
    model, rows = repeating(), prompts(1)
    for calls in range(2):
        told: dict[bool, Any] = {}
        for ours in (False, True):
            torch.manual_seed(calls)
            heard = Heard()
            text = model.generate(**rows, max_new_tokens=12, do_sample=sample, use_lookahead=ours, streamer=heard)
            told[ours] = (text.tolist(), torch.rand(1).item(), heard.tokens)
        assert told[True] == told[False]
        assert not views
    model.generate(**rows, max_new_tokens=12, do_sample=sample, use_lookahead=True)
    assert len(views) == 1


@pytest.mark.usefixtures("hopeless")
@pytest.mark.parametrize(
    "settings",
    [{"return_dict_in_generate": True}, {"lookahead_strategy": Lookahead(verification="rejection")}],
    ids=["statistics", "rejection"],
)
def test_short_calls_that_show_more_than_text(views: list[str], settings: dict[str, Any]) -> None:
    """Statistics are those of our loop, and rejection writes a text of its own."""
    repeating().generate(**prompts(1), max_new_tokens=8, do_sample=True, use_lookahead=True, **settings)
    assert views


@pytest.mark.usefixtures("hopeless")
@pytest.mark.parametrize("new_tokens", [1, 8])
def test_a_short_call_refuses_nan(new_tokens: int) -> None:
    """By name, as a long one does; and writes on where a processor is there to mend it."""
    model = repeating()
    with torch.no_grad():
        model.lm_head.weight[3] = math.nan
    with pytest.raises(LookaheadError, match=r"logits are NaN at step 1 \(row 0, token 1\)"):
        model.generate(**prompts(1), max_new_tokens=new_tokens, do_sample=False, use_lookahead=True)
    kwargs = {**prompts(1), "max_new_tokens": new_tokens, "do_sample": False, "remove_invalid_values": True}
    assert torch.equal(model.generate(**kwargs, use_lookahead=True), model.generate(**kwargs))


def test_layers_that_drop_out_do_not_wait() -> None:
    """Plain passes would draw random numbers, and nobody would have been told."""
    model = fresh_model("llama", attention_dropout=0.5)
    same_as_plain(model, prompts(1), max_new_tokens=8)
    for layer in model.model.layers:
        layer.self_attn.train()
    assert not can_wait(model)
    with pytest.raises(LookaheadError):
        model.generate(**prompts(1), max_new_tokens=8, do_sample=False, use_lookahead=True)


def test_short_calls_add_up() -> None:
    """What short calls wrote without the test counts as well, or they would never have it."""
    model = repeating()
    calls = 0
    while not is_tested(model) and calls < 60:
        model.generate(**prompts(1), max_new_tokens=8, do_sample=False, use_lookahead=True)
        calls += 1
    assert 1 < calls < 60


@pytest.mark.parametrize(
    "strategy",
    [Lookahead(seed=1), Lookahead(nodes=8), Lookahead(sources=("window",)), Lookahead(window_size=3), Jacobi()],
    ids=repr,
)
def test_only_the_automatic_mode_waits(strategy: Any) -> None:
    """Where sizes are given or passes have to repeat, the test comes first."""
    model = repeating()
    model.generate(**prompts(1), max_new_tokens=4, use_lookahead=True, lookahead_strategy=strategy)
    assert is_tested(model)


def test_batches_do_not_wait() -> None:
    """The sizes of a batch are chosen by what its trees were worth, so they have to be grown."""
    model = repeating()
    model.generate(**prompts(2), max_new_tokens=4, use_lookahead=True)
    assert is_tested(model)


@torch.no_grad()
def test_strangers_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of other people's code, of hooks, of training mode, of other versions, of texts that change."""
    model = repeating()
    assert can_wait(model)
    hook = model.model.register_forward_hook(lambda *_: None)
    assert not can_wait(model)
    hook.remove()
    model.train()
    assert not can_wait(model)
    model.eval()
    monkeypatch.setattr(postponed, "recorded_version", lambda: "5.0.0")
    assert not can_wait(model)
    monkeypatch.undo()
    assert can_wait(model)
    assert not can_wait(Derived(model.config).eval())
    config = type(model.config)(**model.config.to_dict())
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    assert not can_wait(LlamaForCausalLM(config).eval())


def test_a_model_that_fails(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It gets no tree; transformers' own passes write the rest, and say why. The next call is refused."""
    model = repeating()
    why = "It mixes branches up. Drop use_lookahead for this model."
    monkeypatch.setattr(self_test, "_tree_verdict", lambda _: (why, True))
    with caplog.at_level(logging.WARNING, "lookahead"):
        stats = same_as_plain(model, prompts(1), max_new_tokens=160).stats
    assert is_tested(model)
    assert stats.drafted == 0
    assert [record.getMessage() for record in caplog.records].count(
        f"use_lookahead has no effect, plain decoding goes on: {why}"
    ) == 1
    with pytest.raises(LookaheadError, match="mixes branches up"):
        model.generate(**prompts(1), max_new_tokens=160, use_lookahead=True)


def test_what_a_draft_has_to_promise() -> None:
    """As much as the test costs, over the tokens to come or those written without it; the rest is as without a test."""
    model = repeating()
    test = PostponedTest(model, 120, lambda _: None)
    assert test.gain(0) == pytest.approx(1.0 / (1.0 - postponed._COST / 120))
    assert test.gain(60) > test.gain(0)
    assert test.gain(119) == math.inf
    assert not test.probes
    test.close(1000)
    later = PostponedTest(model, 120, lambda _: None)
    assert 1.0 < later.gain(119) < test.gain(0)
    assert later.probes
    assert PostponedTest(repeating(), 120, lambda _: None).gain(0) == test.gain(0), "each model by itself"
