"""This checkout against another one of the library: the same calls in two processes, in turn.

    python -m benchmarks.compare --other ../before --out build/compare.json

Each process holds the model and imports one checkout. Every prompt goes to both with the same seed, the first to answer
alternating. A ratio is the median over prompts of (the other's time / this one's), above 1 if this checkout is faster,
with its 95% bootstrap interval; "CPU" is the process's own time, which other processes disturb less than the clock's,
and "a pass" is that by forward pass, which the automatic mode's changing plans disturb less. ``plain`` is the control:
what both run unchanged. Each round loads the model anew and decodes warm-up prompts. The last line on stdout is one
JSON document.
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
from rich.progress import track
from rich.table import Table

from benchmarks.racing import (
    MODES,
    PROMPTS,
    SETS,
    bootstrap,
    chosen,
    quiet_console,
    save,
    texts_of,
    typical,
)

ROOT = Path(__file__).parents[1]
WORKER = Path(__file__).with_name("compare_worker.py")
METHODS: dict[str, dict[str, Any]] = {
    "plain": {"use": None},
    "auto": {"use": True},
    "w7": {"window_size": 7, "ngram_size": 5, "verification_set_size": 7, "seed": 0},
    "nodes16": {"nodes": 16, "remember": False, "seed": 0},  # as many passes in both, unlike auto's
}


class Side:
    """A process that imports one checkout."""

    def __init__(self, checkout: Path, cache: str) -> None:
        self._checkout = checkout.resolve()
        self.commit = _git(checkout, "rev-parse", "--short", "HEAD") + (
            "+changes" if _git(checkout, "status", "--porcelain", "--untracked-files=no") else ""
        )
        environment = {**os.environ, "PYTHONPATH": str(self._checkout), "LOOKAHEAD_CACHE": cache}
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER)],  # -P: not this folder's modules
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and wait for its answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"The process of {self._checkout} ended with code {self._process.wait()}: see its error."
            )
        answer: dict[str, Any] = json.loads(line)
        package = answer.get("package")
        if package is not None and not Path(package).is_relative_to(self._checkout):
            raise RuntimeError(f"The process of {self._checkout} imports {package}: expected that checkout's package.")
        return answer

    def __enter__(self) -> "Side":
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # which ends the process
        self._process.__exit__(None, None, None)


def _git(checkout: Path, *command: str) -> str:
    done = subprocess.run(["git", "-C", str(checkout), *command], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def alternate(
    sides: dict[str, Side], load: dict[str, Any], warm: list[dict[str, Any]], calls: list[dict[str, Any]], rounds: int
) -> dict[str, list[list[dict[str, Any]]]]:
    """Every call's answers by side: a list of calls, each a list of rounds."""
    found: dict[str, list[list[dict[str, Any]]]] = {name: [[] for _ in calls] for name in sides}
    for turn in range(rounds):
        for side in sides.values():
            side.ask(load)
        for call in warm:
            for side in sides.values():
                side.ask(call)
        for number, call in enumerate(calls):
            for name in list(sides) if (number + turn) % 2 == 0 else list(sides)[::-1]:
                found[name][number].append(sides[name].ask(call))
    return found


def figures(found: dict[str, list[list[dict[str, Any]]]]) -> dict[str, Any]:
    """Ratios of the other's times to this checkout's, S of both, and how many texts differ."""

    def times(name: str, key: str) -> list[float]:
        return [typical([answer[key] for answer in answers]) for answers in found[name]]

    def each(name: str) -> list[float]:
        return [typical([answer["cpu_ms"] / answer["passes"] for answer in answers]) for answers in found[name]]

    result: dict[str, Any] = {"texts": len(found["this"])}
    for what, this, other in (
        ("cpu", times("this", "cpu_ms"), times("other", "cpu_ms")),
        ("wall", times("this", "wall_ms"), times("other", "wall_ms")),
        ("pass", each("this"), each("other")),
    ):
        ratios = [before / now for before, now in zip(other, this, strict=True)]
        result[f"{what}_ratio"] = statistics.median(ratios)
        result[f"{what}_interval"] = list(bootstrap(ratios))
    for name, answers in found.items():
        every = [answer for rounds in answers for answer in rounds]
        result[f"{name}_S"] = sum(len(answer["tokens"]) for answer in every) / sum(a["passes"] for a in every)
        result[f"{name}_cpu_ms"] = statistics.median(times(name, "cpu_ms"))
        result[f"{name}_fallback"] = sum(bool(answer.get("fallback")) for answer in every)
    pairs = zip(found["this"], found["other"], strict=True)
    result["texts_that_differ"] = sum(
        any(a["tokens"] != b["tokens"] for a, b in zip(ours, theirs, strict=True)) for ours, theirs in pairs
    )
    return result


