"""Tokens a pass over drafted nodes, for each source of drafts alone and for all together.

    python -m benchmarks.ablation --prompts 20 --modes greedy --out build/bench/ablation.json

Every text starts cold, except with ``all, remembering``, which keeps what it learnt from the texts before. Greedy
figures are also given for the texts that do not end in a loop. The last line on stdout is one JSON document.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import torch
import typer

import lookahead
from benchmarks import options
from benchmarks.contenders import Unit, units
from benchmarks.harness import Run, load, loops, progress, quiet_console
from benchmarks.options import MODES, chosen, whole_numbers
from lookahead import DecodingStats, Lookahead
from lookahead.draft import memory

REMEMBERING = "all, remembering"
ALL = ("suffix", "recycling", "pool", "window")


def _cold(*names: str) -> Callable[[int], Any]:
    return lambda nodes: Lookahead(nodes=nodes, sources=names or None, remember=False, seed=0)


SOURCES: dict[str, Callable[[int], Any]] = {
    **{name: _cold(name) for name in ALL},
    "all": _cold(*ALL),
    REMEMBERING: lambda nodes: Lookahead(nodes=nodes, sources=ALL, remember=True),  # a seed would switch memory off
    "default": _cold(),
}


def measure(
    model: Any, strategy: Any, given: Sequence[Unit], warm: Unit, mode: dict[str, Any], new_tokens: int
) -> dict[str, dict[str, Any]]:
    """S, nodes and draft milliseconds a pass, over all texts and over those without a loop at their end."""
    memory.forget(model)
    per_text: list[DecodingStats] = []
    free: list[DecodingStats] = []
    for unit in (warm, *given):
        torch.manual_seed(unit.index)
        settings = {"max_new_tokens": new_tokens, "lookahead_strategy": strategy, "return_dict_in_generate": True}
        output = model.generate(**unit.inputs, **mode, **settings)
        if unit is warm:
            continue
        per_text.append(output.stats)
        if not loops(output.sequences[0, unit.inputs["input_ids"].shape[1] :].tolist()):
            free.append(output.stats)
    return {name: _figures(texts) for name, texts in (("all", per_text), ("not looping", free)) if texts}


def _figures(texts: list[DecodingStats]) -> dict[str, Any]:
    total = sum(texts, DecodingStats())
    drafts = max(1, total.steps - len(texts))
    figures = {"S": total.mean_acceptance_length, "nodes_per_pass": total.drafted / drafts}
    return {"texts": len(texts), **figures, "draft_ms": total.draft_ms / drafts}


def main(
    model_dir: options.ModelDir = None,
    prompts: options.Prompts = 20,
    sources: Annotated[str, typer.Option(help=f"Semicolon-separated, or all: {'; '.join(SOURCES)}.")] = "all",
    nodes: Annotated[str, typer.Option(help="Comma-separated drafted nodes of a pass.")] = "4,8,16,24,32,48,64,96,128",
    modes: options.Modes = "greedy,t0.8",
    new_tokens: options.NewTokens = 128,
    dtype: options.Dtype = "float32",
    threads: options.Threads = None,
    device: str = "cpu",
    out: options.Out = None,
) -> None:
    """Measure every source at every size."""
    console = quiet_console(threads)
    names = list(SOURCES) if sources == "all" else [name.strip() for name in sources.split(";")]
    plan = [
        (mode, name, size) for mode in chosen(modes, MODES, "mode") for name in names for size in whole_numbers(nodes)
    ]
    strategies = {(name, size): SOURCES[name](size) for _, name, size in plan}  # what cannot be made raises here
    settings = {"model": str(model_dir or "bundled"), "device": device, "dtype": dtype, "new_tokens": new_tokens}
    run = Run("ablation", out, **settings, prompts=prompts, rows=[])
    lookahead.augment_all()
    model, tokenizer = load(model_dir, dtype, device)
    given, warm = units(model, tokenizer, "code", prompts, 1, new_tokens)
    with progress(console, "sizes", len(plan)) as tick:
        for mode, name, size in plan:
            found = measure(model, strategies[name, size], given, warm[0], MODES[mode], new_tokens)
            place = {"source": name, "nodes": size, "mode": mode}
            kept = {group: figures for group, figures in found.items() if mode == "greedy" or group == "all"}
            run.add("rows", [{**place, "group": group, **figures} for group, figures in kept.items()])
            tick()
    run.finish()


if __name__ == "__main__":
    typer.run(main)
