"""Tensor parallelism: two and four ranks over gloo write what one process writes, and never wait for nobody."""

import random
import time
from pathlib import Path

import pytest
from helpers.ranks import Case, compare, model_in, on_ranks, plainly

STRATEGIES = ["automatic", "nodes", "suffix", "published", "jacobi", "seeded"]


@pytest.mark.parametrize("size", [2, 4])
def test_texts_are_those_of_one_process(tmp_path: Path, size: int) -> None:
    cases = [
        {"strategy": strategy, "batch": batch, "sample": sample, "seed": 5, "apart": sample, "eos": 7}
        for strategy in (STRATEGIES if size == 2 else STRATEGIES[:2])
        for batch in (1, 3)
        for sample in (False, True)
    ]
    compare(tmp_path, cases, size)


def random_cases(count: int, seed: int) -> list[Case]:
    rng = random.Random(seed)
    return [
        {
            "strategy": rng.choice(STRATEGIES),
            "batch": rng.choice((1, 1, 2, 3)),
            "sample": rng.random() < 0.5,
            "seed": rng.randrange(100),
            "prompt": rng.randrange(100),
            "new": rng.randint(1, 50),
            "eos": rng.choice((None, 7)),
            "apart": True,
        }
        for _ in range(count)
    ]


def test_random_calls(tmp_path: Path) -> None:
    compare(tmp_path, [case | {"apart": case["sample"]} for case in random_cases(20, 1)], 2)


@pytest.mark.slow
def test_200_random_calls(tmp_path: Path) -> None:
    compare(tmp_path, random_cases(200, 2), 2)


def test_ranks_that_disagree_or_fail_say_so(tmp_path: Path) -> None:
    cases = [
        {"strategy": "automatic", "batch": 1, "differs": True},
        {"strategy": "automatic", "batch": 1, "fails": 0},
        {"strategy": "automatic", "batch": 1, "fails": 1},
        {"strategy": "published", "batch": 2},
        {"strategy": "published", "batch": 2, "counts": True},
    ]
    model = model_in(tmp_path)
    first, second = on_ranks(tmp_path, cases)
    for told in (first[0], second[0]):
        assert "differ in prompts" in told
    for rank, (own, other) in ((0, (first, second)), (1, (second, first))):
        assert "this rank's own trouble" in own[1 + rank]
        assert f"Rank {rank} of 2 has failed" in other[1 + rank]
    assert first[3] == second[3] == plainly(model, cases[3])  # a call that failed leaves nothing behind
    steps, drafted = first[4]
    assert drafted > steps and second[4] == first[4]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_ends_the_call(tmp_path: Path, rank: int) -> None:
    model_in(tmp_path)
    begin = time.monotonic()
    found = on_ranks(
        tmp_path, [{"strategy": "automatic", "batch": 1}, {"strategy": "automatic", "batch": 1, "dies": rank}]
    )
    assert time.monotonic() - begin < 120
    assert len(found[rank]) == 1
    assert len(found[1 - rank]) == 1 or "gone" in found[1 - rank][1]
