"""``lookahead train``: train heads, save them, and say what they are worth."""

import json
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from lookahead.cli import common
from lookahead.cli.training_arguments import Train
from lookahead.registry import KINDS
from lookahead.training.evaluation import Evaluation

_STAGES = {
    "encoding": "Encoding",
    "answering": "Letting the model answer",
    "heads": "Training the heads",
    "both": "Training model and heads",
    "drafter": "Training the drafter",
    "evaluating": "Evaluating",
}


def place_of(options: Train) -> str:
    """The device of this process: torchrun's way to tell which GPU is its own."""
    rank = os.environ.get("LOCAL_RANK", "0")
    return f"cuda:{rank}" if options.device == "auto" and torch.cuda.is_available() else options.device


def teller(progress: Progress) -> Callable[[str, float, dict[str, float]], None]:
    """The function that draws a bar for each stage, and shows that a share of it is done."""
    bar = cache(lambda stage: progress.add_task(_STAGES[stage], total=1.0))

    def tell(stage: str, done: float, logs: dict[str, float]) -> None:
        told = f"{_STAGES[stage]}: step {logs['step']}, loss {logs['loss']:.3f}" if logs else None
        progress.update(bar(stage), completed=done, description=told)

    return tell


def show(console: Console, evaluation: Evaluation) -> None:
    """What the heads are worth, and how long they took."""
    for title, headers, rows in evaluation.tables():
        console.print(common.columns(headers, rows, title))
    steps, planned = evaluation.training["steps"], evaluation.training["planned_steps"]
    short = "" if steps >= planned else f" of {planned} planned; --max-minutes allows more"
    console.print(f"{steps} steps{short}, {evaluation.training['seconds'] / 60:.1f} minutes.")


def train(options: Train) -> None:
    place = place_of(options)
    (items, held_out), settings = options.items, options.settings(place)
    model, tokenizer = common.load(options.model, options.dtype, place, options.gguf_file)
    others: dict[str, Any] = {"resume": options.resume, "force": options.force}
    if options.model is None:
        others["name"] = "tiny-coder"
    fit = KINDS[options.kind].part("recipe").fit
    with common.progress() as progress:
        report = teller(progress) if os.environ.get("LOCAL_RANK", "0") == "0" else None
        evaluation = fit(model, tokenizer, items, held_out, options.output, settings, report=report, **others)
    if evaluation is not None and options.as_json:
        typer.echo(json.dumps(evaluation.to_dict() | {"output": str(options.output)}, indent=2))
    elif evaluation is not None:
        show(Console(highlight=False), evaluation)
        typer.echo(f"Saved in {options.output}.")
