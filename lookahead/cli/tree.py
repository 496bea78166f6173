"""``lookahead tree``: measure how often Medusa's heads are right, and grow the tree that follows from it."""

from itertools import accumulate
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedModel

from lookahead import tuning
from lookahead.bundled import BUNDLED_HEADS
from lookahead.cli import common
from lookahead.cli.training_arguments import Tree
from lookahead.draft.latency import NODES
from lookahead.heads.medusa.accuracies import (
    CalibratedTree,
    HeadAccuracies,
    best_size,
    expected_lengths,
    grow_tree,
    node_values,
)
from lookahead.heads.medusa.calibration import calibrate, heads_ms
from lookahead.heads.medusa.heads import MedusaHeads
from lookahead.heads.medusa.strategy import Medusa
from lookahead.stats import DecodingStats, counted
from lookahead.tuning import Report

_HALVES = 8  # prompts; fewer are not split
_SHOWN = (1, 2, 5, 10)  # best candidates in the table of accuracies


def tree(options: Tree) -> None:
    folder = options.heads or str(BUNDLED_HEADS)
    model, tokenizer = common.load_for(options)
    texts = options.texts or common.built_in(tokenizer, options.raw)
    heads = MedusaHeads.from_pretrained(folder, model=model)
    inputs = [common.encode(tokenizer, text, model, options.raw) for text in texts]
    halves = len(inputs) >= _HALVES
    learnt, held = (inputs[::2], inputs[1::2]) if halves else (inputs, inputs)
    with common.progress() as progress:
        report = common.bar(progress, "Calibrating")
        prompts = [given["input_ids"][0] for given in learnt]
        sampling: dict[str, Any] = {"temperature": options.temperature, "seed": options.seed}
        table = calibrate(model, heads, prompts, options.new_tokens, options.ranks, **sampling, report=report)
        budget, size = None, options.nodes
        sizes: list[Any] = []
        if size is None:
            context = sum(given["input_ids"].shape[1] for given in inputs) // len(inputs) + options.new_tokens // 2
            report = common.bar(progress, "Measuring passes")
            budget, sizes = _budget(model, heads, table, context, options.seconds, report)
            size = int(budget["nodes"])
        grown = CalibratedTree(choices=grow_tree(table, size), accuracies=table, model=options.model_name, heads=folder)
        if options.output is not None:
            grown.save(options.output)
        stats = _decode(model, Medusa(heads, choices=grown), progress.track(held, description="Decoding"), options)
    shares = _reached(stats, len(held), grown.choices.depth)
    document = {
        "tree": grown.to_dict(),
        "widths": list(grown.choices.widths),
        "reached_expected": _expected(grown),
        "reached_measured": shares,
        "measured_length": sum(shares),
        "budget": budget,
        "prompts": {"calibrated": len(learnt), "measured": len(held), "held_out": halves},
        "stats": stats.to_dict(),
    }
    common.report(document, options.as_json, lambda console: _show(console, document, grown, size, sizes, options))


def _budget(
    model: PreTrainedModel, heads: MedusaHeads, table: HeadAccuracies, context: int, seconds: float, report: Report
) -> tuple[dict[str, Any], list[Any]]:
    """Choose the size by the saved latency curve, or by one measured now; and what other sizes would give, as rows."""
    own, origin = tuning.cached(model, static=False), "saved in"
    if own is not None:
        times = tuning.cached(model, traced=True) or own
    else:
        times, own = tuning.sweep_all(model, context, seconds=seconds, report=report)
        origin = "measured now and saved in"
    report(1.0)
    extra, plain_ms = heads_ms(model, heads, len(table.accuracies[0])), own.ms(1, context)
    passes = [ms + extra for ms in times.curve(context, NODES[-1])]
    lengths = [length + 1.0 for length in expected_lengths(table, NODES[-1] - 1)]
    per_ms = [length / ms for length, ms in zip(lengths, passes, strict=False)]
    best = best_size(table, passes)
    rows = [
        (str(nodes), f"{lengths[nodes]:.2f}", f"{passes[nodes]:.2f}", f"{per_ms[nodes] * plain_ms:.2f}x")
        for nodes in sorted({*(nodes for nodes in NODES if nodes < len(lengths)), best})
    ]
    chosen = {"nodes": best, "tokens_per_ms": per_ms[best], "speedup": per_ms[best] * plain_ms, "heads_ms": extra}
    return chosen | {"curve": f"{origin} {tuning.cache_file(times.about)}"}, rows


