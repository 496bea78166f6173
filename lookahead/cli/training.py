"""What commands that train share: their data, and bars that tell how far they are."""

import json
import os
import sysconfig
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, make_dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress, TaskID
from typer import Option

from jacobi import LookaheadError
from lookahead.cli import common
from lookahead.cli.options import DtypeOption, JsonOption, ModelOptions
from lookahead.training.drafter_recipe import DrafterEvaluation
from lookahead.training.items import Item, read_items, split
from lookahead.training.settings import TrainingSettings

_HOLD_OUT = 20
_BUNDLED_HOLD_OUT = 50  # as the bundled model was trained: its held-out files are these
_CPU_MINUTES = 15.0
_QUIET_S = 30.0  # seconds between two lines where no bar can be drawn
_MINUTES_HELP = f"Most minutes of training; 0 is no limit. Default: {_CPU_MINUTES:g} on a CPU, else none."
_DATA_HELP = (
    "What to learn from; may be given several times. A .jsonl file of texts, prompts with completions or "
    "conversations, a text, or a folder of these. Default for the bundled model: the Python standard library."
)
_STAGES = {
    "encoding": "Encoding",
    "answering": "Letting the model answer",
    "heads": "Training the heads",
    "both": "Training model and heads",
    "drafter": "Training the drafter",
    "evaluating": "Evaluating",
}
Paths = list[Path] | None

option = partial(Option, rich_help_panel="Training")
# Settings that all trainings have as options, by their names in TrainingSettings.
SHARED = {
    "distil": option("--self-distill/--no-self-distill", help="Learn from the model's own answers to the prompts."),
    "answer_tokens": option(min=1, help="(self-distill) Most tokens of an answer."),
    "temperature": option(help="(self-distill) Sample. Default: greedy."),
    "epochs": option(help="Passes over the data, in each stage."),
    "min_steps": option(help="More passes where those would be fewer steps than this."),
    "batch_size": option(help="Examples in a step, on each device."),
    "accumulate": option(help="Batches in a step."),
    "block_size": option(help="Most tokens of an example."),
    "precision": option("--mixed-precision", help="Automatic mixed precision."),
    "seed": option(help="Of the order of the data, and of fresh weights."),
    "save_steps": option(help="Steps between two checkpoints."),
    "report_to": option(help="A logger, for example tensorboard or wandb."),
}


def as_options(settings: type[TrainingSettings], options: Mapping[str, Any]) -> Any:
    """A dataclass to inherit from, with those settings as options; types and defaults are the settings'."""
    known = {field.name: field for field in fields(settings)}
    shown = [(name, Annotated[known[name].type, given], known[name].default) for name, given in options.items()]
    return make_dataclass("_Settings", shown, frozen=True, kw_only=True)


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(ModelOptions):
    dtype: DtypeOption = "float32"
    output: Annotated[Path, Option("--output", "-o", metavar="DIR", help="Folder to write; new or empty.")]
    data: Annotated[Paths, Option(metavar="PATH", help=_DATA_HELP)] = None
    eval_data: Annotated[Paths, Option(metavar="PATH", help="What to evaluate on. Default: a part of --data.")] = None
    hold_out: Annotated[int | None, Option(min=2, metavar="N", help=f"Hold out one in N. Default: {_HOLD_OUT}.")] = None
    max_items: Annotated[int | None, Option(min=2, help="Use so many items at most, chosen by hash.")] = None
    max_minutes: Annotated[float | None, option(help=_MINUTES_HELP)] = None
    resume: Annotated[bool, Option(help="Continue the training that was begun in --output.")] = False
    force: Annotated[bool, Option(help="Overwrite what is in --output.")] = False
    as_json: JsonOption = False

    def minutes(self, device: str) -> float | None:
        """The limit of a training on a device; None is none."""
        default = _CPU_MINUTES if device in ("auto", "cpu") else 0.0
        return (default if self.max_minutes is None else self.max_minutes) or None

    @property
    def place(self) -> str:
        """The device of this process: torchrun's way to tell which GPU is its own."""
        rank = os.environ.get("LOCAL_RANK", "0")
        return f"cuda:{rank}" if self.device == "auto" and torch.cuda.is_available() else self.device

    @property
    def tells(self) -> bool:
        """Whether this process is the one that draws bars."""
        return os.environ.get("LOCAL_RANK", "0") == "0"

    def items(self) -> tuple[list[Item], list[Item]]:
        """What to train on, and what is held out."""
        hold_out = self.hold_out
        if hold_out is not None and self.eval_data:
            raise LookaheadError("--hold-out and --eval-data both say what to evaluate on: expected one of them.")
        if not self.data and self.model is not None:
            raise LookaheadError("--data is missing: expected what the heads are to learn from.")
        if self.data:
            items = [item for path in self.data for item in read_items(path)]
        else:
            library = sysconfig.get_paths()["stdlib"]
            items = [item for item in read_items(library) if "site-packages" not in Path(item.source).parts]
            hold_out = hold_out or _BUNDLED_HOLD_OUT
        if self.max_items is not None:
            items = sorted(items, key=lambda item: item.number)[: self.max_items]
        if self.eval_data:
            return items, [item for path in self.eval_data for item in read_items(path)]
        return split(items, hold_out or _HOLD_OUT)


