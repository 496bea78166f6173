"""``lookahead train-medusa``: train Medusa's heads for a model, save them, and say how often they are right."""

import json
import os
import sysconfig
import time
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from jacobi import LookaheadError
from lookahead.cli import common
from lookahead.training.items import Item, read_items, split
from lookahead.training.recipe import Evaluation, fit
from lookahead.training.settings import TrainingSettings

_HOLD_OUT = 20
_BUNDLED_HOLD_OUT = 50  # as the bundled model was trained: its held-out files are these
_CPU_MINUTES = 15.0
_QUIET_S = 30.0  # seconds between two lines where no bar can be drawn
_STAGES = {
    "encoding": "Encoding",
    "answering": "Letting the model answer",
    "heads": "Training the heads",
    "both": "Training model and heads",
    "evaluating": "Evaluating",
}


def train_medusa(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Folder for the heads; new or empty.")],
    data: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH",
            help="What to learn from; may be given several times. A .jsonl file of texts, prompts with completions or "
            "conversations, a text, or a folder of these. Default for the bundled model: the Python standard library.",
        ),
    ] = None,
    eval_data: Annotated[
        list[Path] | None,
        typer.Option(metavar="PATH", help="What to evaluate on. Default: a part of --data that is held out."),
    ] = None,
    hold_out: Annotated[
        int | None,
        typer.Option(
            min=2, metavar="N", help=f"Hold one in N items out, by a hash of their content. Default: {_HOLD_OUT}."
        ),
    ] = None,
    max_items: Annotated[int | None, typer.Option(min=2, help="Use so many items at most, chosen by hash.")] = None,
    model: common.ModelOption = None,
    method: Annotated[
        Literal["medusa-1", "medusa-2"], typer.Option(help="Train the heads alone, or the model with them.")
    ] = "medusa-1",
    heads: Annotated[int, typer.Option(min=1, help="K; head k predicts k + 1 tokens ahead.")] = 4,
    layers: Annotated[int, typer.Option(min=0, help="Residual blocks of each head.")] = 1,
    own_output: Annotated[bool, typer.Option(help="Give each head an output layer of its own.")] = False,
    backbone: Annotated[
        Literal["lora", "full"], typer.Option(help="(medusa-2) What of the model is trained.")
    ] = "lora",
    schedule: Annotated[
        Literal["two-stage", "sine"],
        typer.Option(help="(medusa-2) Heads alone first, then both; or both, the heads' weight rising from 0."),
    ] = "two-stage",
    self_distill: Annotated[bool, typer.Option(help="Learn from the model's own answers to the prompts.")] = False,
    answer_tokens: Annotated[int, typer.Option(min=1, help="(self-distill) Most tokens of an answer.")] = 256,
    temperature: Annotated[float | None, typer.Option(help="(self-distill) Sample. Default: greedy.")] = None,
    learning_rate: Annotated[
        float | None, typer.Option("--lr", help="Of the heads. Default: 1e-3; with medusa-2, 2e-3.")
    ] = None,
    backbone_lr: Annotated[float | None, typer.Option(help="(medusa-2) Of the model. Default: a quarter.")] = None,
    lambda_0: Annotated[
        float | None, typer.Option("--lambda-0", help="(medusa-2) Weight of the heads' loss. Default: 0.2; 0.01.")
    ] = None,
    epochs: Annotated[float, typer.Option(help="Passes over the data, in each stage.")] = 2.0,
    min_steps: Annotated[int, typer.Option(help="More passes where those would be fewer steps than this.")] = 1000,
    max_minutes: Annotated[
        float | None,
        typer.Option(help=f"Most minutes of training; 0 is no limit. Default: {_CPU_MINUTES:g} on a CPU, else none."),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Examples in a step, on each device.")] = 2,
    accumulate: Annotated[int, typer.Option(help="Batches in a step.")] = 1,
    block_size: Annotated[int, typer.Option(help="Most tokens of an example.")] = 512,
    mixed_precision: Annotated[Literal["none", "bf16", "fp16"], typer.Option(help="Automatic mixed precision.")] = (
        "none"
    ),
    lora_rank: Annotated[int, typer.Option(help="(medusa-2)")] = 32,
    lora_alpha: Annotated[int, typer.Option(help="(medusa-2)")] = 16,
    lora_dropout: Annotated[float, typer.Option(help="(medusa-2)")] = 0.05,
    seed: Annotated[int, typer.Option(help="Of the order of the data.")] = 0,
    save_steps: Annotated[int, typer.Option(help="Steps between two checkpoints.")] = 200,
    report_to: Annotated[str, typer.Option(help="A logger, for example tensorboard or wandb.")] = "none",
    resume: Annotated[bool, typer.Option(help="Go on with the training that was begun in --output.")] = False,
    force: Annotated[bool, typer.Option(help="Overwrite what is in --output.")] = False,
    dtype: common.DtypeOption = "float32",
    device: common.DeviceOption = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of the table.")] = False,
) -> None:
    """Train Medusa heads for a model.

    On several GPUs: `torchrun --no-python lookahead train-medusa ...`.
    """
    rank = os.environ.get("LOCAL_RANK")  # torchrun's way to tell a process which GPU is its own
    if device == "auto" and torch.cuda.is_available():
        device = f"cuda:{rank or 0}"
    if max_minutes is None:
        max_minutes = _CPU_MINUTES if device in ("auto", "cpu") else 0.0
    settings = TrainingSettings(
        method=method,
        num_heads=heads,
        num_layers=layers,
        own_output=own_output,
        backbone=backbone,
        schedule=schedule,
        distil=self_distill,
        answer_tokens=answer_tokens,
        temperature=temperature,
        learning_rate=learning_rate,
        backbone_learning_rate=backbone_lr,
        lambda_0=lambda_0,
        epochs=epochs,
        min_steps=min_steps,
        max_minutes=max_minutes or None,
        batch_size=batch_size,
        accumulate=accumulate,
        block_size=block_size,
        precision=mixed_precision,
        lora_rank=lora_rank,
        lora_alpha=lora_alpha,
        lora_dropout=lora_dropout,
        seed=seed,
        save_steps=save_steps,
        report_to=report_to,
    )
    items, held_out = _items(data, eval_data, hold_out, max_items, bundled=model is None)
    loaded, tokenizer = common.load(model, dtype, device)
    first = rank in (None, "0")
    with common.progress() as progress:
        evaluation = fit(
            loaded,
            tokenizer,
            items,
            held_out,
            output,
            settings,
            name=None if model is not None else "tiny-coder",
            resume=resume,
            force=force,
            report=Teller(progress).tell if first else None,
        )
    if evaluation is None:
        return
    if as_json:
        typer.echo(json.dumps(evaluation.to_dict() | {"output": str(output)}, indent=2))
        return
    show(Console(highlight=False), evaluation)
    typer.echo(f"Saved in {output}.")


