"""Training Medusa's heads, alone or with the model (arXiv 2401.10774, section 2.2)."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback

from jacobi import LookaheadError
from lookahead.heads.medusa.heads import MedusaHeads
from lookahead.heads.medusa.losses import distillation_loss, heads_loss, next_token_loss
from lookahead.models.hidden_states import passed
from lookahead.models.output_layer import output_layer
from lookahead.training.data import Example
from lookahead.training.settings import MedusaSettings
from lookahead.training.stage import Trained, check_gradient, check_stage, kept_flags, train_stage
from lookahead.training.trainer import Learner, Report


class MedusaModel(Learner):
    """A model and its heads. In the stage ``"both"`` the backbone is trained too, with ``distil`` compared with itself
    without its adapter; otherwise it stays in evaluation mode and makes no logits."""

    def __init__(
        self, backbone: Any, heads: MedusaHeads, settings: MedusaSettings | None = None, stage: str = "heads"
    ) -> None:
        super().__init__(backbone)
        self.heads = heads
        self.heads_weight = 1.0  # lambda_0
        self._settings, self._stage = settings or MedusaSettings(), stage
        self._both = stage == "both"
        self._inner: bool | None = None  # whether the model without its output layer gives the hidden states

    def rates(self) -> list[tuple[nn.Module, float]]:
        heads_rate = self._settings.heads_rate(self._stage, self.heads.hidden_size)
        return [(self.heads, heads_rate), (self.backbone, self._settings.backbone_rate)]

    def advance(self, done: float) -> None:
        self.heads_weight = self._settings.heads_weight(done)

    def train(self, mode: bool = True) -> "MedusaModel":
        super().train(mode)
        self.backbone.train(mode and self._both)
        return self

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}
        layer = output_layer(self._model)
        if not self._both:
            with torch.no_grad():
                hidden = self._hidden(inputs)
            loss, each = heads_loss(self.heads, layer, hidden, labels)
            self.parts = _by_head(each)
            return {"loss": loss}
        logits, hidden = passed(self.backbone, layer, inputs)
        target = self._original(inputs) if self._settings.distil else None
        own = next_token_loss(logits, labels) if target is None else distillation_loss(logits, target, labels)
        del logits, target
        loss, each = heads_loss(self.heads, layer, hidden, labels)
        self.parts = {"loss_model": own.detach()} | _by_head(each)
        return {"loss": own + self.heads_weight * loss}

    @property
    def _model(self) -> Any:
        return self.backbone.get_base_model() if hasattr(self.backbone, "get_base_model") else self.backbone

    def _hidden(self, inputs: dict[str, Any]) -> Tensor:
        """What the output layer reads; the layer itself runs only if the model gives no such states."""
        if self._inner is None:
            few = {name: value[:1, :8] if isinstance(value, Tensor) else value for name, value in inputs.items()}
            _, expected = passed(self.backbone, output_layer(self._model), few)
            found = getattr(self.backbone.base_model(**few), "last_hidden_state", None)
            self._inner = found is not None and found.shape == expected.shape and torch.allclose(found, expected)
        if self._inner:
            return cast(Tensor, self.backbone.base_model(**inputs).last_hidden_state)
        return passed(self.backbone, output_layer(self._model), inputs)[1]

    @torch.no_grad()
    def _original(self, inputs: dict[str, Any]) -> Tensor:
        self.backbone.eval()
        with self.backbone.disable_adapter():
            logits: Tensor = self.backbone(**inputs).logits
        self.backbone.train()
        return logits


def _by_head(losses: Tensor) -> dict[str, Tensor]:
    return {f"loss_head_{head}": loss for head, loss in enumerate(losses)}


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
