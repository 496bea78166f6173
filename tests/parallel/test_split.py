"""Lookahead parallelism: replicas that score parts of trees write what one process writes."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import tiny_model
from helpers.ranks import compare, model_in, on_ranks
from hypothesis import given
from hypothesis import strategies as st

from jacobi import LookaheadError, TokenTree
from lookahead import Lookahead
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
