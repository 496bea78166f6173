"""Training Medusa's heads, alone or with the model (arXiv 2401.10774, section 2.2)."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, TrainerCallback

from jacobi import LookaheadError
from lookahead.sources.medusa.heads import MedusaHeads
from lookahead.training.clock import Report
from lookahead.training.data import Example
from lookahead.training.medusa.learner import MedusaModel
from lookahead.training.medusa.settings import MedusaSettings
from lookahead.training.stage import Trained, check_gradient, check_stage, kept_flags, train_stage


def check_training(model: PreTrainedModel, settings: MedusaSettings) -> None:
    """Raise a LookaheadError if a package is missing, or the model cannot be trained with these settings."""
    lora = "both" in settings.stages and settings.backbone == "lora"
    check_stage(model, settings, ["peft"] if lora else [])
    if "both" in settings.stages and settings.backbone == "full":
        fine = {"torch.float32", "torch.bfloat16", "torch.float64"}
        coarse = sorted({str(weight.dtype) for weight in model.parameters()} - fine)
        if coarse or getattr(model, "is_quantized", False):
            raise LookaheadError(
                f"{type(model).__name__} has weights that cannot be trained ({', '.join(coarse) or 'quantised'}): "
                "expected float32 or bfloat16. Load it so, or use backbone='lora'."
            )


def fresh_heads(model: PreTrainedModel, settings: MedusaSettings) -> MedusaHeads:
    """Heads that have learnt nothing, float32; a LookaheadError says what the model cannot give."""
    heads = MedusaHeads.for_model(model, settings.num_heads, settings.num_layers, settings.own_output).float()
    if not settings.own_output:
        check_gradient(model, heads.hidden_size)
    return heads


def train(
    model: PreTrainedModel,
    examples: Sequence[Example],
    settings: MedusaSettings,
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
    heads = fresh_heads(model, settings)
    backbone: Any = model
    steps, planned, seconds = 0, 0, 0.0
    more: dict[str, Any] = {"pad": pad, "resume": resume, "report": report, "callbacks": callbacks}
    with kept_flags(model):
        for stage in settings.stages:
            both = stage == "both"
            model.requires_grad_(both and settings.backbone == "full")
            if both and settings.backbone == "lora":
                backbone = _with_adapter(model, settings)
            together = MedusaModel(backbone, heads, settings, stage)
            count = len(settings.stages)
            taken = train_stage(together, examples, settings, stage, Path(folder) / stage, stages=count, **more)
            steps, planned, seconds = steps + taken[0], planned + taken[1], seconds + taken[2]
    backbone.eval()
    return Trained(heads.eval(), backbone, "both" in settings.stages, steps, planned, seconds)


def _with_adapter(model: PreTrainedModel, settings: MedusaSettings) -> Any:
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
