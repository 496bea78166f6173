"""Settings of the automatic mode: what is refused, and there and back through JSON."""

import itertools
import json
from pathlib import Path as FilePath
from typing import Any

import pytest
from helpers.automatic import FLAT, Oracle, drafted, nodes_of
from helpers.models import counting_model, prompts, same_as_plain, tiny_model
from transformers import GenerationConfig

from jacobi import LookaheadError
from lookahead import Lookahead
from lookahead.draft.latency import StepTimes
from lookahead.registry import strategy_from

pytestmark = pytest.mark.usefixtures("augmented")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nodes": 0}, r"Lookahead\(nodes=\) must be at least 1: got 0"),
        ({"nodes": -2}, r"nodes=\) must be at least 1"),
        ({"nodes": 513}, r"nodes=\) must be at most 512: got 513"),
        ({"nodes": 2.0}, r"nodes=\) must be a whole number: got 2.0 of type float"),
        ({"nodes": True}, r"nodes=\) must be a whole number: got True"),
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
    with pytest.raises(LookaheadError, match=message):
        Lookahead(**settings)


def test_a_foreign_tuning_file_is_refused(tmp_path: FilePath) -> None:
    file = tmp_path / "curve.json"
    for content in ("{}", "[1, 2]", "no", '{"format": 99, "nodes": [], "cells": [], "about": {}}'):
        file.write_text(content)
        with pytest.raises(LookaheadError, match="step-time curve"):
            Lookahead(tuning=file)


def test_a_users_source_is_checked() -> None:
    class Sure(Oracle):
        priors = (1.0,)

    with pytest.raises(LookaheadError, match=r"Source 'oracle' has the prior 1.0"):
        drafted(tiny_model("llama"), Lookahead(sources=(Sure,)))
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
    with pytest.raises(LookaheadError, match="Unknown source 'Oracle'"):
        Lookahead.from_dict(Lookahead(sources=(Oracle,)).to_dict())


def test_as_a_dict_in_the_call() -> None:
    given = {"sources": ["suffix"], "nodes": 4, "stats": "detailed"}
    output = same_as_plain(counting_model(), prompts(1), given, max_new_tokens=30)
    assert max(itertools.chain(*nodes_of(output.stats))) == 4
    assert set(output.stats.sources) == {"suffix"}


@pytest.mark.parametrize("strategy", [Lookahead(tuning=FLAT), Lookahead(sources=(Oracle,))], ids=["curve", "source"])
def test_a_config_that_holds_it_can_be_shown(strategy: Lookahead) -> None:
    config = GenerationConfig(max_new_tokens=3)
    config.lookahead_strategy = strategy
    assert "max_new_tokens" in repr(config)
