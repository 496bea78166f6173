"""Medusa's heads against lookahead and both together: tokens a pass, wall clock, and what lossy acceptance adds.

    python -m benchmarks.medusa --heads DIR --out benchmarks/results/medusa.json

Three parts. *Tokens a pass* (S) of every kind of draft with the same number of nodes. The *race*: wall clock against
plain ``generate``, interleaved in one process as in race.py. The *curve*: S over the temperature, with exact, typical
and nucleus acceptance. Every text starts cold: nothing is remembered from the texts before. The last line on stdout is
one JSON document.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import lookahead
from benchmarks import theory
from benchmarks.ablation import measure
from benchmarks.race import DTYPES, rows_of, show
from benchmarks.racing import MODES, SETS, Method, Unit, chosen, contest, load, quiet_console, save, units
from lookahead import Lookahead, Medusa
from lookahead.medusa import output_sizes

COMBINED = ("heads", "recycling", "suffix")
PARTS = ("nodes", "race", "curve")
ACCEPTANCES = ("exact", "typical", "nucleus")


def drafts(heads: Path, nodes: int) -> dict[str, Any]:
    """Every kind of draft with a given number of nodes; the fixed tree has as many as were saved with the heads."""
    cold: dict[str, Any] = {"nodes": nodes, "remember": False, "seed": 0}
    return {
        "window": Lookahead(sources=("window",), **cold),
        "free sources": Lookahead(**cold),
        "medusa, fixed tree": Medusa(heads),
        "medusa, budgeted tree": Medusa(heads, sources=("heads",), **cold),
        "combined": Medusa(heads, sources=COMBINED, **cold),
    }


def contenders(heads: Path, nodes: int) -> dict[str, Method]:
    """The methods of the race, the baseline first."""

    def ours(label: str, strategy: Any) -> Method:
        return Method(label, "ours", {"lookahead_strategy": strategy})

    return {
        "plain": Method("generate", "plain"),
        "medusa": ours("medusa, fixed tree", Medusa(heads)),
        "auto": ours("lookahead", Lookahead(remember=False)),
        "window": ours(f"window, {nodes} nodes", drafts(heads, nodes)["window"]),
        "combined": ours("medusa and lookahead", Medusa(heads, sources=COMBINED, remember=False)),
    }


def compared(
    model: Any,
    strategies: dict[str, Any],
    given: list[Unit],
    warm: Unit,
    mode: dict[str, Any],
    new_tokens: int,
    tick: Callable[[], None],
) -> list[dict[str, Any]]:
    """S, nodes and draft milliseconds a pass of each strategy, one row each for all texts and those without a loop."""
    rows = []
    for name, strategy in strategies.items():
        found = measure(model, strategy, given, warm, mode, new_tokens)
        rows += [{"draft": name, "group": group, **figures} for group, figures in found.items()]
        tick()
    return rows


def main(
    heads: Annotated[Path, typer.Option(help="Folder of the heads, with their tree.json.")],
    model_dir: Annotated[Path | None, typer.Option("--model", help="A model folder; default: the bundled one.")] = None,
    prompts: Annotated[int, typer.Option(help="Prompts.")] = 20,
    source: Annotated[str, typer.Option("--set", help=f"One of {', '.join(SETS)}.")] = "code",
    modes: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(MODES)}.")] = "greedy,t0.8",
    parts: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(PARTS)}.")] = "all",
    nodes: Annotated[int, typer.Option(help="Drafted nodes of a pass, where they are given.")] = 64,
    temperatures: Annotated[str, typer.Option(help="Comma-separated, for the curve.")] = "0.1,0.3,0.5,0.7,1.0,1.3,1.6",
    new_tokens: int = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Timed calls of every method on every prompt.")] = 2,
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = "float32",
    threads: Annotated[int | None, typer.Option(help="CPU threads; default: torch's choice.")] = None,
    device: str = "cpu",
    out: Annotated[Path | None, typer.Option(help="Also write the JSON here.")] = None,
) -> None:
    """Measure Medusa beside lookahead."""
    console = quiet_console(threads)
    wanted_parts, wanted_modes = chosen(parts, PARTS, "part"), chosen(modes, MODES, "mode")
    degrees = [float(part) for part in temperatures.split(",")]
    kind = SETS[chosen(source, SETS, "set")[0]]
    strategies, table = drafts(heads, nodes), contenders(heads, nodes)  # what cannot be made raises here
    lossy = {name: Medusa(heads, acceptance=name) for name in ACCEPTANCES}
    lookahead.augment_all()
    model, tokenizer = load(model_dir, dtype, device)
    given, warm = units(model, tokenizer, kind.source, prompts, 1, new_tokens)
    document: dict[str, Any] = {
        "benchmark": "medusa",
        "model": str(model_dir or "bundled"),
        "heads": str(heads),
        "tree_nodes": len(strategies["medusa, fixed tree"].tree(output_sizes(model)[1]).paths),
        "device": device,
        "dtype": dtype,
        "set": source,
        "prompts": len(given),
        "new_tokens": new_tokens,
        "nodes": nodes,
        "rounds": rounds,
        "theory": {},
        "drafts": [],
        "rows": [],
        "curve": [],
        "skipped": [],
    }
    with Progress(console=console, transient=True) as progress:
        tick = partial(progress.advance, progress.add_task("drafts", total=len(strategies) * len(wanted_modes)))
        for mode in wanted_modes if "nodes" in wanted_parts else ():
            found = compared(model, strategies, given, warm[0], MODES[mode], new_tokens, tick)
            document["drafts"] += [{"mode": mode, **row} for row in found]
            save(document, out)
    for mode in wanted_modes if "race" in wanted_parts else ():
        document["theory"][dtype] = document["theory"].get(dtype) or theory.card(model, [1], 256)
        place = {"set": source, "mode": mode, "dtype": dtype, "batch": 1, "new_tokens": new_tokens}
        with Progress(console=console, transient=True) as progress:
            tick = partial(progress.advance, progress.add_task(f"race, {mode}", total=len(given) * (rounds + 1)))
            results = contest(model, table, given, warm, MODES[mode], new_tokens, rounds, tick)
        rows = rows_of(results, table, mode, new_tokens, 1, document["theory"][dtype])
        document["rows"] += [{**place, "rounds": rounds, **found} for found in rows]
        save(document, out)
        show(console, f"{source}, {mode}, {dtype}, {new_tokens} tokens", rows)
    if "curve" in wanted_parts:
        with Progress(console=console, transient=True) as progress:
            tick = partial(progress.advance, progress.add_task("curve", total=len(lossy) * len(degrees)))
            for degree in degrees:
                mode = {"do_sample": True, "temperature": degree, "top_k": 0}
                found = compared(model, lossy, given, warm[0], mode, new_tokens, tick)
                document["curve"] += [
                    {"temperature": degree, "acceptance": row["draft"], "S": row["S"]}
                    for row in found
                    if row["group"] == "all"
                ]
                save(document, out)
    _show_rest(console, document)
    print(save(document, out))


def _show_rest(console: Console, document: dict[str, Any]) -> None:
    """The tables of tokens a pass."""
    if document["drafts"]:
        table = Table("mode", "texts", "draft", "S", "nodes", "draft ms", title="tokens a pass")
        for row in document["drafts"]:
            figures = f"{row['S']:.2f}", f"{row['nodes_per_pass']:.1f}", f"{row['draft_ms']:.2f}"
            table.add_row(row["mode"], row["group"], row["draft"], *figures)
        console.print(table)
    if document["curve"]:
        table = Table("temperature", *ACCEPTANCES, title="tokens a pass, by acceptance")
        for degree in dict.fromkeys(row["temperature"] for row in document["curve"]):
            found = {row["acceptance"]: row["S"] for row in document["curve"] if row["temperature"] == degree}
            table.add_row(f"{degree:g}", *(f"{found[name]:.2f}" for name in ACCEPTANCES))
        console.print(table)


if __name__ == "__main__":
    typer.run(main)
