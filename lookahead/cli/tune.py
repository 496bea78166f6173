"""``lookahead tune``: what :func:`lookahead.tuning.tune` measures and recommends, told."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from rich.console import Console
from rich.table import Table

from lookahead import tuning
from lookahead.cli import common
from lookahead.cli.arguments import Tune
from lookahead.draft.latency import NODES
from lookahead.tuning import SIZES, Tuned, best

_BAR = 40  # columns of the plot


def tune(options: Tune) -> None:
    model, tokenizer = common.load_for(options)
    about = f"for about {options.seconds / 2:.3g} s"
    stages = {
        "passes": f"Measuring passes over 1 to {NODES[-1]} nodes, {about}",
        "drafts": f"Trying {len(SIZES)} sizes of drafts, {about}",
    }
    settings: dict[str, Any] = {name: getattr(options, name) for name in ("seconds", "new_tokens", "batch", "raw")}
    with common.progress() as progress:
        bar = cache(lambda stage: common.bar(progress, stages[stage]))
        settings["report"] = lambda stage, share: bar(stage)(share)
        found = tuning.tune(model, tokenizer, options.texts or None, **settings)
    if options.output is not None:
        found.curve.save(options.output)
    sizes, tried = ("nodes", "window_size", "ngram_size", "verification_set_size"), ("budgets", "published", "left_out")
    document = {
        "curve": found.curve.to_dict(),
        "applies_to": _applies_to(found),
        "plain_ms": found.plain_curve.ms(1, found.context),
        **{name: getattr(found, name) for name in ("context", *tried)},
        "recommended": {name: getattr(found, name) for name in sizes},
        "saved": [str(file) for file in (*found.saved, options.output) if file],
    }
    common.report(document, options.as_json, lambda console: _show(console, found))


def _applies_to(found: Tuned) -> dict[str, Any]:
    """The decodes that find the curves; of two executors the one of longer decodes comes first."""
    about = found.curve.about
    shown = {name: about[name] for name in ("model", "attention", "device", "threads", "batch")}
    weights = [f"{count:,} in {dtype.removeprefix('torch.')}" for dtype, count in about["parameters"].items()]
    executors = list(dict.fromkeys(curve.about["executor"] for curve in (found.curve, found.plain_curve)))
    return shown | {"weights": weights, "executors": executors, "threads": about["threads"] or None}


def _show(console: Console, found: Tuned) -> None:
    applies = _applies_to(found)
    console.print(common.facts(applies, "Decodes that use this curve"))
    ms = [found.curve.ms(nodes, found.context) for nodes in NODES]
    bars = ["█" * max(1, round(_BAR * cost / max(ms))) for cost in ms]
    rows = [(str(n), f"{t:.2f}", f"{t / ms[0]:.2f}", bar) for n, t, bar in zip(NODES, ms, bars, strict=True)]
    title = f"Latency at about {found.context} tokens of context"
    table = common.columns(("nodes", "ms", "times 1 node", ""), rows, title)
    table.columns[-1].justify = "left"
    console.print(table)
    how = {"traced": "traced, as in longer decodes", "cuda graphs": "replayed as CUDA graphs"}
    executor, _, packed = applies["executors"][0].partition(", ")
    if executor in how or packed:
        told = [how.get(executor, ""), f"run on {packed}" if packed else ""]
        console.print(f"These passes are {' and '.join(filter(None, told))}.")
    plain_ms = found.plain_curve.ms(1, found.context)
    plain = f"transformers {plain_ms:.2f} ms, which is what speedups are measured against."
    console.print(f"A pass over one node takes {plain}")
    console.print(_trials("budget", found.budgets, "Best-first trees on the prompts, greedy"))
    console.print(_trials("W/N/G", found.published, "Lookahead decoding as published"))
    if found.left_out:
        console.print(f"Time was up before {found.left_out} of {len(SIZES)} sizes were tried: --seconds gives more.")
    budget, sizes = best(found.budgets), best(found.published)
    if found.nodes:
        console.print(f"Budget: {found.nodes} drafted nodes a pass, expected {budget['speedup']:.2f}x.", style="bold")
    elif not any(row["drafted"] for row in found.budgets):
        console.print("Budget: unknown, as nothing was drafted in that time; --seconds gives more.")
    else:
        console.print("Budget: none; no draft pays on these prompts, so the automatic mode will not draft.")
    console.print(f"W, N, G as published: {_name(sizes)}, expected {sizes['speedup']:.2f}x.", style="bold")
    what = "S: tokens a pass writes. Speedups are S over the cost of a pass, without logits processors and prefill."
    console.print(f"{what} The automatic mode needs no numbers: it reads curves from {tuning.cache_folder()}.")


def _name(row: dict[str, Any]) -> str:
    return "/".join(str(size) for name, size in row.items() if name not in ("S", "drafted", "speedup"))


def _trials(what: str, trials: Sequence[dict[str, Any]], title: str) -> Table:
    rows = [(_name(row), f"{row['drafted']:.1f}", f"{row['S']:.2f}", f"{row['speedup']:.2f}x") for row in trials]
    return common.columns((what, "drafted", "S", "expected speedup"), rows, title)
