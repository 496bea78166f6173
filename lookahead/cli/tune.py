"""``lookahead tune``: measure what a pass costs here, save it, and say what that recommends."""

from time import perf_counter
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from lookahead import tuning
from lookahead.cli import common
from lookahead.cli.arguments import Tune
from lookahead.draft.latency import NODES, StepTimes
from lookahead.stats import DecodingStats
from lookahead.strategies.lookahead import Lookahead

_BUDGETS = [{"nodes": nodes} for nodes in (4, 8, 16, 24, 32, 48, 64, 96, 128)]  # drafted nodes
_LADE = [
    {"window_size": w, "ngram_size": n, "verification_set_size": g}
    for w, n, g in ((1, 4, 2), (1, 5, 5), (1, 5, 10), (4, 4, 4), (3, 5, 5), (7, 5, 7), (10, 5, 10), (15, 5, 15))
]
_TRIED = _BUDGETS + _LADE
_PROMPTS = 8  # at most
_LEAST_S = 0.1  # of a size
_BAR = 40  # columns of the plot


def tune(options: Tune) -> None:
    model, tokenizer = common.load_for(options)
    texts = options.texts or common.built_in(tokenizer, options.raw)
    inputs = [common.encode(tokenizer, text, model, options.raw) for text in texts[:_PROMPTS]]
    context = max(given["input_ids"].shape[1] for given in inputs) + options.new_tokens // 2
    begin, half = perf_counter(), options.seconds / 2
    with common.progress() as progress:
        report = common.bar(progress, f"Measuring passes over 1 to {NODES[-1]} nodes, for about {half:.3g} s")
        times, own = tuning.sweep_all(model, context, batch=options.batch, seconds=half, report=report)
        found: dict[int, dict[str, Any]] = {}
        # The two lists take turns, so that some of both are tried where time is short.
        order = sorted(range(len(_TRIED)), key=lambda at: at if at < len(_BUDGETS) else at - len(_BUDGETS) + 0.5)
        for at in progress.track(order, description=f"Trying {len(_TRIED)} sizes of drafts, for about {half:.3g} s"):
            left = options.seconds - (perf_counter() - begin)
            if left > 0.0 or len(found) < 2:
                each_s = max(_LEAST_S, left / (len(order) - len(found)))
                length, drafted = _acceptance(model, inputs, options.new_tokens, _TRIED[at], each_s)
                speedup = length / (times.ms(round(drafted) + 1, context) / own.ms(1, context))
                found[at] = _TRIED[at] | {"S": length, "drafted": drafted, "speedup": speedup}
    budgets, published = (
        [found[at] for at in sorted(found) if (at < len(_BUDGETS)) == first] for first in (True, False)
    )
    files = [file for file in dict.fromkeys(tuning.cache_file(curve.about) for curve in (own, times)) if file.is_file()]
    if options.output is not None:
        times.save(options.output)
        files.append(options.output)
    best, sizes = _best(budgets), _best(published)
    nodes = best["nodes"] if best["speedup"] > 1 else 0
    document = {
        "curve": times.to_dict(),
        "applies_to": _applies_to(times, own),
        "plain_ms": own.ms(1, context),
        "context": context,
        "budgets": budgets,
        "published": published,
        "left_out": len(_TRIED) - len(found),
        "recommended": {"nodes": nodes} | {name: sizes[name] for name in _LADE[0]},
        "saved": [str(file) for file in files],
    }
    common.report(document, options.as_json, lambda console: _show(console, document, times))


def _applies_to(times: StepTimes, own: StepTimes) -> dict[str, Any]:
    """The decodes that find the curves; of two executors the one of longer decodes comes first."""
    about = times.about
    shown = {name: about[name] for name in ("model", "attention", "device", "threads", "batch")}
    weights = [f"{count:,} in {dtype.removeprefix('torch.')}" for dtype, count in about["parameters"].items()]
    executors = list(dict.fromkeys(curve.about["executor"] for curve in (times, own)))
    return shown | {"weights": weights, "executors": executors, "threads": about["threads"] or None}


