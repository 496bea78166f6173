"""``lookahead train-medusa``: train Medusa's heads for a model, save them, and say how often they are right."""

import json
import os
import sysconfig
import time
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
from lookahead.training.items import Item, read_items, split
from lookahead.training.medusa.recipe import Evaluation, fit
from lookahead.training.medusa.settings import MedusaSettings

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
    "evaluating": "Evaluating",
}
_option = partial(Option, rich_help_panel="Training")
# Settings of the training that are options; types and defaults are those of MedusaSettings.
_SETTINGS = {
    "method": _option(help="Train the heads alone, or the model with them."),
    "num_heads": _option("--heads", min=1, help="K; head k predicts k + 1 tokens ahead."),
    "num_layers": _option("--layers", min=0, help="Residual blocks of each head."),
    "own_output": _option(help="Give each head an output layer of its own."),
    "backbone": _option(help="(medusa-2) What of the model is trained."),
    "schedule": _option(help="(medusa-2) Heads alone first, then both; or both, the heads' weight rising from 0."),
    "distil": _option("--self-distill/--no-self-distill", help="Learn from the model's own answers to the prompts."),
    "answer_tokens": _option(min=1, help="(self-distill) Most tokens of an answer."),
    "temperature": _option(help="(self-distill) Sample. Default: greedy."),
    "learning_rate": _option("--lr", help="Of the heads. Default: 1e-3; with medusa-2, 2e-3."),
    "backbone_learning_rate": _option("--backbone-lr", help="(medusa-2) Of the model. Default: a quarter."),
    "lambda_0": _option("--lambda-0", help="(medusa-2) Weight of the heads' loss. Default: 0.2; 0.01."),
    "epochs": _option(help="Passes over the data, in each stage."),
    "min_steps": _option(help="More passes where those would be fewer steps than this."),
    "batch_size": _option(help="Examples in a step, on each device."),
    "accumulate": _option(help="Batches in a step."),
    "block_size": _option(help="Most tokens of an example."),
    "precision": _option("--mixed-precision", help="Automatic mixed precision."),
    "lora_rank": _option(help="(medusa-2) Rank of the adapter."),
    "lora_alpha": _option(help="(medusa-2) Alpha of the adapter."),
    "lora_dropout": _option(help="(medusa-2) Dropout of the adapter."),
    "seed": _option(help="Of the order of the data."),
    "save_steps": _option(help="Steps between two checkpoints."),
    "report_to": _option(help="A logger, for example tensorboard or wandb."),
}
_known = {field.name: field for field in fields(MedusaSettings)}
_shown = [(name, Annotated[_known[name].type, option], _known[name].default) for name, option in _SETTINGS.items()]
_Settings: Any = make_dataclass("_Settings", _shown, frozen=True, kw_only=True)
Paths = list[Path] | None


@dataclass(frozen=True, kw_only=True)
class Options(ModelOptions, _Settings):
    dtype: DtypeOption = "float32"
    output: Annotated[Path, Option("--output", "-o", metavar="DIR", help="Folder for the heads; new or empty.")]
    data: Annotated[Paths, Option(metavar="PATH", help=_DATA_HELP)] = None
    eval_data: Annotated[Paths, Option(metavar="PATH", help="What to evaluate on. Default: a part of --data.")] = None
    hold_out: Annotated[int | None, Option(min=2, metavar="N", help=f"Hold out one in N. Default: {_HOLD_OUT}.")] = None
    max_items: Annotated[int | None, Option(min=2, help="Use so many items at most, chosen by hash.")] = None
    max_minutes: Annotated[float | None, _option(help=_MINUTES_HELP)] = None
    resume: Annotated[bool, Option(help="Continue the training that was begun in --output.")] = False
    force: Annotated[bool, Option(help="Overwrite what is in --output.")] = False
    as_json: JsonOption = False

    def settings(self, device: str) -> MedusaSettings:
        default = _CPU_MINUTES if device in ("auto", "cpu") else 0.0
        minutes = default if self.max_minutes is None else self.max_minutes
        return MedusaSettings(**{name: getattr(self, name) for name in _SETTINGS}, max_minutes=minutes or None)


def train_medusa(options: Options) -> None:
    """Train Medusa heads for a model.

    On several GPUs: `torchrun --no-python lookahead train-medusa ...`.
    """
    rank = os.environ.get("LOCAL_RANK")  # torchrun's way to tell a process which GPU is its own
    device = f"cuda:{rank or 0}" if options.device == "auto" and torch.cuda.is_available() else options.device
    settings = options.settings(device)
    items, held_out = _items(options, bundled=options.model is None)
    model, tokenizer = common.load(options.model, options.dtype, device)
    others: dict[str, Any] = {"resume": options.resume, "force": options.force}
    if options.model is None:
        others["name"] = "tiny-coder"
    with common.progress() as progress:
        report = Teller(progress).tell if rank in (None, "0") else None
        evaluation = fit(model, tokenizer, items, held_out, options.output, settings, report=report, **others)
    if evaluation is not None and options.as_json:
        typer.echo(json.dumps(evaluation.to_dict() | {"output": str(options.output)}, indent=2))
    elif evaluation is not None:
        show(Console(highlight=False), evaluation)
        typer.echo(f"Saved in {options.output}.")


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


def show(console: Console, evaluation: Evaluation) -> None:
    own, accuracies, training = evaluation.own, evaluation.accuracies, evaluation.training
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
    steps, planned = training["steps"], training["planned_steps"]
    short = "" if steps >= planned else f" of {planned} planned; --max-minutes allows more"
    console.print(f"{steps} steps{short}, {training['seconds'] / 60:.1f} minutes.")


def _items(options: Options, *, bundled: bool) -> tuple[list[Item], list[Item]]:
    hold_out = options.hold_out
    if hold_out is not None and options.eval_data:
        raise LookaheadError("--hold-out and --eval-data both say what to evaluate on: expected one of them.")
    if not options.data and not bundled:
        raise LookaheadError("--data is missing: expected what the heads are to learn from.")
    if options.data:
        items = [item for path in options.data for item in read_items(path)]
    else:
        library = sysconfig.get_paths()["stdlib"]
        items = [item for item in read_items(library) if "site-packages" not in Path(item.source).parts]
        hold_out = hold_out or _BUNDLED_HOLD_OUT
    if options.max_items is not None:
        items = sorted(items, key=lambda item: item.number)[: options.max_items]
    if options.eval_data:
        return items, [item for path in options.eval_data for item in read_items(path)]
    return split(items, hold_out or _HOLD_OUT)
