"""Training Medusa's heads, alone or with the model (Cai et al., arXiv 2401.10774, section 2.2). With heads counted from
0, head k at token t is to predict token t + k + 2; the model itself predicts token t + 1."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy, log_softmax
from transformers import PreTrainedModel

from jacobi import LookaheadError
from lookahead.heads.medusa.calibration import score
from lookahead.heads.medusa.heads import MedusaHeads
from lookahead.heads.medusa.network import OutputLayer
from lookahead.heads.medusa.settings import MedusaSettings
from lookahead.heads.medusa.strategy import Medusa
from lookahead.models.hidden_states import passed
from lookahead.models.output_layer import output_layer
from lookahead.strategies.draft_models import unwrapped
from lookahead.training.data import IGNORE, Example, Examples, Progress, Scored, places_at_once
from lookahead.training.recipe import Recipe, Run
from lookahead.training.stage import Learner, Trained, check_gradient, kept_flags, train_stage


def heads_loss(
    heads: MedusaHeads, output: OutputLayer, hidden: Tensor, labels: Tensor, decay: float = 0.8
) -> tuple[Tensor, Tensor]:
    """The heads' loss L1: the sum over the heads of ``decay ** (k + 1)`` times head k's cross-entropy. A head's
    cross-entropy is the mean over its labelled tokens, in nats; 0 where it has none. The model's ``output`` layer reads
    ``hidden`` ``[batch, token, hidden]``; ``labels`` ``[batch, token]`` are token ids or ``IGNORE``. Returned are L1,
    and each head's cross-entropy ``[head]`` without a gradient, both float32."""
    assert heads.vocab_size is not None  # fresh heads know it
    size = places_at_once(hidden.device, 2 * heads.vocab_size)  # scores, and their slopes
    losses = []
    for head in range(heads.num_heads):
        target = labels[:, head + 2 :]
        kept = target != IGNORE
        states, target = hidden[:, : target.shape[1]][kept], target[kept]
        layers: list[Any] = [heads.blocks[head], heads.outputs[head] if heads.own_output else output]
        parameters = [weight for layer in layers for weight in layer.parameters() if weight.requires_grad]
        total = _SummedLoss.apply(partial(_logits, heads, head, output), size, states, target, *parameters)
        losses.append(total / max(1, len(target)))
    each = torch.stack(losses)
    weights = each.new_tensor([decay ** (head + 1) for head in range(len(losses))])
    return (weights * each).sum(), each.detach()


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """L_LM, the model's own mean cross-entropy: of ``logits`` ``[batch, token, vocab]``, with ``labels`` as above."""
    target = labels[:, 1:]
    kept = target != IGNORE
    return cross_entropy(logits[:, :-1][kept].float(), target[kept], reduction="sum") / max(1, int(kept.sum()))


def distillation_loss(logits: Tensor, original: Tensor, labels: Tensor) -> Tensor:
    """KL(original || adapted) of logits ``[batch, token, vocab]``: a mean over labelled next tokens (section 2.3.2)."""
    kept = labels[:, 1:] != IGNORE
    adapted = log_softmax(logits[:, :-1][kept].float(), dim=-1)
    target = log_softmax(original[:, :-1][kept].float(), dim=-1)
    return (target.exp() * (target - adapted)).sum() / max(1, int(kept.sum()))


def _logits(heads: MedusaHeads, head: int, output: OutputLayer, hidden: Tensor) -> Tensor:
    """One head's logits ``[token, vocab]``, on the device of ``hidden``."""
    state = heads.state(head, hidden)
    if heads.own_output:
        return heads.outputs[head](state).to(hidden.device)
    return output(state.to(hidden.device, hidden.dtype))


class _SummedLoss(torch.autograd.Function):
    """Summed cross-entropy in parts; forward makes the gradients too. Those of a mean may be too small for float16."""

    @staticmethod
    def forward(
        ctx: Any, run: Callable[[Tensor], Tensor], size: int, states: Tensor, target: Tensor, *weights: Tensor
    ) -> Tensor:
        """In nats; ``run``, with ``weights`` to train, turns ``states`` ``[token, hidden]`` into logits by ``size``."""
        ctx.deep = ctx.needs_input_grad[2]
        total = torch.zeros((), device=states.device, dtype=torch.promote_types(states.dtype, torch.float32))
        slopes = [torch.zeros_like(weight) for weight in weights]
        reached: list[Tensor] = []
        for part, wanted in zip(states.split(size), target.split(size), strict=True):
            with torch.enable_grad():
                leaf = part.detach().requires_grad_(ctx.deep)
                logits = run(leaf)
            scores = logits.detach().to(total.dtype)
            norm = scores.logsumexp(-1, keepdim=True)
            total += (norm - scores.gather(-1, wanted[:, None])).sum()
            slope = (scores - norm).exp_()
            slope[torch.arange(len(wanted), device=slope.device), wanted] -= 1.0
            inputs = [*weights, leaf] if ctx.deep else list(weights)
            grads = torch.autograd.grad(logits, inputs, slope.to(logits.dtype)) if inputs else ()
            for sum_, grad in zip(slopes, grads, strict=False):
                sum_ += grad
            reached += grads[len(weights) :]
        ctx.save_for_backward(*slopes, *([torch.cat(reached)] if ctx.deep else []))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors
        slopes = [(part.to(torch.promote_types(part.dtype, scale.dtype)) * scale).to(part.dtype) for part in kept]
        states = slopes.pop() if ctx.deep else None
        return None, None, states, None, *slopes


class MedusaModel(Learner):
    """A model and its heads. In the stage ``"both"`` the backbone is trained too, with ``distil`` compared with itself
    without its adapter; otherwise it stays in evaluation mode and makes no logits."""

    def __init__(self, backbone: Any, heads: MedusaHeads, settings: MedusaSettings, stage: str = "heads") -> None:
        super().__init__(backbone, trains_backbone=stage == "both")
        self.heads = heads
        self.heads_weight = 1.0  # lambda_0
        self._settings, self._stage = settings, stage
        self._inner: bool | None = None  # whether the model without its output layer gives the hidden states

    def rates(self) -> list[tuple[nn.Module, float]]:
        heads_rate = self._settings.heads_rate(self._stage, self.heads.hidden_size)
        return [(self.heads, heads_rate), (self.backbone, self._settings.backbone_rate)]

    def advance(self, done: float) -> None:
        self.heads_weight = self._settings.heads_weight(done)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}
        layer = output_layer(unwrapped(self.backbone))
        if not self.trains_backbone:
            with torch.no_grad():
                hidden = self._hidden(layer, inputs)
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

    def _hidden(self, layer: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """What the output layer reads; the layer itself runs only if the model gives no such states."""
        if self._inner is None:
            few = {name: value[:1, :8] if isinstance(value, Tensor) else value for name, value in inputs.items()}
            _, expected = passed(self.backbone, layer, few)
            found = getattr(self.backbone.base_model(**few), "last_hidden_state", None)
            self._inner = found is not None and found.shape == expected.shape and torch.allclose(found, expected)
        if self._inner:
            return cast(Tensor, self.backbone.base_model(**inputs).last_hidden_state)
        return passed(self.backbone, layer, inputs)[1]

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
    """Heads that are trained, alone or with the model, which may be quantised unless all its weights are trained."""

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
