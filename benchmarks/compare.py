"""This checkout against another one of the library: the same calls in two processes, in turn.

    python -m benchmarks.compare --other ../before --out build/bench/compare.json

Each process holds the model and imports one checkout. Every prompt goes to both with the same seed, the first to answer
alternating; each round loads the model anew and decodes warm-up prompts. A ratio is the median over prompts of (the
other's time / this one's), above 1 if this checkout is faster, with its 95% bootstrap interval. "CPU" is the process's
own time, which others disturb less than the clock's; "a pass" divides it by forward passes, because plans of the
automatic mode follow the clock. ``plain`` is the control: what both run unchanged.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import options
from benchmarks.harness import ROOT, Run, bootstrap, commit_of, in_turn, quiet_console, texts_of, typical, watched
from benchmarks.options import MODES, chosen
from benchmarks.tables import show

Row = dict[str, Any]
Answers = dict[str, list[list[Row]]]  # by side, a list of calls, each a list of rounds
METHODS: dict[str, Row] = {
    "plain": {},
    "auto": {"use_lookahead": True},
    "w7": {"lookahead_strategy": {"window_size": 7, "ngram_size": 5, "verification_set_size": 7, "seed": 0}},
    "nodes16": {"lookahead_strategy": {"nodes": 16, "remember": False, "seed": 0}},  # as many passes in both
}
COLUMNS = "model, method, mode, CPU, CPU 95%, wall, wall 95%, CPU a pass, S of this, S of the other, texts that differ"


class Side:
    """A process that imports one checkout."""

    def __init__(self, checkout: Path, cache: str, worker: str = "compare_worker.py") -> None:
        self._checkout = checkout.resolve()
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name(worker))],  # -P: not this folder's modules
            env={**os.environ, "PYTHONPATH": str(self._checkout), "LOOKAHEAD_CACHE": cache},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, request: Row) -> Row:
        """Send a request and wait for its answer."""
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"The process of {self._checkout} ended with code {self._process.wait()}: see its error."
            )
        answer: Row = json.loads(line)
        if not Path(answer.get("package", self._checkout)).is_relative_to(self._checkout):
            package = answer["package"]
            raise RuntimeError(f"The process of {self._checkout} imports {package}: expected that checkout's package.")
        return answer

    def __enter__(self) -> "Side":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()  # which ends the process
        self._process.__exit__(None, None, None)


def alternate(sides: dict[str, Side], load: Row, warm: list[Row], calls: list[Row], rounds: int) -> Answers:
    """Ask both sides every call, in turn."""
    found: Answers = {name: [[] for _ in calls] for name in sides}
    for turn in range(rounds):
        for request in (load, *warm):
            for side in sides.values():
                side.ask(request)
        for number, call in enumerate(calls):
            for name in in_turn(sides, number + turn):
                found[name][number].append(sides[name].ask(call))
    return found


def figures(found: Answers) -> Row:
    """Ratios of the other's times to this checkout's, S of both, and how many texts differ."""
    result: Row = {"texts": len(found["this"])}
    for name, key, single in (("cpu", "cpu_ms", False), ("wall", "wall_ms", False), ("pass", "cpu_ms", True)):
        times = {
            side: [typical([a[key] / (a["passes"] if single else 1) for a in rounds]) for rounds in calls]
            for side, calls in found.items()
        }
        ratios = [other / this for other, this in zip(times["other"], times["this"], strict=True)]
        result |= {f"{name}_ratio": statistics.median(ratios), f"{name}_interval": list(bootstrap(ratios))}
        result |= {f"{side}_{name}_ms": statistics.median(taken) for side, taken in times.items()}
    for side, calls in found.items():
        answers = [answer for rounds in calls for answer in rounds]
        result[f"{side}_S"] = sum(len(a["tokens"]) for a in answers) / sum(a["passes"] for a in answers)
    texts = ([[a["tokens"] for a in rounds] for rounds in found[side]] for side in ("this", "other"))
    return result | {"texts_that_differ": sum(ours != theirs for ours, theirs in zip(*texts, strict=True))}


def main(
    other: Annotated[Path, typer.Option(help="The other checkout's folder.", exists=True, file_okay=False)],
    model: Annotated[list[str] | None, typer.Option(help="A model folder; may be repeated; default: bundled.")] = None,
    methods: Annotated[str, typer.Option(help=f"Comma-separated, or all: {', '.join(METHODS)}.")] = "auto",
    modes: options.Modes = "greedy,t0.8",
    source: Annotated[str, typer.Option("--set", help="A file of prompts/ without its suffix.")] = "code",
    prompts: options.Prompts = 20,
    warm: Annotated[int, typer.Option(min=1, help="More prompts, from the set's end, to warm up with.")] = 4,
    new_tokens: options.NewTokens = 128,
    rounds: options.Rounds = 1,
    dtype: options.Dtype = "float32",
    device: str = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of each process.")] = 1,
    out: options.Out = None,
) -> None:
    """Compare the two checkouts."""
    console = quiet_console(None)
    texts = texts_of(source)
    numbered = [*enumerate(texts[-warm:], 1_000_000), *enumerate(texts[: min(prompts, len(texts) - warm)])]
    wanted_methods, wanted_modes = chosen(methods, METHODS, "method"), chosen(modes, MODES, "mode")
    plan = [(name, method, mode) for name in model or ["bundled"] for method in wanted_methods for mode in wanted_modes]
    settings = {"device": device, "dtype": dtype, "threads": threads}
    commits = {"this": commit_of(ROOT), "other": commit_of(other)}
    run = Run("compare", out, **settings, set=source, new_tokens=new_tokens, rounds=rounds, commits=commits, rows=[])
    with (
        tempfile.TemporaryDirectory() as caches,
        Side(ROOT, f"{caches}/this") as this,
        Side(other, f"{caches}/other") as that,
    ):
        for name, method, mode in watched(console, "contests", plan):
            arguments = {**MODES[mode], **METHODS[method], "max_new_tokens": new_tokens}
            calls = [{"prompt": text, "seed": seed, "arguments": arguments} for seed, text in numbered]
            load = {"model": None if name == "bundled" else str(Path(name).resolve()), **settings}
            found = alternate({"this": this, "other": that}, load, calls[:warm], calls[warm:], rounds)
            run.add("rows", [{"model": name, "method": method, "mode": mode, **figures(found)}])
    show(console, "this checkout against the other", COLUMNS, run.document["rows"])
    run.finish()


if __name__ == "__main__":
    typer.run(main)