def main(
    other: Annotated[Path, typer.Option(help="The other checkout's folder.", exists=True, file_okay=False)],
    model: Annotated[list[str] | None, typer.Option(help="A model folder; may be repeated; default: bundled.")] = None,
    methods: Annotated[str, typer.Option(help=f"Comma-separated, or all: {', '.join(METHODS)}.")] = "auto",
    modes: Annotated[str, typer.Option(help=f"Comma-separated, or all: {', '.join(MODES)}.")] = "greedy,t0.8",
    source: Annotated[str, typer.Option("--set", help="code, prose or no-loop.")] = "code",
    prompts: Annotated[int, typer.Option(min=1, help="How many of them.")] = 20,
    warm: Annotated[int, typer.Option(min=1, help="More prompts, from the set's end, to warm up with.")] = 4,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to write.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="How often each prompt is decoded.")] = 1,
    dtype: str = "float32",
    device: str = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of each process.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Also write the JSON here.")] = None,
) -> None:
    """Compare the two checkouts."""
    console = quiet_console(None)
    texts = texts_of(PROMPTS / f"{SETS[chosen(source, ('code', 'prose', 'no-loop'), 'set')[0]].source}.jsonl")
    given, last = texts[: min(prompts, len(texts) - warm)], texts[-warm:]
    plan = [
        (folder, method, mode)
        for folder in model or ["bundled"]
        for method in chosen(methods, METHODS, "method")
        for mode in chosen(modes, MODES, "mode")
    ]
    rows: list[dict[str, Any]] = []
    shown = Table("model", "method", "mode", "CPU", "95%", "wall", "95%", "CPU a pass", "S", "S, other", "differ")
    with (
        tempfile.TemporaryDirectory() as caches,
        Side(ROOT, f"{caches}/this") as this,
        Side(other, f"{caches}/other") as that,
    ):
        sides = {"this": this, "other": that}
        document = {"benchmark": "compare", "device": device, "dtype": dtype, "set": source, "new_tokens": new_tokens}
        document |= {"rounds": rounds, "commits": {name: side.commit for name, side in sides.items()}, "rows": rows}
        for folder, method, mode in track(plan, description="contests", transient=True, console=console):
            settings = dict(METHODS[method])
            arguments = {**MODES[mode], "max_new_tokens": new_tokens}
            if "use" in settings:
                arguments |= {"use_lookahead": True} if settings.pop("use") else {}
            common = {"arguments": arguments, "strategy": settings or None}
            calls = [{"prompt": text, "seed": index, **common} for index, text in enumerate(given)]
            before = [{"prompt": text, "seed": 1_000_000 + index, **common} for index, text in enumerate(last)]
            where = None if folder == "bundled" else str(Path(folder).resolve())
            load = {"load": where, "dtype": dtype, "device": device, "threads": threads}
            row = figures(alternate(sides, load, before, calls, rounds))
            rows.append({"model": folder, "method": method, "mode": mode, **row})
            save(document, out)
            shown.add_row(
                Path(folder).name,
                method,
                mode,
                f"{row['cpu_ratio']:.3f}",
                "{:.3f}-{:.3f}".format(*row["cpu_interval"]),
                f"{row['wall_ratio']:.3f}",
                "{:.3f}-{:.3f}".format(*row["wall_interval"]),
                f"{row['pass_ratio']:.3f}",
                f"{row['this_S']:.2f}",
                f"{row['other_S']:.2f}",
                f"{row['texts_that_differ']}/{row['texts']}",
            )
    console.print(shown)
    print(save(document, out))


if __name__ == "__main__":
    typer.run(main)
