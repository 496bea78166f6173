"""Lookahead parallelism: replicas that score parts of trees write what one process writes."""

import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.models import tiny_model
from helpers.ranks import compare, model_in, on_ranks
from hypothesis import given
from hypothesis import strategies as st

from jacobi import LookaheadError, TokenTree
from lookahead import Lookahead
from lookahead.parallel.messages import Messages, RankError
from lookahead.parallel.split import split

SPLIT = ["split", "split nodes", "split published"]


@given(st.lists(st.integers(0, 30), min_size=0, max_size=40), st.integers(1, 6))
def test_parts_are_whole_branches_and_balanced(parents: list[int], parts: int) -> None:
    tree = TokenTree(0)
    for token, parent in enumerate(parents, 1):
        tree.add(parent % len(tree), token)
    found = split(tree, parts)
    assert len(found) == parts
    assert set().union(*found) == set(range(len(tree)))
    for nodes in found:
        assert nodes[0] == 0 and nodes == sorted(nodes)
        assert all(tree.parents[node] in nodes for node in nodes[1:])
    deepest = max(tree.depths) + 1
    shared = deepest * (parts - 1)  # what each cut may repeat
    assert max(map(len, found)) <= max(deepest, -(-(len(tree) + shared) // parts) + deepest)


def test_a_drawn_tree() -> None:
    tree = TokenTree.from_paths(0, [(1, 2), (1, 3), (4, 5)])
    assert split(tree, 2) == [[0, 1, 2, 3], [0, 4, 5]]
    assert split(tree, 1) == [[0, 1, 2, 3, 4, 5]]
    assert split(TokenTree(7), 3) == [[0], [0], [0]]


@pytest.mark.parametrize("size", [2, 4])
def test_texts_are_those_of_one_process(tmp_path: Path, size: int) -> None:
    cases = [
        {
            "strategy": strategy,
            "batch": batch,
            "sample": sample,
            "seed": 5,
            "apart": sample,
            "eos": 7,
            "penalty": penalty,
        }
        for strategy in (SPLIT if size == 2 else SPLIT[1:])
        for batch in (1, 3)
        for sample in (False, True)
        for penalty in (False, True)
    ]
    compare(tmp_path, cases, size)


@pytest.mark.slow
def test_200_random_calls(tmp_path: Path) -> None:
    rng = random.Random(4)
    cases = [
        {
            "strategy": rng.choice(SPLIT),
            "batch": rng.choice((1, 1, 2, 3)),
            "sample": rng.random() < 0.5,
            "seed": rng.randrange(100),
            "prompt": rng.randrange(100),
            "new": rng.randint(1, 50),
            "eos": rng.choice((None, 7)),
            "penalty": rng.random() < 0.3,
            "apart": True,
        }
        for _ in range(200)
    ]
    compare(tmp_path, cases, 2)


def test_ranks_that_fail_or_disagree_say_so(tmp_path: Path) -> None:
    cases: list[dict[str, Any]] = [
        {"strategy": "split", "batch": 1, "differs": True},
        {"strategy": "split", "batch": 1, "fails": 0},
        {"strategy": "split", "batch": 1, "fails": 1},
        {"strategy": "split nodes", "batch": 1},
    ]
    model_in(tmp_path)
    first, second = on_ranks(tmp_path, cases)
    assert "differ in prompts" in first[0] and "differ in prompts" in second[0]
    for rank, (own, other) in ((0, (first, second)), (1, (second, first))):
        assert "this rank's own trouble" in own[1 + rank]
        assert f"Rank {rank} of 2 has failed" in other[1 + rank]
    assert first[3] == second[3]


def test_one_process_is_refused() -> None:
    with pytest.raises(LookaheadError, match="torchrun"):
        ids = torch.tensor([[1, 2, 3]])
        tiny_model("llama").generate(ids, custom_generate=Lookahead(parallel="lookahead"), max_new_tokens=3)
    with pytest.raises(LookaheadError, match="parallel"):
        Lookahead(parallel="tensor")  # type: ignore[arg-type]


def test_a_rank_that_does_not_answer_may_decode_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*given: object, **settings: object) -> None:
        raise RuntimeError("Connection closed by peer\nmore")

    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "all_reduce", gone)
    told = r"without parallel= .*expected the same call on every rank \(Connection closed by peer\)\.$"
    with pytest.raises(RankError, match=told):
        Messages(None).exchange(torch.zeros(1, dtype=torch.int64))


EXAMPLE = Path(__file__).parents[2] / "examples" / "parallel.py"


@pytest.mark.parametrize("options", [[], ["--shard"], ["--window", "5", "4", "5", "--temperature", "0.8"]])
def test_the_example_runs(options: list[str]) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    launcher += ["--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    command = [*launcher, str(EXAMPLE), "--new-tokens", "24", *options]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = re.search(r"2 ranks: S = ([\d.]+), ([\d.]+) nodes a pass, ([\d.]+) of them on the busiest", ran.stdout)
    assert found and float(found[1]) >= 1
    nodes, busiest = float(found[2]), float(found[3])
    if "--window" in options:  # always a tree of many nodes
        assert busiest < nodes
    else:  # the automatic mode may find, on a loaded machine, that drafts do not pay
        assert busiest == nodes if "--shard" in options else busiest <= nodes