class Teller:
    """Draws a bar for each stage; outside a terminal, a line now and then."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._bars: dict[str, TaskID] = {}
        self._last = float("-inf")

    def tell(self, stage: str, done: float, logs: dict[str, float]) -> None:
        """Take in how far a stage is."""
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
    """Print how often the heads are right, and what that is worth."""
    own, accuracies, training = evaluation.own, evaluation.accuracies, evaluation.training
    table = Table(title=f"On {own.tokens:,} held-out tokens", box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("")
    for header in ("predicts", "top-1", "top-5"):
        table.add_column(header, justify="right")
    table.add_row("the model itself", "+1", f"{own.top1:.3f}", f"{own.top5:.3f}")
    for head, (top1, top5) in enumerate(zip(accuracies.top(1), accuracies.top(5), strict=True)):
        table.add_row(f"head {head}", f"+{head + 2}", f"{top1:.3f}", f"{top5:.3f}")
    console.print(table)
    if evaluation.before is not None:
        console.print(f"The model's own loss: {evaluation.before.loss:.4f} before, {own.loss:.4f} after, nats a token.")
    if own.top1:
        console.print(f"The first head is right {evaluation.ratio:.2f} times as often as the model itself.")
    expected = f"Tokens a pass over {len(evaluation.choices.paths)} nodes: {evaluation.expected:.2f} expected"
    measured = evaluation.measured
    if measured is None:
        console.print(expected + ".")
    else:
        console.print(
            f"{expected}, {measured.tokens_per_pass:.2f} measured; {measured.tokens_per_s:.0f} tokens/s against "
            f"{measured.plain_tokens_per_s:.0f} plainly, {measured.speedup:.2f}x.",
            style="bold",
        )
    steps, planned = training["steps"], training["planned_steps"]
    short = "" if steps >= planned else f" of {planned} planned; --max-minutes allows more"
    console.print(f"{steps} steps{short}, {training['seconds'] / 60:.1f} minutes.")


def _items(
    data: list[Path] | None, eval_data: list[Path] | None, hold_out: int | None, most: int | None, *, bundled: bool
) -> tuple[list[Item], list[Item]]:
    """What to learn from, and what to evaluate on."""
    if hold_out is not None and eval_data:
        raise LookaheadError("--hold-out and --eval-data both say what to evaluate on: expected one of them.")
    if not data and not bundled:
        raise LookaheadError("--data is missing: expected what the heads are to learn from.")
    if data:
        items = [item for path in data for item in read_items(path)]
    else:
        library = sysconfig.get_paths()["stdlib"]
        items = [item for item in read_items(library) if "site-packages" not in Path(item.source).parts]
        hold_out = hold_out or _BUNDLED_HOLD_OUT
    if most is not None:
        items = sorted(items, key=lambda item: item.number)[:most]
    if eval_data:
        return items, [item for path in eval_data for item in read_items(path)]
    return split(items, hold_out or _HOLD_OUT)