def _acceptance(
    model: PreTrainedModel,
    inputs: list[dict[str, Tensor]],
    new_tokens: int,
    sizes: dict[str, Any],
    seconds: float,
) -> tuple[float, float]:
    """S, and the mean number of drafted nodes a pass, on as many prompts, and as much of the last, as time allows."""
    stats, left, settings = DecodingStats(), seconds, {"do_sample": False, "max_new_tokens": new_tokens}
    for given in inputs:
        run = common.decode(model, given, Lookahead(seed=0, **sizes), max_time=left, **settings)
        stats += run.stats or DecodingStats()
        left -= run.seconds
        if left <= 0.0:
            break
    return stats.mean_acceptance_length, stats.drafted / max(1, stats.row_steps)


def _best(trials: list[dict[str, Any]]) -> dict[str, Any]:
    return max(trials, key=lambda trial: trial["speedup"])


def _show(console: Console, found: dict[str, Any], times: StepTimes) -> None:
    applies = found["applies_to"]
    console.print(common.facts(applies, "Decodes that use this curve"))
    console.print(_curve_table(times, found["context"]))
    how = {"traced": "traced, as in longer decodes", "cuda graphs": "replayed as CUDA graphs"}
    executor, _, packed = applies["executors"][0].partition(", ")
    if executor in how or packed:
        told = [how.get(executor, ""), f"run on {packed}" if packed else ""]
        console.print(f"These passes are {' and '.join(filter(None, told))}.")
    plain = f"transformers {found['plain_ms']:.2f} ms, which is what speedups are measured against."
    console.print(f"A pass over one node takes {plain}")
    console.print(_trials("budget", found["budgets"], "Best-first trees on the prompts, greedy"))
    console.print(_trials("W/N/G", found["published"], "Lookahead decoding as published"))
    if left_out := found["left_out"]:
        console.print(f"Time was up before {left_out} of {len(_TRIED)} sizes were tried: --seconds gives more.")
    best, sizes = _best(found["budgets"]), _best(found["published"])
    if best["speedup"] > 1:
        console.print(f"Budget: {best['nodes']} drafted nodes a pass, expected {best['speedup']:.2f}x.", style="bold")
    elif not any(trial["drafted"] for trial in found["budgets"]):
        console.print("Budget: unknown, as nothing was drafted in that time; --seconds gives more.")
    else:
        console.print("Budget: none; no draft pays on these prompts, so the automatic mode will not draft.")
    console.print(f"W, N, G as published: {_name(sizes)}, expected {sizes['speedup']:.2f}x.", style="bold")
    what = "S: tokens a pass writes. Speedups are S over the cost of a pass, without logits processors and prefill."
    console.print(f"{what} The automatic mode needs no numbers: it reads curves from {tuning.cache_folder()}.")


def _name(trial: dict[str, Any]) -> str:
    return "/".join(str(size) for name, size in trial.items() if name not in ("S", "drafted", "speedup"))


def _trials(what: str, trials: list[dict[str, Any]], title: str) -> Table:
    rows = [(_name(row), f"{row['drafted']:.1f}", f"{row['S']:.2f}", f"{row['speedup']:.2f}x") for row in trials]
    return common.columns((what, "drafted", "S", "expected speedup"), rows, title)


def _curve_table(times: StepTimes, context: int) -> Table:
    ms = [times.ms(nodes, context) for nodes in NODES]
    bars = ["█" * max(1, round(_BAR * cost / max(ms))) for cost in ms]
    rows = [(str(n), f"{t:.2f}", f"{t / ms[0]:.2f}", bar) for n, t, bar in zip(NODES, ms, bars, strict=True)]
    table = common.columns(("nodes", "ms", "times 1 node", ""), rows, f"Latency at about {context} tokens of context")
    table.columns[-1].justify = "left"
    return table
