"""``lookahead tune``: measure what a pass costs here, save it, and say what that recommends."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from lookahead import tuning
from lookahead.cli import common
from lookahead.cli.prompts import PROMPTS, PromptsOption, read_prompts
from lookahead.draft.latency import NODES, StepTimes
from lookahead.stats import DecodingStats
from lookahead.strategies.lookahead import Lookahead

_BUDGETS = (4, 8, 16, 24, 32, 48, 64, 96, 128)  # drafted nodes
_LADE = ((1, 4, 2), (1, 5, 5), (1, 5, 10), (4, 4, 4), (3, 5, 5), (7, 5, 7), (10, 5, 10), (15, 5, 15))  # W, N, G
_BAR = 40  # columns of the plot


def tune(
    model: common.ModelOption = None,
    prompts: PromptsOption = None,
    new_tokens: common.NewTokensOption = 96,
    batch: Annotated[int, typer.Option(min=1, help="Rows of a pass.")] = 1,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long to measure passes.")] = 8.0,
    dtype: common.DtypeOption = "float32",
    device: common.DeviceOption = "cpu",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also save the curve here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of tables.")] = False,
) -> None:
    """Measure the latency curve of a model on this machine, save it, and recommend a budget and W, N, G."""
    texts = PROMPTS if prompts is None else read_prompts(prompts)
    loaded, tokenizer = common.load(model, dtype, device)
    inputs = [common.encode(tokenizer, text, loaded) for text in texts[:8]]
    longest = max(given["input_ids"].shape[1] for given in inputs)
    context = longest + new_tokens // 2
    with common.progress() as progress:
        bar = progress.add_task("Measuring passes", total=1.0)
        times, own = tuning.sweep_all(
            loaded,
            context,
            batch=batch,
            seconds=seconds,
            report=lambda share: progress.update(bar, completed=share),
        )
        bar = progress.add_task("Trying drafts", total=len(inputs) * (len(_BUDGETS) + len(_LADE)))
        lengths = {budget: _acceptance(loaded, inputs, new_tokens, progress, bar, nodes=budget) for budget in _BUDGETS}
        published = {
            sizes: _acceptance(
                loaded,
                inputs,
                new_tokens,
                progress,
                bar,
                window_size=sizes[0],
                ngram_size=sizes[1],
                verification_set_size=sizes[2],
            )
            for sizes in _LADE
        }
    single = own.ms(1, context)
    speeds = {
        budget: length / (times.ms(round(nodes) + 1, context) / single) for budget, (length, nodes) in lengths.items()
    }
    lade = {
        sizes: length / (times.ms(round(nodes) + 1, context) / single) for sizes, (length, nodes) in published.items()
    }
    budget = max(speeds, key=speeds.__getitem__)
    w, n, g = max(lade, key=lade.__getitem__)
    places = dict.fromkeys(tuning.cache_file(curve.about) for curve in (own, times))
    files = [str(place) for place in places if place.is_file()]
    if output is not None:
        times.save(output)
    if as_json:
        document: dict[str, Any] = {
            "curve": times.to_dict(),
            "plain_ms": single,
            "context": context,
            "budgets": [
                {"nodes": nodes, "S": length, "drafted": drafted, "speedup": speeds[nodes]}
                for nodes, (length, drafted) in lengths.items()
            ],
            "published": [
                {"window_size": sizes[0], "ngram_size": sizes[1], "verification_set_size": sizes[2]}
                | {"S": length, "drafted": drafted, "speedup": lade[sizes]}
                for sizes, (length, drafted) in published.items()
            ],
            "recommended": {"nodes": budget if speeds[budget] > 1 else 0, "window_size": w, "ngram_size": n}
            | {"verification_set_size": g},
            "saved": [*files, *([str(output)] if output else [])],
            "versions": common.versions(),
        }
        typer.echo(json.dumps(document, indent=2))
        return
    console = Console(highlight=False)
    console.print(_curve_table(times, context))
    if times is not own:
        console.print(
            "These passes are traced, as decodes run them after a while. A node alone takes transformers "
            f"{single:.2f} ms, which is what speedups are measured by."
        )
    console.print(_budget_table(lengths, speeds))
    console.print(_published_table(published, lade))
    if speeds[budget] > 1:
        console.print(f"Budget: {budget} drafted nodes a pass, expected {speeds[budget]:.2f}x.", style="bold")
    else:
        console.print("Budget: none; no draft pays on these prompts, and the automatic mode will decode plainly.")
    console.print(f"W, N, G as published: {w}/{n}/{g}, expected {lade[w, n, g]:.2f}x.", style="bold")
    console.print(
        "These are S over the cost of a pass, without processors and the prompt's pass. The automatic mode needs no "
        f"numbers: it reads curves from {tuning.cache_folder()}."
    )


def _acceptance(
    model: Any, inputs: list[dict[str, Any]], new_tokens: int, progress: Any, bar: Any, **settings: Any
) -> tuple[float, float]:
    """S and the mean number of drafted nodes a pass."""
    stats = DecodingStats()
    for given in inputs:
        strategy = Lookahead(seed=0, **settings)
        decoded = common.decode(model, given, strategy, do_sample=False, max_new_tokens=new_tokens)
        stats += decoded.stats or DecodingStats()
        progress.update(bar, advance=1)
    return stats.mean_acceptance_length, stats.drafted / max(1, stats.row_steps)


def _curve_table(times: StepTimes, context: int) -> Table:
    single = times.ms(1, context)
    most = max(times.ms(nodes, context) for nodes in NODES)
    table = Table(title=f"Step time at about {context} tokens of context", box=None, header_style="bold")
    for header in ("nodes", "ms", "t(T)/t(1)"):
        table.add_column(header, justify="right")
    table.add_column("")
    for nodes in NODES:
        ms = times.ms(nodes, context)
        table.add_row(str(nodes), f"{ms:.2f}", f"{ms / single:.2f}", "█" * max(1, round(_BAR * ms / most)))
    return table


def _budget_table(lengths: dict[int, tuple[float, float]], speeds: dict[int, float]) -> Table:
    table = Table(title="Best-first trees on the prompts, greedy", box=None, header_style="bold")
    for header in ("budget", "drafted", "S", "expected speedup"):
        table.add_column(header, justify="right")
    for budget, (length, nodes) in lengths.items():
        table.add_row(str(budget), f"{nodes:.1f}", f"{length:.2f}", f"{speeds[budget]:.2f}x")
    return table


def _published_table(
    published: dict[tuple[int, int, int], tuple[float, float]], speeds: dict[tuple[int, int, int], float]
) -> Table:
    table = Table(title="Lookahead decoding as published", box=None, header_style="bold")
    for header in ("W/N/G", "drafted", "S", "expected speedup"):
        table.add_column(header, justify="right")
    for sizes, (length, nodes) in published.items():
        table.add_row("/".join(map(str, sizes)), f"{nodes:.1f}", f"{length:.2f}", f"{speeds[sizes]:.2f}x")
    return table
