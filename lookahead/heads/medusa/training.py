"""Training Medusa's heads, alone or with the model (arXiv 2401.10774, section 2.2)."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from jacobi import LookaheadError
from lookahead.heads.medusa.calibration import score
from lookahead.heads.medusa.heads import MedusaHeads
from lookahead.heads.medusa.losses import distillation_loss, heads_loss, next_token_loss
from lookahead.heads.medusa.settings import MedusaSettings
from lookahead.heads.medusa.strategy import Medusa
from lookahead.models.hidden_states import passed
from lookahead.models.output_layer import output_layer
from lookahead.training.data import Example, Examples, Progress, Scored
from lookahead.training.recipe import Recipe, Run
from lookahead.training.stage import Learner, Trained, check_gradient, kept_flags, train_stage


class MedusaModel(Learner):
    """A model and its heads. In the stage ``"both"`` the backbone is trained too, with ``distil`` compared with itself
    without its adapter; otherwise it stays in evaluation mode and makes no logits."""

    def __init__(
        self, backbone: Any, heads: MedusaHeads, settings: MedusaSettings | None = None, stage: str = "heads"
    ) -> None:
        super().__init__(backbone, trains_backbone=stage == "both")
        self.heads = heads
        self.heads_weight = 1.0  # lambda_0
        self._settings, self._stage = settings or MedusaSettings(), stage
        self._inner: bool | None = None  # whether the model without its output layer gives the hidden states

    def rates(self) -> list[tuple[nn.Module, float]]:
        heads_rate = self._settings.heads_rate(self._stage, self.heads.hidden_size)
        return [(self.heads, heads_rate), (self.backbone, self._settings.backbone_rate)]

    def advance(self, done: float) -> None:
        self.heads_weight = self._settings.heads_weight(done)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}
        layer = output_layer(self._model)
        if not self.trains_backbone:
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


class MedusaRecipe(Recipe):
    """Heads that are trained, with ``method="medusa-2"`` together with the model, which may be quantised unless all its
    weights are trained."""

    settings = MedusaSettings
    source = "heads"
    strategy = Medusa

    def __init__(self, heads: MedusaHeads, settings: MedusaSettings) -> None:
        self.head = heads
        self._settings = settings
        self._before: float | None = None

    @classmethod
    def check(cls, model: PreTrainedModel, settings: Any, packages: Sequence[str] = ()) -> None:
        both = "both" in getattr(settings, "stages", ())
        super().check(model, settings, ["peft"] if both and settings.backbone == "lora" else ())
        if both and settings.backbone == "full":
            fine = {"torch.float32", "torch.bfloat16", "torch.float64"}
            coarse = sorted({str(weight.dtype) for weight in model.parameters()} - fine)
            if coarse or getattr(model, "is_quantized", False):
                raise LookaheadError(
                    f"{type(model).__name__} has weights that cannot be trained ({', '.join(coarse) or 'quantised'}): "
                    "expected float32 or bfloat16. Load it so, or use backbone='lora'."
                )

    @classmethod
    def fresh(cls, model: PreTrainedModel, settings: Any, examples: Examples = (), name: str | None = None) -> Self:
        heads = MedusaHeads.for_model(model, settings.num_heads, settings.num_layers, settings.own_output).float()
        heads.base_model = heads.base_model if name is None else name
        if not settings.own_output:
            check_gradient(model, heads.hidden_size)
        return cls(heads, settings)

    def learn(self, model: PreTrainedModel, examples: Sequence[Example], folder: Path, **more: Any) -> Trained:
        settings, backbone = self._settings, cast(Any, model)
        steps, planned, seconds = 0, 0, 0.0
        with kept_flags(model):
            for stage in settings.stages:
                both = stage == "both"
                model.requires_grad_(both and settings.backbone == "full")
                if both and settings.backbone == "lora":
                    backbone = _with_adapter(model, settings)
                together = MedusaModel(backbone, self.head, settings, stage)
                count = len(settings.stages)
                taken = train_stage(together, examples, settings, stage, folder / stage, stages=count, **more)
                steps, planned, seconds = steps + taken[0], planned + taken[1], seconds + taken[2]
        backbone.eval()
        return Trained(self.head.eval(), backbone, "both" in settings.stages, steps, planned, seconds)

    def save(self, run: Run, trained: Trained) -> None:
        self.head.to(run.rounded)
        self.head.save_pretrained(run.output)
        if trained.model is not run.model:
            trained.model.save_pretrained(run.output / "adapter", save_embedding_layers=False)
        elif trained.changed:
            run.model.save_pretrained(run.output / "model")
            run.tokenizer.save_pretrained(run.output / "model")
        self.head.to(run.model.dtype)

    def look(self, model: PreTrainedModel, examples: Sequence[Example], pad: int) -> None:
        if self._settings.method == "medusa-2":
            self._before = score(model, None, examples, pad)[0]["loss_model"]

    def score(self, model: PreTrainedModel, examples: Examples, pad: int = 0, report: Progress | None = None) -> Scored:
        """As :func:`lookahead.heads.medusa.calibration.score`, and the loss of a model before it was trained."""
        parts, tokens = score(model, self.head, examples, pad, report)
        return ({} if self._before is None else {"loss_before": self._before}) | parts, tokens

    def introduction(self, run: Run, name: str | None) -> str:
        """The card that was stored with the heads."""
        return (run.output / "README.md").read_text(encoding="utf-8")


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
