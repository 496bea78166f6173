"""``lookahead train-redrafter``: train a ReDrafter head for a model, save it, and say what it is worth."""

import json
from dataclasses import dataclass
from typing import Any

import typer
from rich.console import Console

from lookahead.cli import common
from lookahead.cli.train_eagle import show
from lookahead.cli.training import SHARED, Teller, TrainingOptions, as_options, option
from lookahead.training.redrafter.recipe import fit
from lookahead.training.redrafter.settings import ReDrafterSettings

_SETTINGS = SHARED | {
    "num_layers": option("--layers", help="Residual blocks of the head."),
    "exit_size": option(help="Channels of these. Default: twice the model's hidden size."),
    "rnn": option(help="A recurrent network's state, or a sum of embeddings."),
    "unroll": option(help="Tokens that it learns to draft one after the other."),
    "targets": option(help="Learn the tokens that came, or the model's own distribution there."),
    "learning_rate": option("--lr", help="Default: 1e-3 for 4,096 channels, more for smaller models."),
}
_Settings: Any = as_options(ReDrafterSettings, _SETTINGS)


@dataclass(frozen=True, kw_only=True)
class Options(TrainingOptions, _Settings):
    def settings(self, device: str) -> ReDrafterSettings:
        given = {name: getattr(self, name) for name in _SETTINGS}
        return ReDrafterSettings(**given, max_minutes=self.minutes(device))


def train_redrafter(options: Options) -> None:
    """Train a ReDrafter head for a model.

    On several GPUs: `torchrun --no-python lookahead train-redrafter ...`.
    """
    settings = options.settings(options.place)
    items, held_out = options.items()
    model, tokenizer = common.load(options.model, options.dtype, options.place)
    others: dict[str, Any] = {"resume": options.resume, "force": options.force}
    if options.model is None:
        others["name"] = "tiny-coder"
    with common.progress() as progress:
        report = Teller(progress).tell if options.tells else None
        evaluation = fit(model, tokenizer, items, held_out, options.output, settings, report=report, **others)
    if evaluation is not None and options.as_json:
        typer.echo(json.dumps(evaluation.to_dict() | {"output": str(options.output)}, indent=2))
    elif evaluation is not None:
        show(Console(highlight=False), evaluation)
        typer.echo(f"Saved in {options.output}.")
