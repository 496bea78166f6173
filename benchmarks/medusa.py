"""Medusa's heads, and an EAGLE head, against lookahead and together: tokens a pass, wall clock, lossy acceptance.

    python -m benchmarks.medusa --heads lookahead/assets/tiny-coder-medusa --out build/bench/medusa.json

Three parts. *Nodes*: tokens a pass (S) of every draft with the same number of nodes. *Race*: wall clock against plain
``generate``, interleaved in one process. *Curve*: S over the temperature, by kind of acceptance. Texts start cold.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

import lookahead
from benchmarks import contest, options, theory
from benchmarks.contenders import Method, Settings, Texts, ours, units
from benchmarks.contest import acceptance, decode
from benchmarks.harness import Run, load, loops, quiet_console, watched
from benchmarks.options import MODES, chosen
from benchmarks.tables import show
from lookahead import Lookahead, Medusa
from lookahead.eagle import Eagle
from lookahead.medusa import output_sizes

COMBINED = ("heads", "recycling", "suffix")
PARTS = ("nodes", "race", "curve")
ACCEPTANCES = ("exact", "typical", "nucleus")


def drafts(heads: Path, nodes: int, eagle: Path | None = None) -> dict[str, Any]:
    """Every kind of draft with a given number of nodes; the fixed tree has as many as were saved with the heads."""
    cold: dict[str, Any] = {"nodes": nodes, "remember": False, "seed": 0}
    return ({"eagle and free sources": Eagle(eagle, **cold)} if eagle else {}) | {
        "free sources": Lookahead(**cold),
        "medusa, fixed tree": Medusa(heads),
        "medusa, budgeted tree": Medusa(heads, sources=("heads",), **cold),
        "combined": Medusa(heads, sources=COMBINED, **cold),
    }


def contenders(heads: Path, nodes: int) -> dict[str, Method]:
    """The methods of the race, the baseline first."""
    return {
        "plain": Method("generate", "plain"),
        "medusa": ours("medusa, fixed tree", Medusa(heads)),
        "auto": ours("lookahead", Lookahead(remember=False)),
        "combined": ours("medusa and lookahead", Medusa(heads, sources=COMBINED, remember=False)),
    }


def measure(model: Any, strategy: Any, texts: Texts, mode: Settings, new_tokens: int) -> dict[str, Settings]:
    """S, nodes and draft milliseconds a pass, over all texts, and of greedy ones over those that do not loop."""
    given, warm = texts
    found = decode(model, strategy, given, mode, new_tokens, warm[:1])
    free = [stats for stats, tokens in found if not (mode["do_sample"] or loops(tokens))]
    groups = {"all": [stats for stats, _ in found], "not looping": free}
    return {name: acceptance(per_text) for name, per_text in groups.items() if per_text}


def main(
    heads: Annotated[Path, typer.Option(help="Folder of the heads, with their tree.json.")],
    eagle: Annotated[Path | None, typer.Option(help="Folder of an EAGLE head, for the nodes.")] = None,
    model_dir: options.ModelDir = None,
    prompts: options.Prompts = 20,
    modes: options.Modes = "greedy,t0.8",
    parts: Annotated[str, typer.Option(help=f"Comma-separated, or all: {', '.join(PARTS)}.")] = "all",
    nodes: Annotated[int, typer.Option(help="Drafted nodes of a pass, where they are given.")] = 64,
    temperatures: Annotated[str, typer.Option(help="Comma-separated, for the curve.")] = "0.1,0.3,0.5,0.7,1.0,1.3,1.6",
    new_tokens: options.NewTokens = 128,
    rounds: options.Rounds = 2,
    dtype: options.Dtype = "float32",
    threads: options.Threads = None,
    device: str = "cpu",
    out: options.Out = None,
) -> None:
    """Measure Medusa beside lookahead."""
    console = quiet_console(threads)
    wanted_parts, wanted_modes = chosen(parts, PARTS, "part"), chosen(modes, MODES, "mode")
    strategies, table = drafts(heads, nodes, eagle), contenders(heads, nodes)  # what cannot be made raises here
    asked = {"model": model_dir, "heads": heads, "device": device, "dtype": dtype, "prompts": prompts}
    asked |= {"new_tokens": new_tokens, "nodes": nodes, "rounds": rounds}
    run = Run("medusa", out, **asked, theory={}, drafts=[], rows=[], curve=[], skipped=[])
    lookahead.augment_all()
    model, tokenizer = load(model_dir, dtype, device)
    run.document["tree_nodes"] = len(strategies["medusa, fixed tree"].tree(output_sizes(model)[1]).paths)
    texts = units(model, tokenizer, "code", prompts, 1, new_tokens)
    for mode in wanted_modes if "nodes" in wanted_parts else ():
        for name, strategy in watched(console, f"nodes, {mode}", list(strategies.items())):
            found = measure(model, strategy, texts, MODES[mode], new_tokens)
            run.add("drafts", [{"mode": mode, "draft": name, "group": key, **row} for key, row in found.items()])
    show(console, "tokens a pass", "prompts, mode, draft, S, nodes a pass, draft ms", run.document["drafts"])
    if "race" in wanted_parts:
        card = run.document["theory"][dtype] = theory.card(model, [1], 256)
        for mode in wanted_modes:
            place = {"set": "code", "mode": mode, "dtype": dtype, "batch": 1, "new_tokens": new_tokens}
            run.add("rows", contest.race(console, model, table, texts, place, rounds, card))
    degrees = [float(part) for part in temperatures.split(",")] if "curve" in wanted_parts else []
    for degree, name in watched(console, "curve", [(degree, name) for degree in degrees for name in ACCEPTANCES]):
        settings = {"do_sample": True, "temperature": degree, "top_k": 0}
        found = measure(model, Medusa(heads, acceptance=name), texts, settings, new_tokens)
        run.add("curve", [{"temperature": degree, "acceptance": name, "S": found["all"]["S"]}])
    show(console, "tokens a pass, by acceptance", "temperature, acceptance, S", run.document["curve"])
    run.finish()


if __name__ == "__main__":
    typer.run(main)