def _decode(model: PreTrainedModel, strategy: Medusa, inputs: Any, options: Tree) -> DecodingStats:
    settings = {"max_new_tokens": options.new_tokens} | common.sampling(options.temperature)
    torch.manual_seed(options.seed)
    runs = [common.decode(model, given, strategy, **settings).stats for given in inputs]
    return sum((stats for stats in runs if stats), DecodingStats())


def _expected(grown: CalibratedTree) -> list[float]:
    """The chance that a pass keeps 1, 2, ... drafted tokens or more."""
    shares = [0.0] * grown.choices.depth
    for path, value in zip(grown.paths, node_values(grown.accuracies, grown.choices), strict=True):
        shares[len(path) - 1] += value
    return shares


def _reached(stats: DecodingStats, prompts: int, depth: int) -> list[float]:
    """The share of passes that kept 1, 2, ... ``depth`` drafted tokens or more, the prompts' passes left out."""
    passes = max(1, stats.row_steps - prompts)
    counts = [stats.histogram.get(kept + 1, 0) for kept in range(1, depth + 1)]
    return [count / passes for count in accumulate(reversed(counts))][::-1]


def _show(
    console: Console, found: dict[str, Any], grown: CalibratedTree, size: int, sizes: list[Any], options: Tree
) -> None:
    prompts, temperature = found["prompts"], options.temperature
    texts = "greedy texts" if temperature is None else f"texts sampled at temperature {temperature:g}"
    _show_accuracies(console, grown.accuracies, f"Heads on {texts} of {counted(prompts['calibrated'], 'prompt')}")
    if found["budget"] is not None:
        _show_budget(console, found["budget"], sizes)
    if (count := len(grown.paths)) < size:
        console.print(f"{size} nodes were asked for: no more than {count} are worth anything on these texts.")
    shares = zip(found["widths"], found["reached_expected"], found["reached_measured"], strict=True)
    rows = [(str(depth), str(width), f"{a:.3f}", f"{b:.3f}") for depth, (width, a, b) in enumerate(shares, start=1)]
    headers = ("depth", "nodes", "reached, expected", "reached, measured")
    console.print(common.columns(headers, rows, f"The tree, nodes: {count}"))
    which = "the {} other prompts" if prompts["held_out"] else "the same {} prompts (too few to hold some out)"
    length = f"{grown.expected_length + 1:.2f} tokens a pass expected, {1 + found['measured_length']:.2f} measured"
    where = f"on {which.format(prompts['measured'])}; the model's own token included, prefill left out."
    console.print(f"Length: {length} {where}", style="bold")
    if options.output is not None:
        console.print(f"Saved in {options.output}.")


def _show_accuracies(console: Console, table: HeadAccuracies, title: str) -> None:
    shown = [count for count in _SHOWN if count <= len(table.accuracies[0])]
    tops = [table.top(count) for count in shown]
    rows = [
        (str(head), f"+{head + 2}", str(samples), *(f"{top[head]:.3f}" for top in tops))
        for head, samples in enumerate(table.samples)
    ]
    headers = ("head", "predicts", "samples", *(f"top-{count}" for count in shown))
    console.print(common.columns(headers, rows, title))


def _show_budget(console: Console, budget: dict[str, Any], rows: list[tuple[str, ...]]) -> None:
    headers = ("nodes", "tokens a pass", "ms", "against plain")
    console.print(common.columns(headers, rows, "Trees by the latency curve", bold=str(budget["nodes"])))
    what = f"Nodes: {budget['nodes']}, for which the latency curve promises the most tokens per millisecond, "
    worth = f"{budget['speedup']:.2f}x plain decoding. The heads take {budget['heads_ms']:.2f} ms of a pass."
    console.print(what + worth, style="bold")
    if budget["speedup"] < 1.0:
        loss = "No tree pays here: this one is the least loss, and plain decoding is faster."
        console.print(loss, style="bold yellow")
    console.print(f"The curve is {budget['curve']}.", soft_wrap=True)
