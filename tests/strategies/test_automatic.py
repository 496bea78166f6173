"""The automatic mode: settings, there and back through JSON, credit of sources, and ``explain``."""

import json
import re
from pathlib import Path as FilePath
from typing import Any

import pytest
from helpers.automatic import FLAT, NAMES, STEEP, Oracle, drafted
from helpers.models import counting_model, fresh_model, prompts, tiny_model
from helpers.refusals import refuses
from hypothesis import given
from hypothesis import strategies as st
from transformers import GenerationConfig

from jacobi import LookaheadError
from lookahead import DecodingStats, Lookahead
from lookahead.draft.latency import StepTimes
from lookahead.registry import strategy_from

pytestmark = pytest.mark.usefixtures("augmented")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nodes": 0}, r"Lookahead\(nodes=\) must be at least 1: got 0"),
        ({"nodes": 513}, r"nodes=\) must be at most 512: got 513"),
        ({"nodes": 2.0}, r"nodes=\) must be a whole number: got 2.0 of type float"),
        ({"max_nodes": 0}, r"max_nodes=\) must be at least 1: got 0"),
        ({"max_nodes": 513}, r"max_nodes=\) must be at most 512: got 513"),
        ({"max_nodes": None}, r"max_nodes=\) must be a whole number: got None"),
        ({"remember": 1}, r"remember=\) must be True or False: got 1"),
        ({"sources": ("suffix", "medusa")}, r"Unknown source 'medusa': expected 'recycling', 'suffix'"),
        (
            {"sources": ("window",)},
            r"Unknown source 'window': expected 'recycling', 'suffix', 'pool', 'draft', or a func",
        ),
        ({"sources": (3,)}, r"Unknown source 3"),
        ({"sources": "suffix"}, r"sources=\) must be a tuple of one or more of 'recycling'.*got 'suffix'"),
        ({"sources": ()}, r"sources=\) must be a tuple of one or more"),
        ({"sources": {"suffix"}}, r"sources=\) must be a tuple"),
        ({"sources": ("suffix", "pool", "suffix")}, r"names a source twice"),
        ({"sources": (Oracle, Oracle)}, r"names a source twice"),
        ({"tuning": 3}, r"tuning=\) must be a StepTimes or the file of a saved one: got 3"),
        ({"tuning": "/nowhere/curve.json"}, r"/nowhere/curve.json holds no step-time curve.*lookahead tune"),
        ({"sources": ("suffix",), "window_size": 5}, r"sources=\) belongs to the automatic mode"),
        ({"nodes": 4, "ngram_size": 5}, r"nodes=\) belongs to the automatic mode"),
        ({"tuning": FLAT, "verification_set_size": 5}, r"tuning=\) belongs to the automatic mode"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], message: str) -> None:
    refuses(message, Lookahead, **settings)


def test_a_users_source_is_checked() -> None:
    class Sure(Oracle):
        priors = (1.0,)

    refuses(r"Source 'oracle' has the prior 1.0", drafted, tiny_model("llama"), Lookahead(sources=(Sure,)))
    with pytest.raises(LookaheadError, match="object is no source of candidates: it has no start, root"):
        drafted(tiny_model("llama"), Lookahead(sources=(lambda row: object(),)))


@pytest.mark.parametrize(
    ("candidates", "told"),
    [
        ([(10**6, 0)], "proposed token 1000000: expected 0 to"),
        ([(-3, 0)], "proposed token -3"),
        ([(1, 9)], "of kind 9: its priors know 0 to 0"),
        ([(1, -1)], "of kind -1"),
        (None, "proposed None: expected pairs"),
        ([1, 2], r"proposed \[1, 2\]: expected pairs"),
        ([(1.5, 0)], "expected pairs"),
    ],
)
@pytest.mark.parametrize("nodes", [None, 6])
def test_a_users_candidates_are_checked(candidates: Any, told: str, nodes: int | None) -> None:
    """By name, and not by an index error inside the model."""

    class Odd(Oracle):
        priors = (0.5,)

        def propose(self, state: Any) -> Any:
            return candidates

    with pytest.raises(LookaheadError, match=f"Source 'oracle' proposed.*{told.removeprefix('proposed ')}"):
        drafted(tiny_model("llama"), Lookahead(sources=(Odd,), nodes=nodes, tuning=None if nodes else FLAT))


def test_there_and_back(tmp_path: FilePath) -> None:
    file = tmp_path / "curve.json"
    FLAT.save(file)
    for strategy in (
        Lookahead(),
        Lookahead(seed=3, stats="detailed", remember=False),
        Lookahead(sources=("suffix", "pool"), nodes=5, max_nodes=9),
        Lookahead(sources=["pool"], tuning=str(file)),
    ):
        data = strategy.to_dict()
        assert Lookahead.from_dict(data) == strategy
        assert strategy_from(data) == strategy
        assert data["strategy"] == "lookahead"
        assert strategy.automatic
        hash(strategy)
    assert Lookahead(tuning=file).to_dict()["tuning"] == str(file)
    assert Lookahead(sources=["suffix"]).sources == ("suffix",)
    again = Lookahead.from_dict(json.loads(json.dumps(Lookahead(tuning=FLAT).to_dict())))
    assert isinstance(again.tuning, StepTimes) and again.tuning.to_dict() == FLAT.to_dict()
    refuses("Unknown source 'Oracle'", Lookahead.from_dict, Lookahead(sources=(Oracle,)).to_dict())


