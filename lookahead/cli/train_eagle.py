"""``lookahead train-eagle``: train an EAGLE head for a model, save it, and say what it is worth."""

import json
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console

from jacobi import LookaheadError
from lookahead.cli import common
from lookahead.cli.training import SHARED, Teller, TrainingOptions, as_options, option
from lookahead.training.drafter_recipe import DrafterEvaluation
from lookahead.training.eagle.recipe import fit
from lookahead.training.eagle.settings import EagleSettings

_LAYERS_HELP = "(eagle-3) States that it reads, as 2,12,21: what these layers read. Default: the published ones."
_SETTINGS = SHARED | {
    "version": option(help="eagle-3 with training-time test; or eagle-1, whose heads serve EAGLE-2, too."),
    "num_layers": option("--layers", help="Decoder layers of the head."),
    "feed_forward": option(help="Channels of its feed-forward network. Default: the model's."),
    "draft_vocab": option(help="(eagle-3) Score so many tokens, the most frequent. Default: all."),
    "own_output": option(help="(eagle-3) Give it an output layer of its own."),
    "unroll": option(help="(eagle-3) Steps of training-time test."),
    "decay": option(help="(eagle-3) Weight of a step's loss, relative to the step before it."),
    "noise": option(help="(eagle-1) Width of the noise on features."),
    "learning_rate": option("--lr", help="Default: 5e-5 for 4,096 channels, and in inverse proportion."),
}
_Settings: Any = as_options(EagleSettings, _SETTINGS)


@dataclass(frozen=True, kw_only=True)
class Options(TrainingOptions, _Settings):
    feature_layers: Annotated[str | None, option(metavar="N,N,...", help=_LAYERS_HELP)] = None

    def settings(self, device: str) -> EagleSettings:
        given = {name: getattr(self, name) for name in _SETTINGS}
        return EagleSettings(**given, feature_layers=self.layers(), max_minutes=self.minutes(device))

    def layers(self) -> tuple[int, ...]:
        """The option's numbers."""
        try:
            return tuple(int(part) for part in (self.feature_layers or "").split(",") if part)
        except ValueError as error:
            raise LookaheadError(f"--feature-layers {self.feature_layers}: expected numbers, as 2,12,21.") from error


def train_eagle(options: Options) -> None:
    """Train an EAGLE head for a model.

    On several GPUs: `torchrun --no-python lookahead train-eagle ...`.
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


def show(console: Console, evaluation: DrafterEvaluation) -> None:
    """What the drafter's losses are, and what it is worth in decoding."""
    rows = [(name, f"{value:.3f}") for name, value in evaluation.parts.items()]
    console.print(common.columns(("", "mean"), rows, f"On {evaluation.tokens:,} held-out tokens"))
    rates = evaluation.tokens_per_pass
    if rates:
        lines = [(name, *(f"{rates[mode][name]:.2f}" for mode in rates)) for name in rates["greedy"]]
        console.print(common.columns(("", *rates), lines, f"Tokens a pass, {evaluation.nodes} nodes"))
    training = evaluation.training
    steps, planned = training["steps"], training["planned_steps"]
    short = "" if steps >= planned else f" of {planned} planned; --max-minutes allows more"
    console.print(f"{steps} steps{short}, {training['seconds'] / 60:.1f} minutes.")
