"""Tensor parallelism: two and four ranks over gloo write what one process writes, and never wait for nobody."""

import json
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import SIZES, initialised
from transformers import LlamaConfig

RANK = Path(__file__).with_name("rank.py")
STRATEGIES = ["automatic", "nodes", "suffix", "published", "jacobi", "seeded"]
Case = dict[str, Any]


def model_in(folder: Path) -> Any:
    model = initialised(LlamaConfig(**SIZES | {"num_key_value_heads": 4, "num_attention_heads": 4}))
    model.save_pretrained(folder / "model")
    return model


def on_ranks(folder: Path, cases: list[Case], size: int = 2, seconds: float = 240) -> list[list[Any]]:
    """What each rank gives for each case; a rank that was killed gives fewer."""
    (folder / "cases.json").write_text(json.dumps(cases))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(RANK), str(folder)],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        deadline = time.monotonic() + seconds
        errors = [process.communicate(timeout=max(1.0, deadline - time.monotonic()))[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    files = [folder / f"rank{rank}.json" for rank in range(size)]
    assert any(file.exists() for file in files), errors
    return [json.loads(file.read_text()) if file.exists() else [] for file in files]


def plainly(model: Any, case: Case) -> Any:
    """The same call in one process, without lookahead."""
    generator = torch.Generator().manual_seed(case.get("prompt", 0))
    ids = torch.randint(1, 48, (case["batch"], 14), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, case["batch"]):
        ids[row, : 3 * row], mask[row, : 3 * row] = 0, 0
    torch.manual_seed(case.get("seed", 0))
    settings = {"max_new_tokens": case.get("new", 40), "do_sample": case.get("sample", False), "pad_token_id": 0}
    settings |= {"repetition_penalty": 1.2} if case.get("penalty") else {}
    output = model.generate(ids, attention_mask=mask, eos_token_id=case.get("eos"), **settings)
    return output.tolist()


def compare(folder: Path, cases: list[Case], size: int) -> None:
    model = model_in(folder)
    found = on_ranks(folder, cases, size)
    expected = [plainly(model, case) for case in cases]
    for rank, texts in enumerate(found):
        for case, text, plain in zip(cases, texts, expected, strict=True):
            assert text == plain, (rank, case)


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
