"""A plan holds the route and every refusal; watching tells of every pass before the stream does, and changes none."""

import dataclasses
from typing import Any

import pytest
import torch
from helpers.hybrids import hybrid
from helpers.medusa import counting
from helpers.models import counting_model, fresh_model, prompts, tiny_model
from helpers.refusals import refuses
from helpers.streaming import Puts
from helpers.threads import together

import lookahead
from jacobi import LookaheadError
from lookahead import Jacobi, Lookahead
from lookahead.bundled import BUNDLED_EAGLE
from lookahead.draft.strategy import DraftStrategy
from lookahead.eagle import Eagle, EagleHead
from lookahead.generation import plan as plans
from lookahead.generation import session
from lookahead.generation.watch import Pass
from lookahead.medusa import Medusa
from lookahead.scheduling.requests import prepared

pytestmark = pytest.mark.usefixtures("augmented")

STRATEGIES = {
    "automatic": Lookahead(nodes=6, seed=0),
    "published": Lookahead(window_size=4, ngram_size=3, verification_set_size=4, seed=0),
    "jacobi": Jacobi(),
}


def watched(model: Any, inputs: dict[str, Any], **settings: Any) -> tuple[list[Pass], Any]:
    passes: list[Pass] = []
    torch.manual_seed(3)
    with lookahead.watching(passes.append):
        output = model.generate(**inputs, max_new_tokens=40, return_dict_in_generate=True, **settings)
    return passes, output


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", STRATEGIES)
def test_passes_tell_the_text(name: str, batch: int, sample: bool) -> None:
    """All that is written, pass by pass; accepted nodes hold what was written before the bonus token."""
    model, inputs = counting_model(), prompts(batch)
    settings = {"lookahead_strategy": STRATEGIES[name], "do_sample": sample, "eos_token_id": 6, "pad_token_id": 0}
    passes, output = watched(model, inputs, **settings)
    assert [each.index for each in passes] == list(range(output.stats.steps))
    for row, text in enumerate(output.sequences[:, inputs["input_ids"].shape[1] :].tolist()):
        written = [token for each in passes for token in each.rows[row].written]
        assert written == text[: len(written)]
        assert set(text[len(written) :]) <= {0}
    for each in passes:
        for row in each.rows:
            assert len(row.tokens) == len(row.parents) == len(row.sources) == len(row.chances)
            assert [row.tokens[node] for node in row.accepted[1:]] == list(row.written[:-1])
            assert all(row.parents[below] == node for node, below in zip(row.accepted, row.accepted[1:], strict=False))
    assert sum(len(row.tokens) - 1 for each in passes for row in each.rows if row.written) == output.stats.drafted
    torch.manual_seed(3)
    again = model.generate(**inputs, max_new_tokens=40, **settings)
    assert again.tolist() == output.sequences.tolist()


def test_sources_and_chances() -> None:
    """Every drafted node of the automatic tree has a source and a chance, which falls along a branch."""
    passes, output = watched(tiny_model("llama"), prompts(1), lookahead_strategy=STRATEGIES["automatic"])
    rows = [each.rows[0] for each in passes]
    accepted = [row.sources[node] for row in rows for node in row.accepted[1:]]
    assert {source: accepted.count(source) for source in set(accepted)} == output.stats.sources
    for row in rows:
        assert row.sources[0] == "" and all(row.sources[1:])
        for node, parent in enumerate(row.parents):
            assert parent < 0 or 0.0 < row.chances[node] <= row.chances[parent] <= 1.0


def test_published_trees_tell_window_and_pool() -> None:
    passes, _ = watched(counting_model(), prompts(1), lookahead_strategy=STRATEGIES["published"])
    named = {source for each in passes[1:] for source in each.rows[0].sources[1:]}
    assert named == {"window", "pool"}
    kept = [each.rows[0].sources[node] for each in passes[1:] for node in each.rows[0].accepted[1:]]
    assert "pool" in kept


def test_watchers_are_told_before_streams() -> None:
    streamer, put = Puts(), list[int]()
    with lookahead.watching(lambda each: put.append(len(streamer.puts))):
        counting_model().generate(**prompts(1), max_new_tokens=20, use_lookahead=True, streamer=streamer)
    assert put[0] == 1  # the prompt itself
    assert put == sorted(put) and put[-1] < len(streamer.puts)


def test_a_watcher_that_raises_ends_the_call() -> None:
    model, calls = counting_model(), list[Pass]()

    def stop(each: Pass) -> None:
        calls.append(each)
        if each.index == 2:
            raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"), lookahead.watching(stop):
        model.generate(**prompts(1), max_new_tokens=60, use_lookahead=True)
    assert len(calls) == 3
    plain, ours = (model.generate(**prompts(1), max_new_tokens=20, use_lookahead=use) for use in (False, True))
    assert plain.tolist() == ours.tolist()
    assert len(calls) == 3


def test_other_threads_are_not_watched() -> None:
    seen: list[Pass] = []
    with lookahead.watching(seen.append):
        work = {"max_new_tokens": 5, "use_lookahead": True}
        together(lambda: counting_model().generate(**prompts(1), **work))
    assert not seen


def test_a_watcher_must_be_callable() -> None:
    with pytest.raises(LookaheadError, match="needs a function of one Pass: got int"), lookahead.watching(3):  # type: ignore[arg-type]
        pass


def test_a_head_alone_is_named() -> None:
    model, heads = counting()
    bundled, tokenizer = lookahead.load_bundled()
    text = tokenizer("def read_json(path):\n", return_tensors="pt")
    eagle = Eagle(EagleHead.from_pretrained(BUNDLED_EAGLE, model=bundled), tree="eagle-2")
    cases = [("heads", model, prompts(1), Medusa(heads, choices=[2, 2])), ("eagle", bundled, dict(text), eagle)]
    for name, which, inputs, strategy in cases:
        passes, _ = watched(which, inputs, lookahead_strategy=strategy, do_sample=False)
        told = [source for each in passes for source in each.rows[0].sources[1:]]
        assert told and set(told) == {name}


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
    chain, training = plan(hybrid("zaya")), plan(fresh_model("gpt2", attn_pdrop=0.1).train())
    assert chain.route == "chain" and "recurrent" in str(chain.reason)
    assert training.route == "plain" and "training mode" in str(training.reason)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.route = "plain"  # type: ignore[misc]


def test_refusals_come_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("borrowed", "open_tree", "LinearModel", "CallGroup", "Upgrades"):
        monkeypatch.setattr(session, name, lambda *_, **__: pytest.fail("made"))
    refused: list[tuple[Any, DraftStrategy, str]] = [
        (hybrid("zaya"), Lookahead(static=True), "static=True cannot be used"),
        (tiny_model("llama"), Lookahead(parallel="lookahead", static=True), "static=True has passes of its own"),
        (tiny_model("llama"), Lookahead(parallel="lookahead"), "torch.distributed is not initialised"),
    ]
    for model, strategy, message in refused:
        refuses(message, model.generate, **prompts(1), **GREEDY, lookahead_strategy=strategy)


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
