"""Lookahead parallelism: replicas that score parts of trees write what one process writes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.marks import few
from helpers.models import tiny_model
from helpers.ranks import Case, compare, failing, random_cases, told_of_failures
from helpers.refusals import refuses
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


CASES: list[Case] = [
    {"strategy": strategy, "batch": batch, "sample": sample, "seed": 5, "apart": sample, "eos": 7, "penalty": penalty}
    for strategy in SPLIT
    for batch, sample, penalty in ((1, False, True), (1, True, False), (3, False, False), (3, True, True))
]


def test_texts_are_those_of_one_process_also_after_calls_that_failed(tmp_path: Path) -> None:
    told_of_failures(*compare(tmp_path, [case | {"new": 24} for case in CASES], 2, failing("split")))


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 4])
def test_more_ranks(tmp_path: Path, size: int) -> None:
    compare(tmp_path, CASES, size)


@pytest.mark.slow
def test_200_random_calls(tmp_path: Path) -> None:
    compare(tmp_path, random_cases(SPLIT, 200, 4), 2)


def test_one_process_is_refused() -> None:
    with pytest.raises(LookaheadError, match="torchrun"):
        ids = torch.tensor([[1, 2, 3]])
        tiny_model("llama").generate(ids, custom_generate=Lookahead(parallel="lookahead"), max_new_tokens=3)
    refuses("parallel", Lookahead, parallel="tensor")


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


WINDOW = ["--window", "5", "4", "5", "--temperature", "0.8"]


@pytest.mark.parametrize("options", few([[], ["--shard"], WINDOW], WINDOW))
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
