"""``lookahead bench``: what lookahead gains or loses on a model and prompts of the user's own."""

import json
import os
import platform
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from typer import Exit

from jacobi import LookaheadError
from lookahead._files import write_text
from lookahead._version import versions
from lookahead.chat_format import CHAT_QUESTIONS, PROMPTS
from lookahead.cli import common
from lookahead.cli.arguments import Bench
from lookahead.cli.prompts import read_questions
from lookahead.cli.racing import METHODS, Race, RaceRow, rows_of, show_rows, show_verdicts
from lookahead.runtime.machine import processor_name
from lookahead.strategies.lookahead import Lookahead


def bench(options: Bench) -> None:
    model, tokenizer = common.load_for(options)
    chat = bool(tokenizer.chat_template) and not options.raw
    if options.questions or (chat and not options.texts):
        given = read_questions(options.questions) if options.questions else list(CHAT_QUESTIONS.items())
    else:
        given = [("prompts", text) for text in options.texts or PROMPTS]
    encoded = [(kind, common.encode(tokenizer, text, model, options.raw)) for kind, text in given]
    race = Race(model, encoded, options.temperatures(), options.new_tokens, 60.0 * options.minutes)
    with common.progress() as progress:
        runs = race.run(common.bar(progress, f"Racing, for about {options.minutes:g} minutes"))
    rows = rows_of(runs)
    machine: dict[str, Any] = {"platform": platform.platform(), "threads": torch.get_num_threads()}
    machine |= {"processor": processor_name(), "cores": os.cpu_count()}
    if model.device.type == "cuda":
        machine["gpu"] = torch.cuda.get_device_name(model.device)
    document = {
        "model": options.model_name,
        "dtype": common.dtype_name(model),
        "device": str(model.device),
        "machine": machine,
        "argv": sys.argv[1:],
        "strategy": Lookahead().to_dict(),
        "chat_template": chat,
        "new_tokens": race.new_tokens,
        "told": race.told,
        "rows": [asdict(row) for row in rows],
        "runs": [asdict(run) for run in runs],
    }
    if options.out is not None:
        write_text(options.out, json.dumps(document | {"versions": versions()}, indent=1) + "\n")
    if options.plot is not None:
        _draw(rows, options.plot)
    common.report(document, options.as_json, lambda console: _show(console, race, rows))
    if any(run.verdict == "bug" for run in runs):
        raise Exit(1)


def _show(console: Console, race: Race, rows: list[RaceRow]) -> None:
    show_rows(console, rows)
    show_verdicts(console, race, rows)
    if any(row.verdict == "a loss" for row in rows if row.method == "lookahead"):
        console.print(
            "A loss is mostly a pass that costs more here for several tokens than for one, or text that repeats "
            "nothing. lookahead tune --model DIR measures the first; docs/performance.md says what helps."
        )


def _draw(rows: list[RaceRow], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.5 + 0.35 * len(rows)), layout="constrained")
    axes = figure.subplots()
    names = [f"{row.kind}, {row.mode}, {METHODS[row.method].label}" for row in rows][::-1]
    speeds = [row.speedup for row in rows][::-1]
    colours = ["#2a7f62" if row.method == "lookahead" else "#9aa5b1" for row in rows][::-1]
    axes.barh(names, speeds, color=colours)
    axes.axvline(1.0, color="0.3", linewidth=0.8)
    for place, speed in enumerate(speeds):
        axes.annotate(f" {speed:.2f}x", (speed, place), va="center")
    axes.set_xlabel("speed against plain generate()")
    axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(file, dpi=150)
    except (OSError, ValueError) as error:
        raise LookaheadError(f"--plot {file} cannot be written: {error}.") from error
