"""``lookahead tune``: measure what a pass costs here, save it, and say what that recommends."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel
from typer import Option

from lookahead import tuning
from lookahead.cli import common
from lookahead.cli.options import JsonOption, ModelOptions, NewTokensOption
from lookahead.cli.prompts import PROMPTS, PromptsOption, read_prompts
from lookahead.draft.latency import NODES, StepTimes
from lookahead.stats import DecodingStats
from lookahead.strategies.lookahead import Lookahead

_BUDGETS = [{"nodes": nodes} for nodes in (4, 8, 16, 24, 32, 48, 64, 96, 128)]  # drafted nodes
_LADE = [
    {"window_size": w, "ngram_size": n, "verification_set_size": g}
    for w, n, g in ((1, 4, 2), (1, 5, 5), (1, 5, 10), (4, 4, 4), (3, 5, 5), (7, 5, 7), (10, 5, 10), (15, 5, 15))
]
_PROMPTS = 8  # at most
_BAR = 40  # columns of the plot


@dataclass(frozen=True, kw_only=True)
class Options(ModelOptions):
    prompts: PromptsOption = None
    new_tokens: NewTokensOption = 96
    batch: Annotated[int, Option(min=1, help="Sequences in a pass.")] = 1
    seconds: Annotated[float, Option(min=0.1, help="How long to measure passes.")] = 8.0
    output: Annotated[Path | None, Option("--output", "-o", help="Also save the curve here.")] = None
    as_json: JsonOption = False


def tune(options: Options) -> None:
    """Measure the latency curve of a model on this machine, save it, and recommend a budget and W, N, G."""
    texts = read_prompts(options.prompts) if options.prompts else PROMPTS
    model, tokenizer = options.load()
    inputs = [common.encode(tokenizer, text, model) for text in texts[:_PROMPTS]]
    context = max(given["input_ids"].shape[1] for given in inputs) + options.new_tokens // 2
    with common.progress() as progress:
        report = common.bar(progress, "Measuring passes")
        times, own = tuning.sweep_all(model, context, batch=options.batch, seconds=options.seconds, report=report)
        trials = []
        for sizes in progress.track(_BUDGETS + _LADE, description="Trying drafts"):
            length, drafted = _acceptance(model, inputs, options.new_tokens, sizes)
            speedup = length / (times.ms(round(drafted) + 1, context) / own.ms(1, context))
            trials.append(sizes | {"S": length, "drafted": drafted, "speedup": speedup})
    budgets, published = trials[: len(_BUDGETS)], trials[len(_BUDGETS) :]
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
    model: PreTrainedModel, inputs: list[dict[str, Tensor]], new_tokens: int, sizes: dict[str, Any]
) -> tuple[float, float]:
    """S, and the mean number of drafted nodes a pass."""
    stats = DecodingStats()
    for given in inputs:
        run = common.decode(model, given, Lookahead(seed=0, **sizes), do_sample=False, max_new_tokens=new_tokens)
        stats += run.stats or DecodingStats()
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
    best, sizes = _best(found["budgets"]), _best(found["published"])
    if best["speedup"] > 1:
        console.print(f"Budget: {best['nodes']} drafted nodes a pass, expected {best['speedup']:.2f}x.", style="bold")
    else:
        console.print("Budget: none; no draft pays on these prompts, so the automatic mode will not draft.")
    console.print(f"W, N, G as published: {_name(sizes)}, expected {sizes['speedup']:.2f}x.", style="bold")
    what = "Speedups are S over the cost of a pass, without logits processors and prefill."
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
    table = common.columns(("nodes", "ms", "t(T)/t(1)", ""), rows, f"Latency at about {context} tokens of context")
    table.columns[-1].justify = "left"
    return table
