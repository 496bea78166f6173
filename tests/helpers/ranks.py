"""Ranks over gloo: processes that run cases, and the same cases in one process without lookahead."""

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from helpers.models import SIZES, initialised
from transformers import LlamaConfig

RANK = Path(__file__).parents[1] / "parallel" / "rank.py"
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


def compare(folder: Path, cases: list[Case], size: int, before: Sequence[Case] = ()) -> list[list[Any]]:
    """Assert that every rank writes what one process writes, and return what each gives for the cases ``before``."""
    model = model_in(folder)
    found = on_ranks(folder, [*before, *cases], size)
    expected = [plainly(model, case) for case in cases]
    for rank, texts in enumerate(found):
        for case, text, plain in zip(cases, texts[len(before) :], expected, strict=True):
            assert text == plain, (rank, case)
    return [texts[: len(before)] for texts in found]


def random_cases(strategies: Sequence[str], count: int, seed: int) -> list[Case]:
    rng = random.Random(seed)
    return [
        {
            "strategy": rng.choice(strategies),
            "batch": rng.choice((1, 1, 2, 3)),
            "sample": rng.random() < 0.5,
            "seed": rng.randrange(100),
            "prompt": rng.randrange(100),
            "new": rng.randint(1, 50),
            "eos": rng.choice((None, 7)),
            "penalty": rng.random() < 0.3,
            "apart": True,
        }
        for _ in range(count)
    ]


def failing(strategy: str) -> list[Case]:
    """Calls in which ranks are given different prompts, and in which one of two ranks fails."""
    return [{"strategy": strategy, "batch": 1} | case for case in ({"differs": True}, {"fails": 0}, {"fails": 1})]


def told_of_failures(first: list[Any], second: list[Any]) -> None:
    """Assert that two ranks say what became of the ``failing`` cases."""
    assert "differ in prompts" in first[0] and "differ in prompts" in second[0]
    for rank, (own, other) in ((0, (first, second)), (1, (second, first))):
        assert "this rank's own trouble" in own[1 + rank]
        assert f"Rank {rank} of 2 has failed" in other[1 + rank]
