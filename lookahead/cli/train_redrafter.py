"""``lookahead train-redrafter``: train a ReDrafter head for a model, save it, and say what it is worth."""

from dataclasses import dataclass
from typing import Any

from lookahead.cli.training import SHARED, TrainingOptions, as_options, fit_and_tell, option
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
    fit_and_tell(options, fit)
