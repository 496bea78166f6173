"""Models that need no self-test: their class is on record, in this version, on a CPU, and nobody has changed them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from helpers.hybrids import CHAIN, PLAIN, SCANNED, fresh_hybrid, known
from helpers.models import fresh_model, prompts, same_as_plain
from transformers import LlamaForCausalLM

from lookahead.models.conformance import recorded_version
from lookahead.models.traits import ModelTraits
from lookahead.support import self_test
from lookahead.support.route import route, verdict
from lookahead.support.self_test import is_on_record

pytestmark = [
    pytest.mark.usefixtures("augmented"),
    pytest.mark.skipif(recorded_version() != transformers.__version__, reason="this version is not on record"),
]


class Derived(LlamaForCausalLM):
    """Somebody's own class."""


def dynamic(config: Any) -> Any:
    """The config with RoPE that changes with the text's length."""
    settings = config.to_dict() | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}
    return type(config)(**settings)


STRANGERS: dict[str, Callable[[Any], Any]] = {
    "hooked": lambda model: model.model.register_forward_hook(lambda *_: None) and model,
    "training": lambda model: model.train(),
    "derived": lambda model: Derived(model.config).eval(),
    "text length": lambda model: LlamaForCausalLM(dynamic(model.config)).eval(),
}


def test_a_recorded_model_is_not_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("the self-test ran")

    monkeypatch.setattr(self_test, "tree_verdict", never)
    monkeypatch.setattr(self_test, "linear_verdict", never)
    same_as_plain(fresh_hybrid("falcon_h1"), prompts(2), max_new_tokens=12)
    stats = same_as_plain(fresh_model("llama"), prompts(2), max_new_tokens=12).stats
    assert stats.steps


@pytest.mark.parametrize("name", known(CHAIN | PLAIN))
def test_a_recorded_recurrent_model_is_not_tested(name: str, passes: Callable[[Any], list[int]]) -> None:
    """Nor is one whose family falls back: no pass is run to know the route."""
    model = fresh_hybrid(name)
    way, reason = route(model)
    assert way == ("tree" if name in SCANNED else "chain" if name in CHAIN else "plain")
    assert (reason is None) == (name in SCANNED) or "a recurrent state cannot follow a tree" in str(reason)
    seen = passes(model)
    assert route(model) == (way, reason)
    assert seen == []


def test_a_changed_recurrent_model_is_tested(passes: Callable[[Any], list[int]]) -> None:
    """A hook's passes are not those on record; neither are those that the verdict for a user is of."""
    for name, way in (("qwen3_next", "tree"), ("zaya", "chain")):
        model = fresh_hybrid(name)
        seen = passes(model)
        assert route(model)[0] == way
        assert seen
    for name, way in (("lfm2", "tree"), ("inkling", "chain")):
        model = fresh_hybrid(name)
        assert route(model)[0] == way
        seen = passes(model)
        assert verdict(model)[0] == way
        assert seen


@pytest.mark.parametrize("change", STRANGERS.values(), ids=STRANGERS)
@torch.no_grad()
def test_strangers_are_not_on_record(change: Callable[[Any], Any]) -> None:
    """Nothing is known of other people's code, of hooks, of training mode, of texts that change their model."""
    model = change(fresh_model("llama"))
    assert not is_on_record(model, ModelTraits.of(model))


@torch.no_grad()
def test_other_versions_are_not_on_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "recorded_version", lambda: "5.0.0")
    model = fresh_model("llama")
    assert not is_on_record(model, ModelTraits.of(model))
    monkeypatch.undo()
    model = fresh_model("llama")
    assert is_on_record(model, ModelTraits.of(model))
