"""One stage of a training by transformers' ``Trainer``, whatever learns to draft."""

import importlib.util
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks

from jacobi import LookaheadError
from lookahead.models.output_layer import output_layer, placement
from lookahead.models.trainer import check_trainer, use_one_gpu
from lookahead.training.data import Example, collate
from lookahead.training.settings import TrainingSettings
from lookahead.training.trainer import Clock, DrafterTrainer, Learner, Report


@dataclass(frozen=True)
class Trained:
    """What a training left."""

    heads: Any  # what was trained, float32
    model: Any  # with an adapter, inside it
    changed: bool  # whether the model was trained too, or its adapter
    steps: int  # taken in all stages
    planned_steps: int  # what the epochs would have taken
    seconds: float  # that the steps took


def check_stage(model: PreTrainedModel, settings: TrainingSettings, packages: Sequence[str] = ()) -> None:
    """Raise a LookaheadError if accelerate or one of the ``packages`` is missing, or nothing can be trained for the
    model with these settings."""
    packages = ("accelerate", *packages)
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise LookaheadError(
            f"Training needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed. Run "
            "`pip install lookahead-decoding[train]`."
        )
    check_trainer()
    if settings.report_to != "none":
        try:
            for logger in get_reporting_integration_callbacks(settings.report_to):
                logger()
        except (ValueError, RuntimeError, ImportError) as error:
            raise LookaheadError(f"report_to={settings.report_to!r} cannot be used here: {error}") from error
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and settings.block_size > longest:
        raise LookaheadError(
            f"block_size={settings.block_size}: {type(model).__name__} has positions for {longest} tokens. Use a "
            "smaller one."
        )
    if settings.precision == "fp16" and model.device.type == "cpu":
        raise LookaheadError("precision='fp16' does not train on a CPU: expected 'bf16' or 'none'.")


def train_stage(
    learner: Learner,
    examples: Sequence[Example],
    settings: TrainingSettings,
    stage: str,
    folder: Path,
    *,
    stages: int = 1,
    pad: int = 0,
    resume: bool = False,
    report: Report | None = None,
    callbacks: Sequence[TrainerCallback] = (),
) -> tuple[int, int, float]:
    """Train what of ``learner`` requires gradients; steps taken, steps planned, and the seconds that they took.

    ``folder`` gets checkpoints; with ``resume``, training continues from the last one in it. Of the
    settings' time it has as much as each of so many ``stages``. A LookaheadError says that the loss is not finite.
    """
    args = _arguments(learner, len(examples), settings, folder)
    clock = Clock(None if settings.max_minutes is None else 60.0 * settings.max_minutes / stages, stage, report)
    data: dict[str, Any] = {"train_dataset": examples, "data_collator": partial(collate, pad=pad)}
    trainer = DrafterTrainer(learner, settings, clock, args=args, callbacks=list(callbacks), **data)
    state = trainer.run(resume)
    return state.global_step, state.max_steps, clock.spent_s


@contextmanager
def kept_flags(model: PreTrainedModel) -> Iterator[None]:
    """Weights require gradients afterwards as they did before."""
    flags = [(weight, weight.requires_grad) for weight in model.parameters()]
    try:
        yield
    finally:
        for weight, flag in flags:
            weight.requires_grad_(flag)


def check_gradient(model: PreTrainedModel, hidden_size: int) -> None:
    """Refuse an output layer that passes no gradient on to the heads below it."""
    layer = output_layer(model)
    device, dtype = placement(model)
    states = torch.zeros(1, hidden_size, device=device, dtype=dtype, requires_grad=True)
    try:
        with torch.enable_grad():
            torch.autograd.grad(layer(states).sum(), states)
    except RuntimeError as error:
        raise LookaheadError(
            f"The output layer of {type(model).__name__}, a {type(layer).__name__}, passes no gradient on to the heads "
            "before it: expected one that does. Load the model without quantising that layer."
        ) from error


def _arguments(learner: Learner, examples: int, settings: TrainingSettings, folder: Path) -> TrainingArguments:
    device = learner.backbone.device
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=settings.batch_size,
        gradient_accumulation_steps=settings.accumulate,
        num_train_epochs=settings.epochs,
        learning_rate=max(rate for _, rate in learner.rates()),
        bf16=settings.precision == "bf16",
        fp16=settings.precision == "fp16",
        seed=settings.seed,
        logging_steps=10,
        logging_nan_inf_filter=False,
        save_steps=settings.save_steps,
        save_total_limit=2,
        report_to=settings.report_to,
        disable_tqdm=True,
        remove_unused_columns=False,
        label_names=["labels"],
        use_cpu=device.type == "cpu",
        dataloader_pin_memory=device.type == "cuda",
        ddp_find_unused_parameters=False,
    )
    use_one_gpu(args)
    if (args.device.type, args.device.index or 0) != (device.type, device.index or 0):
        raise LookaheadError(
            f"The model is on {device}, and training runs on {args.device}: move it there, or choose the GPU with "
            "CUDA_VISIBLE_DEVICES."
        )
    each = math.ceil(examples / (args.train_batch_size * args.world_size * settings.accumulate))
    args.num_train_epochs = max(settings.epochs, settings.min_steps / each)
    return args
