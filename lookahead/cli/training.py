"""``lookahead train-eagle``, ``train-medusa`` and ``train-redrafter``: train heads, save them, and say what they are
worth."""

import json
import os
from collections.abc import Callable
from typing import Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress, TaskID

from lookahead.cli import common
from lookahead.cli.training_arguments import TrainEagle, TrainingOptions, TrainMedusa, TrainRedrafter
from lookahead.heads import recipe as heads
from lookahead.heads.medusa import recipe as medusa
from lookahead.training.evaluation import DrafterEvaluation

_STAGES = {
    "encoding": "Encoding",
    "answering": "Letting the model answer",
    "heads": "Training the heads",
    "both": "Training model and heads",
    "drafter": "Training the drafter",
    "evaluating": "Evaluating",
}


def place_of(options: TrainingOptions) -> str:
    """The device of this process: torchrun's way to tell which GPU is its own."""
    rank = os.environ.get("LOCAL_RANK", "0")
    return f"cuda:{rank}" if options.device == "auto" and torch.cuda.is_available() else options.device


class Teller:
    """Draws a bar for each stage."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._bars: dict[str, TaskID] = {}

    def tell(self, stage: str, done: float, logs: dict[str, float]) -> None:
        """Show that a share ``done`` of a stage is done."""
        if stage not in self._bars:
            self._bars[stage] = self._progress.add_task(_STAGES[stage], total=1.0)
        told = f"{_STAGES[stage]}: step {logs['step']}, loss {logs['loss']:.3f}" if logs else None
        self._progress.update(self._bars[stage], completed=done, description=told)


def show_drafter(console: Console, evaluation: DrafterEvaluation) -> None:
    """What the drafter's losses are, and what it is worth in decoding."""
    rows = [(name, f"{value:.3f}") for name, value in evaluation.parts.items()]
    console.print(common.columns(("", "mean"), rows, f"On {evaluation.tokens:,} held-out tokens"))
    rates = evaluation.tokens_per_pass
    if rates:
        lines = [(name, *(f"{rates[mode][name]:.2f}" for mode in rates)) for name in rates["greedy"]]
        console.print(common.columns(("", *rates), lines, f"Tokens a pass, {evaluation.nodes} nodes"))
    _show_steps(console, evaluation.training)


def show_heads(console: Console, evaluation: medusa.Evaluation) -> None:
    own, accuracies = evaluation.own, evaluation.accuracies
    rows = [("the model itself", "+1", f"{own.top1:.3f}", f"{own.top5:.3f}")]
    for head, (top1, top5) in enumerate(zip(accuracies.top(1), accuracies.top(5), strict=True)):
        rows.append((f"head {head}", f"+{head + 2}", f"{top1:.3f}", f"{top5:.3f}"))
    console.print(common.columns(("", "predicts", "top-1", "top-5"), rows, f"On {own.tokens:,} held-out tokens"))
    if evaluation.before is not None:
        console.print(f"The model's own loss: {evaluation.before.loss:.4f} before, {own.loss:.4f} after, nats a token.")
    if own.top1:
        console.print(f"The first head is right {evaluation.ratio:.2f} times as often as the model itself.")
    expected = f"Tokens a pass over {len(evaluation.choices.paths)} nodes: {evaluation.expected:.2f} expected"
    if (measured := evaluation.measured) is None:
        console.print(expected + ".")
    else:
        plain = f"{measured.plain_tokens_per_s:.0f} in plain decoding, {measured.speedup:.2f}x."
        speed = f"{measured.tokens_per_s:.0f} tokens/s against {plain}"
        console.print(f"{expected}, {measured.tokens_per_pass:.2f} measured; {speed}", style="bold")
    _show_steps(console, evaluation.training)


def _show_steps(console: Console, training: dict[str, Any]) -> None:
    steps, planned = training["steps"], training["planned_steps"]
    short = "" if steps >= planned else f" of {planned} planned; --max-minutes allows more"
    console.print(f"{steps} steps{short}, {training['seconds'] / 60:.1f} minutes.")


def train_eagle(options: TrainEagle) -> None:
    fit_and_tell(options, heads.fit)


def train_medusa(options: TrainMedusa) -> None:
    fit_and_tell(options, medusa.fit, show_heads)


def train_redrafter(options: TrainRedrafter) -> None:
    fit_and_tell(options, heads.fit)


def fit_and_tell(
    options: TrainingOptions, fit: Callable[..., Any], show: Callable[[Console, Any], None] = show_drafter
) -> None:
    """Train a drafter by one of the recipes, and say by ``show`` what it is worth."""
    place = place_of(options)
    (items, held_out), settings = options.items, options.settings(place)
    model, tokenizer = common.load(options.model, options.dtype, place, options.gguf_file)
    others: dict[str, Any] = {"resume": options.resume, "force": options.force}
    if options.model is None:
        others["name"] = "tiny-coder"
    with common.progress() as progress:
        report = Teller(progress).tell if os.environ.get("LOCAL_RANK", "0") == "0" else None
        evaluation = fit(model, tokenizer, items, held_out, options.output, settings, report=report, **others)
    if evaluation is not None and options.as_json:
        typer.echo(json.dumps(evaluation.to_dict() | {"output": str(options.output)}, indent=2))
    elif evaluation is not None:
        show(Console(highlight=False), evaluation)
        typer.echo(f"Saved in {options.output}.")