@pytest.mark.parametrize("strategy", [Lookahead(tuning=FLAT), Lookahead(sources=(Oracle,))], ids=["curve", "source"])
def test_a_config_that_holds_it_can_be_shown(strategy: Lookahead) -> None:
    config = GenerationConfig(max_new_tokens=3)
    config.lookahead_strategy = strategy
    assert "max_new_tokens" in repr(config)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("nodes", [None, 5, 40])
def test_sources_add_up_but_for_the_last_passes(batch: int, nodes: int | None) -> None:
    """In chaotic texts too."""
    strategy = Lookahead(tuning=None if nodes else FLAT, sources=NAMES, nodes=nodes, seed=0, stats="detailed")
    for model in (counting_model(), tiny_model("llama")):
        stats = drafted(model, strategy, batch)
        last = sum(
            next(record["tokens"][row] for record in reversed(stats.passes) if record["tokens"][row]) - 1
            for row in range(batch)
        )
        assert sum(stats.sources.values()) in (stats.accepted, stats.accepted - last)


def told(**changes: Any) -> str:
    stats = DecodingStats(
        steps=11,
        row_steps=11,
        emitted=44,
        drafted=110,
        accepted=33,
        sources={"suffix": 8, "recycling": 25},
        single_ms=10.0,
        timed_ms=20.0,
    )
    for name, value in changes.items():
        setattr(stats, name, value)
    return stats.explain(legend=False)


def test_explain_says_what_happened() -> None:
    assert DecodingStats().explain() == "Nothing was decoded."
    assert told() == (
        "44 tokens in 11 passes (S = 4.00) with 10.0 drafted nodes a pass, of which 30% were kept "
        "(recycling 76%, suffix 24%); a pass cost 2.00 times one over a single token. Drafts 2.00x times passes 1.00x "
        "makes 2.00x plain decoding, estimated from passes over one token."
    )
    loss = "makes a loss, 0.50x plain decoding, estimated from passes over one token."
    assert told(timed_ms=80.0).endswith(loss)
    assert told(single_ms=0.0, timed_ms=0.0).endswith(
        "what a pass over one node costs here is not known, so neither is what drafts bring."
    )
    faster = told(own_ms=5.0)
    assert "a pass cost 4.00 times one over a single token. Drafts 1.00x times passes 2.00x makes 2.00x" in faster
    assert told(emitted=12, row_steps=1, steps=1, drafted=1).startswith("12 tokens in 1 pass (S = 12.00)")
    assert "were kept; a pass cost" in told(sources={})
    assert told(drafted=0, accepted=0).endswith(": plain decoding, because no draft was expected to pay.")
    assert told(steps=1, row_steps=1).endswith("the prompt's pass wrote everything, so there was nothing to draft.")


@given(st.floats(1.0, 9.0), st.floats(0.1, 9.0), st.floats(0.1, 9.0), st.none() | st.floats(0.1, 40.0))
def test_the_parts_make_the_whole(emitted: float, own: float, single: float, measured: float | None) -> None:
    stats = DecodingStats(steps=9, row_steps=10, emitted=round(10 * emitted), drafted=5)
    stats.single_ms, stats.own_ms, stats.timed_ms = single, own, 3.0
    split = stats.split(measured)
    assert split is not None
    whole = stats.mean_acceptance_length * single / 3.0 if measured is None else measured
    assert split[0] * split[1] == pytest.approx(whole)
    assert split[0] == pytest.approx(stats.mean_acceptance_length * min(own / 3.0, 1.0)), "whatever plain takes"
    told = re.search(r"Drafts (\S+)x times passes (\S+)x makes (?:a loss, )?(\S+)x plain", stats.explain(measured))
    assert told is not None and float(told[3]) == pytest.approx(whole, abs=0.006)
    assert stats.explain(measured).endswith(stats.legend()) and len(stats.legend().splitlines()) <= 3


def test_the_legend_has_the_words_that_are_used() -> None:
    stats = DecodingStats(steps=9, row_steps=10, emitted=20, drafted=5, sources={"suffix": 3, "mine": 1}, by_noise=1)
    assert "suffix: what came after the same words before; noise: of the draw" in stats.legend()
    assert "mine" not in stats.legend() and "recycling" not in stats.legend()


def test_explain_after_calls() -> None:
    win = drafted(counting_model(), Lookahead(tuning=FLAT, seed=0))
    assert "drafted nodes a pass" in win.explain() and "plain decoding" in win.explain()
    plainly = drafted(tiny_model("llama"), Lookahead(tuning=STEEP, seed=0), max_new_tokens=20)
    assert "plain decoding, because" in plainly.explain()
    assert plainly.drafted == 0 and plainly.steps == 20
    one = drafted(tiny_model("llama"), Lookahead(seed=0), max_new_tokens=1)
    assert "the prompt's pass wrote everything" in one.explain()
    total = win + plainly
    assert total.timed_ms == win.timed_ms + plainly.timed_ms
    assert DecodingStats.from_dict(win.to_dict()) == win


@pytest.mark.parametrize("batch", [1, 3])
def test_explain_says_what_a_draft_model_took(batch: int) -> None:
    model = fresh_model("llama", 3)
    strategy = Lookahead(nodes=6, seed=0, draft_model=model)
    settings: dict[str, Any] = {"max_new_tokens": 20, "use_lookahead": True, "return_dict_in_generate": True}
    stats = model.generate(**prompts(batch), lookahead_strategy=strategy, **settings).stats
    assert 0.0 < stats.asked_ms["draft"] < stats.draft_ms
    assert re.search(r"; of the time, draft took \d+%", stats.explain())
    assert DecodingStats.from_dict(stats.to_dict()) == stats
    assert (stats + stats).asked_ms["draft"] == 2 * stats.asked_ms["draft"]
