"""Training Medusa's heads, alone or with the model, by transformers' ``Trainer`` (arXiv 2401.10774, section 2.2)."""

import importlib.util
import math
import warnings
from collections.abc import Sequence
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
from lookahead.sources.medusa.heads import MedusaHeads
from lookahead.training.data import Example, collate
from lookahead.training.settings import TrainingSettings
from lookahead.training.trainer import Clock, MedusaModel, MedusaTrainer, Report


@dataclass(frozen=True)
class Trained:
    """What a training left."""

    heads: MedusaHeads  # float32
    model: Any  # with backbone="lora", inside its adapter
    changed: bool  # whether the model was trained too, or its adapter
    steps: int  # taken in all stages
    planned_steps: int  # what the epochs would have taken
    seconds: float  # that the steps took


def check_training(model: PreTrainedModel, settings: TrainingSettings) -> None:
    """Raise a LookaheadError if a package is missing, or the model cannot be trained with these settings."""
    lora = "both" in settings.stages and settings.backbone == "lora"
    missing = [name for name in ("accelerate", *(["peft"] if lora else [])) if importlib.util.find_spec(name) is None]
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
    name = type(model).__name__
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and settings.block_size > longest:
        raise LookaheadError(
            f"block_size={settings.block_size}: {name} has positions for {longest} tokens. Use a smaller one."
        )
    if settings.precision == "fp16" and model.device.type == "cpu":
        raise LookaheadError("precision='fp16' does not train on a CPU: expected 'bf16' or 'none'.")
    if "both" in settings.stages and settings.backbone == "full":
        fine = {"torch.float32", "torch.bfloat16", "torch.float64"}
        coarse = sorted({str(weight.dtype) for weight in model.parameters()} - fine)
        if coarse or getattr(model, "is_quantized", False):
            raise LookaheadError(
                f"{name} has weights that cannot be trained ({', '.join(coarse) or 'quantised'}): expected float32 or "
                "bfloat16. Load it so, or use backbone='lora'."
            )


def train(
    model: PreTrainedModel,
    examples: Sequence[Example],
    settings: TrainingSettings,
    folder: str | Path,
    *,
    pad: int = 0,
    resume: bool = False,
    report: Report | None = None,
    callbacks: Sequence[TrainerCallback] = (),
) -> Trained:
    """Train fresh heads for a model, and with ``method="medusa-2"`` the model too.

    The model may be quantised, unless all its weights are trained. ``pad`` fills up shorter examples. ``folder`` gets
    checkpoints, one folder a stage; with ``resume``, training continues from the last one in it. ``report`` is called
    with the stage, the share of it that is done, and now and then losses and rates. A LookaheadError says that
    :func:`check_training` refuses, or that the loss is not finite.
    """
    check_training(model, settings)
    heads = MedusaHeads.for_model(model, settings.num_heads, settings.num_layers, settings.own_output).float()
    if not settings.own_output:
        _check_gradient(model, heads.hidden_size)
    backbone: Any = model
    steps, planned, seconds = 0, 0, 0.0
    flags = [(weight, weight.requires_grad) for weight in model.parameters()]
    try:
        for stage in settings.stages:
            both = stage == "both"
            model.requires_grad_(both and settings.backbone == "full")
            if both and settings.backbone == "lora":
                backbone = _with_adapter(model, settings)
            together = MedusaModel(backbone, heads, both=both, distil=settings.distil)
            args = _arguments(together, len(examples), settings, stage, Path(folder) / stage)
            limit_s = None if settings.max_minutes is None else 60.0 * settings.max_minutes / len(settings.stages)
            clock = Clock(limit_s, stage, report)
            data: dict[str, Any] = {"train_dataset": examples, "data_collator": partial(collate, pad=pad)}
            trainer = MedusaTrainer(together, settings, stage, clock, args=args, callbacks=list(callbacks), **data)
            state = trainer.run(resume)
            steps += state.global_step
            planned += state.max_steps
            seconds += clock.spent_s
    finally:
        for weight, flag in flags:
            weight.requires_grad_(flag)
    backbone.eval()
    return Trained(heads.eval(), backbone, "both" in settings.stages, steps, planned, seconds)


def _check_gradient(model: PreTrainedModel, hidden_size: int) -> None:
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


def _arguments(
    model: MedusaModel, examples: int, settings: TrainingSettings, stage: str, folder: Path
) -> TrainingArguments:
    device = model.backbone.device
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=settings.batch_size,
        gradient_accumulation_steps=settings.accumulate,
        num_train_epochs=settings.epochs,
        learning_rate=settings.heads_rate(stage, model.heads.hidden_size),
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


def _with_adapter(model: PreTrainedModel, settings: TrainingSettings) -> Any:
    """The model inside a fresh LoRA adapter on every linear layer but the output layer."""
    from peft import LoraConfig, get_peft_model  # an optional package

    config = LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        lora_dropout=settings.lora_dropout,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(settings.seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers for what has a new name there
        return get_peft_model(model, config)
