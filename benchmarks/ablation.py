"""Tokens a pass over drafted nodes, for each source of drafts alone and for all together.

    python -m benchmarks.ablation --prompts 20 --modes greedy --out build/bench/ablation.json

Every text starts cold, except with ``all, remembering``, which keeps what it learnt from the texts before. Greedy
figures are also given for the texts that do not end in a loop.
"""

from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer

import lookahead
from benchmarks import options
from benchmarks.contenders import Settings, Texts, units
from benchmarks.harness import Run, load, loops, quiet_console, watched
from benchmarks.options import MODES, chosen, whole_numbers
from lookahead import DecodingStats, Lookahead
from lookahead.draft import memory

REMEMBERING = "all, remembering"
ALL = ("suffix", "recycling", "pool")


def _cold(*names: str) -> Callable[[int], Any]:
    return lambda nodes: Lookahead(nodes=nodes, sources=names or None, remember=False, seed=0)


SOURCES: dict[str, Callable[[int], Any]] = {
    **{name: _cold(name) for name in ALL},
    "all": _cold(*ALL),
    REMEMBERING: lambda nodes: Lookahead(nodes=nodes, sources=ALL, remember=True),  # a seed would switch memory off
    "default": _cold(),
}


def measure(model: Any, strategy: Any, texts: Texts, mode: Settings, new_tokens: int) -> dict[str, Settings]:
    """S, nodes and draft milliseconds a pass, over all texts, and of greedy ones over those that do not loop."""
    memory.exchange(model)
    per_text: list[DecodingStats] = []
    free: list[DecodingStats] = []
    given, warm = texts
    for unit in (warm[0], *given):
        torch.manual_seed(unit.index)
        settings = {"max_new_tokens": new_tokens, "lookahead_strategy": strategy, "return_dict_in_generate": True}
        output = model.generate(**unit.inputs, **mode, **settings)
        if unit is warm[0]:
            continue
        per_text.append(output.stats)
        if not loops(output.sequences[0, unit.inputs["input_ids"].shape[1] :].tolist()):
            free.append(output.stats)
    groups = {"all": per_text, "not looping": free if not mode["do_sample"] else []}
    found = {}
    for name, stats in groups.items():
        total = sum(stats, DecodingStats())
        drafts = max(1, total.steps - len(stats))
        figures = {"nodes_per_pass": total.drafted / drafts, "draft_ms": total.draft_ms / drafts}
        found[name] = {"texts": len(stats), "S": total.mean_acceptance_length, **figures}
    return {name: figures for name, figures in found.items() if figures["texts"]}


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
    wanted, sizes = chosen(modes, MODES, "mode"), whole_numbers(nodes)
    plan = [(mode, name, size) for mode in wanted for name in names for size in sizes]
    strategies = {(name, size): SOURCES[name](size) for _, name, size in plan}  # what cannot be made raises here
    settings = {"model": model_dir, "device": device, "dtype": dtype, "new_tokens": new_tokens}
    run = Run("ablation", out, **settings, prompts=prompts, rows=[])
    lookahead.augment_all()
    model, tokenizer = load(model_dir, dtype, device)
    given = units(model, tokenizer, "code", prompts, 1, new_tokens)
    for mode, name, size in watched(console, "sizes", plan):
        found = measure(model, strategies[name, size], given, MODES[mode], new_tokens)
        place = {"source": name, "nodes": size, "mode": mode}
        run.add("rows", [{**place, "group": group, **figures} for group, figures in found.items()])
    run.finish()


if __name__ == "__main__":
    typer.run(main)
