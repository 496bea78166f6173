"""``lookahead tree``: measure how often Medusa's heads are right, and grow the tree that follows from it."""

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from jacobi import LookaheadError
from lookahead import tuning
from lookahead._files import on_hub
from lookahead.bundled import BUNDLED_HEADS
from lookahead.cli import common
from lookahead.cli.drawing import draw, drawing
from lookahead.cli.prompts import PROMPTS, PromptsOption, read_prompts
from lookahead.draft.latency import NODES
from lookahead.sources.medusa.accuracies import (
    CalibratedTree,
    HeadAccuracies,
    best_size,
    expected_lengths,
    grow_tree,
    node_values,
)
from lookahead.sources.medusa.choices import MAX_NODES
from lookahead.sources.medusa.heads import MedusaHeads
from lookahead.stats import DecodingStats
from lookahead.strategies.medusa import Medusa
from lookahead.training.calibration import calibrate, heads_ms

_HALVES = 8  # prompts; fewer are not split
_SHOWN = (1, 2, 5, 10)  # best candidates in the table of accuracies
_PICTURES = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class _Budget:
    """What the step-time curve says about trees of 1, 2, ... nodes.

    Attributes:
        nodes: the best size.
        lengths: expected lengths of trees of 0, 1, ... nodes.
        pass_ms: a pass over 1, 2, ... nodes with the heads.
        plain_ms: a pass over one node without them, as transformers runs it.
        heads_ms: what the heads take of each pass.
        origin: where the curve comes from.
    """

    nodes: int
    lengths: list[float]
    pass_ms: list[float]
    plain_ms: float
    heads_ms: float
    origin: str

    def tokens_per_ms(self, nodes: int) -> float:
        """Expected tokens for each millisecond with a tree of so many nodes."""
        return (self.lengths[nodes] + 1.0) / self.pass_ms[nodes]

    def speedup(self, nodes: int) -> float:
        """The same against plain decoding."""
        return self.tokens_per_ms(nodes) * self.plain_ms


