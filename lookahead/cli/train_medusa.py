"""``lookahead train-medusa``: train Medusa's heads for a model, save them, and say how often they are right."""

from dataclasses import dataclass
from typing import Any

from rich.console import Console

from lookahead.cli import common
from lookahead.cli.training import SHARED, TrainingOptions, as_options, fit_and_tell, option
from lookahead.training.medusa.recipe import Evaluation, fit
from lookahead.training.medusa.settings import MedusaSettings

# Settings of the training that are options; types and defaults are those of MedusaSettings.
_SETTINGS = SHARED | {
    "method": option(help="Train the heads alone, or the model with them."),
    "num_heads": option("--heads", min=1, help="K; head k predicts k + 1 tokens ahead."),
    "num_layers": option("--layers", min=0, help="Residual blocks of each head."),
    "own_output": option(help="Give each head an output layer of its own."),
    "backbone": option(help="(medusa-2) What of the model is trained."),
    "schedule": option(help="(medusa-2) Heads alone first, then both; or both, the heads' weight rising from 0."),
    "learning_rate": option("--lr", help="Of the heads. Default: 1e-3; with medusa-2, 2e-3."),
    "backbone_learning_rate": option("--backbone-lr", help="(medusa-2) Of the model. Default: a quarter."),
    "lambda_0": option("--lambda-0", help="(medusa-2) Weight of the heads' loss. Default: 0.2; 0.01."),
    "lora_rank": option(help="(medusa-2) Rank of the adapter."),
    "lora_alpha": option(help="(medusa-2) Alpha of the adapter."),
    "lora_dropout": option(help="(medusa-2) Dropout of the adapter."),
}
_Settings: Any = as_options(MedusaSettings, _SETTINGS)


@dataclass(frozen=True, kw_only=True)
class Options(TrainingOptions, _Settings):
    def settings(self, device: str) -> MedusaSettings:
        return MedusaSettings(**{name: getattr(self, name) for name in _SETTINGS}, max_minutes=self.minutes(device))


def train_medusa(options: Options) -> None:
    """Train Medusa heads for a model.

    On several GPUs: `torchrun --no-python lookahead train-medusa ...`.
    """
    fit_and_tell(options, fit, show)


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
