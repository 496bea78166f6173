"""Tensor parallelism: two and four ranks over gloo write what one process writes, and never wait for nobody."""

import time
from pathlib import Path

import pytest
from helpers.marks import few
from helpers.ranks import Case, compare, failing, model_in, on_ranks, random_cases, told_of_failures

STRATEGIES = ["automatic", "nodes", "suffix", "published", "jacobi", "seeded"]
CASES: list[Case] = [
    {"strategy": strategy, "batch": batch, "sample": sample, "seed": 5, "apart": sample, "eos": 7, "new": 24}
    for strategy in STRATEGIES
    for batch, sample in ((1, True), (3, False))
]


def test_texts_are_those_of_one_process_also_after_calls_that_failed(tmp_path: Path) -> None:
    counted = {"strategy": "published", "batch": 2, "counts": True}
    first, second = compare(tmp_path, CASES + random_cases(STRATEGIES, 6, 1), 2, [*failing("automatic"), counted])
    told_of_failures(first, second)
    steps, drafted = first[3]
    assert drafted > steps and second[3] == first[3]


@pytest.mark.slow
def test_four_ranks(tmp_path: Path) -> None:
    compare(tmp_path, CASES, 4)


@pytest.mark.slow
def test_200_random_calls(tmp_path: Path) -> None:
    compare(tmp_path, random_cases(STRATEGIES, 200, 2), 2)


@pytest.mark.parametrize("rank", few([0, 1], 0))
def test_a_rank_that_dies_ends_the_call(tmp_path: Path, rank: int) -> None:
    model_in(tmp_path)
    begin = time.monotonic()
    case = {"strategy": "automatic", "batch": 1}
    found = on_ranks(tmp_path, [case, case | {"dies": rank}])
    assert time.monotonic() - begin < 120
    assert len(found[rank]) == 1
    assert len(found[1 - rank]) == 1 or "gone" in found[1 - rank][1]