def tree(
    heads: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Folder of the heads, in any published format. Default: the bundled model's."),
    ] = None,
    model: common.ModelOption = None,
    prompts: PromptsOption = None,
    nodes: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_NODES, help="Nodes of the tree. Default: what the step-time curve makes best."),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Save the tree here, as JSON.")] = None,
    new_tokens: common.NewTokensOption = 128,
    ranks: Annotated[int, typer.Option(min=1, help="Candidates of each head to look at.")] = 10,
    temperature: Annotated[
        float | None, typer.Option(help="Calibrate on sampled texts of this temperature. Default: greedy texts.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of sampled texts.")] = 0,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long to measure passes, where no curve is saved.")] = 8.0,
    picture: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the tree here; needs matplotlib.")] = None,
    dtype: common.DtypeOption = "float32",
    device: common.DeviceOption = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of tables.")] = False,
) -> None:
    """Grow the best tree of Medusa's candidates, from the heads' accuracies on texts.

    The best tree is the one that is expected to write the most tokens per millisecond.
    """
    texts = PROMPTS if prompts is None else read_prompts(prompts)
    _check_files(output, picture)
    if heads is None:
        if model is not None:
            raise LookaheadError(
                f"--model {model} needs --heads: expected the folder of heads that were trained for it."
            )
        heads = str(BUNDLED_HEADS)
    if not Path(heads).expanduser().exists() and not on_hub(heads):
        raise LookaheadError(f"--heads {heads} does not exist: expected a folder of Medusa heads.")
    loaded, tokenizer = common.load(model, dtype, device)
    trained = MedusaHeads.from_pretrained(heads, model=loaded)
    inputs = [common.encode(tokenizer, text, loaded) for text in texts]
    halves = len(inputs) >= _HALVES
    learnt, held = (inputs[::2], inputs[1::2]) if halves else (inputs, inputs)
    with common.progress() as progress:
        bar = progress.add_task("Calibrating", total=1.0)
        table = calibrate(
            loaded,
            trained,
            [given["input_ids"][0] for given in learnt],
            new_tokens,
            ranks,
            temperature=temperature,
            seed=seed,
            report=lambda share: progress.update(bar, completed=share),
        )
        budget, size = None, nodes
        if size is None:
            context = sum(given["input_ids"].shape[1] for given in inputs) // len(inputs) + new_tokens // 2
            timing = progress.add_task("Measuring passes", total=1.0)
            budget = _budget(
                loaded, trained, table, context, seconds, lambda share: progress.update(timing, completed=share)
            )
            size = budget.nodes
        grown = CalibratedTree(
            choices=grow_tree(table, size),
            accuracies=table,
            model="bundled" if model is None else model,
            heads=heads,
        )
        if output is not None:
            grown.save(output)
        if picture is not None:
            draw(grown, picture)
        settings = {"do_sample": False} if temperature is None else {"do_sample": True, "temperature": temperature}
        stats = DecodingStats()
        torch.manual_seed(seed)
        for given in progress.track(held, description="Decoding with the tree"):
            decoded = common.decode(
                loaded, given, Medusa(trained, choices=grown), max_new_tokens=new_tokens, **settings
            )
            stats += decoded.stats or DecodingStats()
    measured = _reached(stats, len(held), grown.choices.depth)
    if as_json:
        typer.echo(json.dumps(_document(grown, measured, stats, len(learnt), len(held), halves, budget), indent=2))
        return
    console = Console(highlight=False)
    texts_were = "greedy texts" if temperature is None else f"texts sampled at temperature {temperature:g}"
    console.print(_accuracy_table(table, f"Heads on {texts_were} of {len(learnt)} prompts"))
    if budget is not None:
        console.print(_budget_table(budget))
        _tell_budget(console, budget)
    held_are = (
        f"the {len(held)} other prompts" if halves else f"the same {len(held)} prompts (too few to hold some out)"
    )
    if len(grown.paths) < size:
        console.print(
            f"{size} nodes were asked for: no more than {len(grown.paths)} are worth anything on these texts."
        )
    console.print(_depth_table(grown, measured))
    console.print(
        f"Length: {grown.expected_length + 1:.2f} tokens a pass expected, {1 + sum(measured):.2f} measured on "
        f"{held_are}; the model's own token included, the prompt's pass left out.",
        style="bold",
    )
    console.print(drawing(grown))
    for file in (output, picture):
        if file is not None:
            console.print(f"Saved in {file}.")


def _check_files(output: Path | None, picture: Path | None) -> None:
    """Refuse files that could not be written when the work is done.

    Raises:
        LookaheadError: a folder is missing or in the file's place, the picture has an unknown ending, or matplotlib is
            missing.
    """
    for option, file in (("--output", output), ("--picture", picture)):
        if file is None:
            continue
        if not file.parent.is_dir():
            raise LookaheadError(f"{option} {file}: there is no folder {file.parent}. Make it first.")
        if file.is_dir():
            raise LookaheadError(f"{option} {file} is a folder: expected the name of a file.")
    if picture is None:
        return
    if picture.suffix not in _PICTURES:
        raise LookaheadError(f"--picture {picture}: expected a name that ends in {', '.join(_PICTURES)}.")
    if importlib.util.find_spec("matplotlib") is None:
        raise LookaheadError(
            "--picture needs matplotlib, which is not installed: pip install 'lookahead-decoding[bench]', or leave it "
            "out."
        )


def _budget(
    model: Any, heads: MedusaHeads, table: HeadAccuracies, context: int, seconds: float, report: Any
) -> _Budget:
    """Choose the size by the saved step-time curve, or by one measured now."""
    own = tuning.cached(model)
    origin = "saved in"
    if own is None:
        times, own = tuning.sweep_all(model, context, seconds=seconds, report=report)
        origin = "measured now and saved in"
    else:
        times = tuning.cached(model, traced=True) or own
    report(1.0)
    curve = times.curve(context, NODES[-1])
    extra = heads_ms(model, heads, len(table.accuracies[0]))
    passes = [ms + extra for ms in curve]
    return _Budget(
        nodes=best_size(table, passes),
        lengths=expected_lengths(table, NODES[-1] - 1),
        pass_ms=passes,
        plain_ms=own.ms(1, context),
        heads_ms=extra,
        origin=f"{origin} {tuning.cache_file(times.about)}",
    )