class Teller:
    """Draws a bar for each stage; outside a terminal, a line now and then."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._bars: dict[str, TaskID] = {}
        self._last = float("-inf")

    def tell(self, stage: str, done: float, logs: dict[str, float]) -> None:
        """Show that a share ``done`` of a stage is done."""
        if stage not in self._bars:
            self._bars[stage] = self._progress.add_task(_STAGES[stage], total=1.0)
        self._progress.update(self._bars[stage], completed=done)
        if not logs:
            return
        told = f"{_STAGES[stage]}: step {logs['step']}, loss {logs['loss']:.3f}"
        self._progress.update(self._bars[stage], description=told)
        if self._progress.disable and time.monotonic() - self._last > _QUIET_S:
            self._last = time.monotonic()
            typer.echo(f"{told}, {done:.0%}", err=True)


def show_drafter(console: Console, evaluation: DrafterEvaluation) -> None:
    """What the drafter's losses are, and what it is worth in decoding."""
    rows = [(name, f"{value:.3f}") for name, value in evaluation.parts.items()]
    console.print(common.columns(("", "mean"), rows, f"On {evaluation.tokens:,} held-out tokens"))
    rates = evaluation.tokens_per_pass
    if rates:
        lines = [(name, *(f"{rates[mode][name]:.2f}" for mode in rates)) for name in rates["greedy"]]
        console.print(common.columns(("", *rates), lines, f"Tokens a pass, {evaluation.nodes} nodes"))
    training = evaluation.training
    steps, planned = training["steps"], training["planned_steps"]
    short = "" if steps >= planned else f" of {planned} planned; --max-minutes allows more"
    console.print(f"{steps} steps{short}, {training['seconds'] / 60:.1f} minutes.")


def fit_and_tell(options: Any, fit: Callable[..., Any], show: Callable[[Console, Any], None] = show_drafter) -> None:
    """Train a drafter by one of the recipes, and say by ``show`` what it is worth; ``options`` are
    :class:`TrainingOptions` that give their settings."""
    settings = options.settings(options.place)
    items, held_out = options.items()
    model, tokenizer = common.load(options.model, options.dtype, options.place)
    others: dict[str, Any] = {"resume": options.resume, "force": options.force}
    if options.model is None:
        others["name"] = "tiny-coder"
    with common.progress() as progress:
        report = Teller(progress).tell if options.tells else None
        evaluation = fit(model, tokenizer, items, held_out, options.output, settings, report=report, **others)
    if evaluation is not None and options.as_json:
        typer.echo(json.dumps(evaluation.to_dict() | {"output": str(options.output)}, indent=2))
    elif evaluation is not None:
        show(Console(highlight=False), evaluation)
        typer.echo(f"Saved in {options.output}.")
