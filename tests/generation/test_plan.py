"""A plan is made before anything else is: it holds the route and every refusal, and a session makes the rest once."""

import dataclasses
from typing import Any

import pytest
from helpers.hybrids import CHAIN, hybrid
from helpers.models import fresh_model, prompts, tiny_model

from jacobi import LookaheadError
from lookahead import Lookahead
from lookahead.draft.strategy import DraftStrategy
from lookahead.generation import plan as plans
from lookahead.generation import session
from lookahead.scheduling.requests import prepared

pytestmark = pytest.mark.usefixtures("augmented")

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 9}


def plan(model: Any, strategy: DraftStrategy | None = None) -> plans.Plan:
    return plans.plan_of(strategy or Lookahead(), prepared(model, prompts(2) | GREEDY))


def test_a_plan_says_all_that_follows_from_the_arguments() -> None:
    found = plan(tiny_model("llama_eager"))
    assert (found.route, found.reason, found.rule) == ("tree", None, None)
    assert (found.new_tokens, found.traces, found.packs) == (9, True, True)
    assert found.wants.top_k and not found.wants.taps
    slower = plan(tiny_model("llama_eager"), Lookahead(static=True))
    assert (slower.traces, slower.packs) == (False, False)
    chain, training = plan(hybrid(next(iter(CHAIN)))), plan(fresh_model("gpt2", attn_pdrop=0.1).train())
    assert chain.route == "chain" and "recurrent" in str(chain.reason)
    assert training.route == "plain" and "training mode" in str(training.reason)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.route = "plain"  # type: ignore[misc]


def test_refusals_come_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("borrowed", "open_tree", "LinearModel", "CallGroup", "Upgrades"):
        monkeypatch.setattr(session, name, lambda *_, **__: pytest.fail("made"))
    refused: list[tuple[Any, DraftStrategy, str]] = [
        (hybrid(next(iter(CHAIN))), Lookahead(static=True), "static=True cannot be used"),
        (tiny_model("llama"), Lookahead(parallel="lookahead", static=True), "static=True has passes of its own"),
        (tiny_model("llama"), Lookahead(parallel="lookahead"), "torch.distributed is not initialised"),
    ]
    for model, strategy, message in refused:
        with pytest.raises(LookaheadError, match=message):
            model.generate(**prompts(1), **GREEDY, lookahead_strategy=strategy)


def test_a_session_makes_each_part_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def noted(name: str, original: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            made.append(name)
            return original(*given, **named)

        return call

    parts = ["borrowed", "open_tree", "recall", "CallGroup", "watcher", "Upgrades"]
    for name in ("borrowed", "open_tree", "recall", "watcher"):
        monkeypatch.setattr(session, name, noted(name, getattr(session, name)))
    for kind in (session.CallGroup, session.Upgrades):
        monkeypatch.setattr(kind, "__init__", noted(kind.__name__, kind.__init__))
    tiny_model("llama").generate(**prompts(3), **GREEDY, use_lookahead=True)
    assert made == parts
