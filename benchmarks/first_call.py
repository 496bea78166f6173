"""The first call of a process: a fresh interpreter each for plain ``generate`` and for ours, in turn.

    python -m benchmarks.race --first-call --out benchmarks/results/first_call.json

This file is what such an interpreter runs: it loads the model, times the very first call, and prints milliseconds.
"""

import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import lookahead
from benchmarks.racing import MODES, PROMPTS, load, methods, random_prompt, texts_of, wait

CASES = {"greedy": "greedy", "random tokens, temperature 1.5": "t1.5"}


def compare(
    ours: str, model_dir: Path | None, dtype: str, device: str, threads: int | None, new_tokens: int, repeats: int
) -> dict[str, Any]:
    """Time first calls in processes of their own, and take the ratio of medians (above 1: ours is faster)."""
    methods([ours], device)  # so that a strategy that cannot be made raises here
    cases: dict[str, Any] = {}
    for case in CASES:
        taken: dict[str, list[float]] = {"plain": [], ours: []}
        for turn in range(repeats):
            for name in list(taken) if turn % 2 == 0 else list(taken)[::-1]:
                command = [
                    sys.executable,
                    "-m",
                    "benchmarks.first_call",
                    name,
                    case,
                    "--dtype",
                    dtype,
                    "--device",
                    device,
                ]
                command += ["--new-tokens", str(new_tokens)]
                command += ["--model", str(model_dir)] if model_dir else []
                command += ["--threads", str(threads)] if threads else []
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise RuntimeError(f"A first call of {name} failed:\n{done.stderr[-2000:]}")
                taken[name].append(float(done.stdout.split()[-1]))
        medians = {name: statistics.median(times) for name, times in taken.items()}
        cases[case] = {
            "plain_ms": taken["plain"],
            "ours_ms": taken[ours],
            "plain_median_ms": medians["plain"],
            "ours_median_ms": medians[ours],
            "speedup": medians["plain"] / medians[ours],
        }
    return cases


def main(
    name: Annotated[str, typer.Argument(help="A method of race.py.")],
    case: Annotated[str, typer.Argument(help=f"One of: {'; '.join(CASES)}.")],
    model_dir: Annotated[Path | None, typer.Option("--model")] = None,
    dtype: str = "float32",
    device: str = "cpu",
    threads: int | None = None,
    new_tokens: int = 64,
) -> None:
    """Load the model and time the first call."""
    if threads:
        torch.set_num_threads(threads)
    table, _ = methods([name], device)
    model, tokenizer = load(model_dir, dtype, device)
    if name != "plain":
        lookahead.augment_all()
    if case == "greedy":
        row = tokenizer(texts_of(PROMPTS / "code.jsonl")[0])["input_ids"]
    else:
        row = random_prompt(0, model.get_input_embeddings().weight.shape[0])
    ids = torch.tensor([row], device=device)
    torch.manual_seed(0)
    wait(device)
    start = time.perf_counter()
    model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        **MODES[CASES[case]],
        **table[name].settings,
    )
    wait(device)
    print(1e3 * (time.perf_counter() - start))


if __name__ == "__main__":
    typer.run(main)
