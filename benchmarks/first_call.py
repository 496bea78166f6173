"""The first call of a process: a fresh interpreter each for plain ``generate`` and for ours, in turn.

    python -m benchmarks.first_call --dtypes float32 --new-tokens 128 --out build/bench/first_call.json

Every interpreter loads the model and times one call. Speedups are ratios of medians, above 1 if ours is faster.
"""

import statistics
import tempfile
from typing import Annotated, Any

import typer

from benchmarks import options
from benchmarks.compare import METHODS, Side
from benchmarks.harness import ROOT, Run, in_turn, quiet_console, random_prompt, texts_of
from benchmarks.options import DTYPES, MODES, chosen

CASES = {"greedy": "greedy", "random tokens, temperature 1.5": "t1.5"}


def first_call(case: str, method: str, load: dict[str, Any], new_tokens: int) -> float:
    """Milliseconds of the first call of a fresh process."""
    with tempfile.TemporaryDirectory() as cache, Side(ROOT, cache) as side:
        vocab = side.ask(load)["vocab"]
        prompt = texts_of("code")[0] if case == "greedy" else random_prompt(0, vocab)
        arguments = {"max_new_tokens": new_tokens, **MODES[CASES[case]], **METHODS[method]}
        return float(side.ask({"prompt": prompt, "seed": 0, "arguments": arguments})["wall_ms"])


def main(
    method: Annotated[str, typer.Option(help=f"One of {', '.join(METHODS)}.")] = "auto",
    model_dir: options.ModelDir = None,
    dtypes: options.Dtypes = "float32",
    device: str = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 2,
    new_tokens: options.NewTokens = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Fresh processes for each method.")] = 7,
    out: options.Out = None,
) -> None:
    """Compare first calls."""
    quiet_console(threads)
    chosen(method, METHODS, "method")
    settings = {"model": model_dir, "device": device, "new_tokens": new_tokens, "method": method}
    run = Run("first call", out, **settings, results={})
    for dtype in chosen(dtypes, DTYPES, "dtype"):
        folder = str(model_dir.resolve()) if model_dir else None
        load = {"model": folder, "dtype": dtype, "device": device, "threads": threads}
        cases = run.document["results"][dtype] = {}
        for case in CASES:
            taken: dict[str, list[float]] = {"plain": [], method: []}
            for turn in range(repeats):
                for name in in_turn(taken, turn):
                    taken[name].append(first_call(case, name, load, new_tokens))
            plain, ours = statistics.median(taken["plain"]), statistics.median(taken[method])
            cases[case] = {"plain_ms": taken["plain"], "ours_ms": taken[method]}
            cases[case] |= {"plain_median_ms": plain, "ours_median_ms": ours, "speedup": plain / ours}
    run.finish()


if __name__ == "__main__":
    typer.run(main)
