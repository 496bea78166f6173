"""``lookahead train-eagle``: train an EAGLE head for a model, save it, and say what it is worth."""

from dataclasses import dataclass
from typing import Annotated, Any

from jacobi import LookaheadError
from lookahead.cli.training import SHARED, TrainingOptions, as_options, fit_and_tell, option
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
    fit_and_tell(options, fit)
