"""What the trainer trains: Medusa's heads, alone or with the model."""

from typing import Any, cast

import torch
from torch import Tensor, nn

from lookahead.models.hidden_states import passed
from lookahead.models.output_layer import output_layer
from lookahead.sources.medusa.heads import MedusaHeads
from lookahead.training.medusa.losses import distillation_loss, heads_loss, next_token_loss
from lookahead.training.medusa.settings import MedusaSettings
from lookahead.training.trainer import Learner


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