def _reached(stats: DecodingStats, prompts: int, depth: int) -> list[float]:
    """The share of passes that kept 1, 2, ... ``depth`` drafted tokens or more, the prompts' passes left out."""
    passes = max(1, stats.row_steps - prompts)
    counts = [stats.histogram.get(kept + 1, 0) for kept in range(1, depth + 1)]
    return [count / passes for count in accumulate(reversed(counts))][::-1]


def _expected(grown: CalibratedTree) -> list[float]:
    """The chance that a pass keeps 1, 2, ... drafted tokens or more."""
    shares = [0.0] * grown.choices.depth
    for path, value in zip(grown.paths, node_values(grown.accuracies, grown.choices), strict=True):
        shares[len(path) - 1] += value
    return shares


def _accuracy_table(accuracies: HeadAccuracies, title: str) -> Table:
    table = Table(title=title, box=None, header_style="bold")
    shown = [count for count in _SHOWN if count <= len(accuracies.accuracies[0])]
    for header in ("head", "predicts", "samples", *(f"top-{count}" for count in shown)):
        table.add_column(header, justify="right")
    tops = [accuracies.top(count) for count in shown]
    for head, samples in enumerate(accuracies.samples):
        table.add_row(str(head), f"+{head + 2}", str(samples), *(f"{top[head]:.3f}" for top in tops))
    return table


def _budget_table(budget: _Budget) -> Table:
    table = Table(title="Trees by the step-time curve", box=None, header_style="bold")
    for header in ("nodes", "tokens a pass", "ms", "against plain"):
        table.add_column(header, justify="right")
    for nodes in sorted({*(nodes for nodes in NODES if nodes < len(budget.lengths)), budget.nodes}):
        table.add_row(
            str(nodes),
            f"{budget.lengths[nodes] + 1:.2f}",
            f"{budget.pass_ms[nodes]:.2f}",
            f"{budget.speedup(nodes):.2f}x",
            style="bold" if nodes == budget.nodes else "",
        )
    return table


def _tell_budget(console: Console, budget: _Budget) -> None:
    speedup = budget.speedup(budget.nodes)
    console.print(
        f"Nodes: {budget.nodes}, with which the step-time curve promises the most tokens per millisecond, "
        f"{speedup:.2f}x plain decoding. The heads take {budget.heads_ms:.2f} ms of a pass.",
        style="bold",
    )
    if speedup < 1.0:
        console.print(
            "No tree pays here: this one is the least loss, and plain decoding is faster.", style="bold yellow"
        )
    console.print(f"The curve is {budget.origin}.", soft_wrap=True)


def _depth_table(grown: CalibratedTree, measured: Sequence[float]) -> Table:
    table = Table(title=f"The tree, nodes: {len(grown.paths)}", box=None, header_style="bold")
    for header in ("depth", "nodes", "reached, expected", "reached, measured"):
        table.add_column(header, justify="right")
    for depth, (width, expected, share) in enumerate(
        zip(grown.choices.widths, _expected(grown), measured, strict=True), start=1
    ):
        table.add_row(str(depth), str(width), f"{expected:.3f}", f"{share:.3f}")
    return table


def _document(
    grown: CalibratedTree,
    measured: Sequence[float],
    stats: DecodingStats,
    learnt: int,
    held: int,
    halves: bool,
    budget: _Budget | None,
) -> dict[str, Any]:
    chosen = None
    if budget is not None:
        chosen = {
            "nodes": budget.nodes,
            "tokens_per_ms": budget.tokens_per_ms(budget.nodes),
            "speedup": budget.speedup(budget.nodes),
            "heads_ms": budget.heads_ms,
            "curve": budget.origin,
        }
    return {
        "tree": grown.to_dict(),
        "widths": list(grown.choices.widths),
        "reached_expected": _expected(grown),
        "reached_measured": list(measured),
        "measured_length": sum(measured),
        "budget": chosen,
        "prompts": {"calibrated": learnt, "measured": held, "held_out": halves},
        "stats": stats.to_dict(),
        "versions": common.versions(),
    }
