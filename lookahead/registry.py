"""Strategies by name: a line for each, and so for each kind of heads. Names and settings are read without torch, which
is loaded with what a line names: parts are imported when they are asked for."""

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from jacobi import LookaheadError

if TYPE_CHECKING:
    from lookahead.strategies.base import Strategy


@dataclass(frozen=True, kw_only=True)
class StrategyKind:
    """A kind of strategies, by where its parts are in the package ``folder``: as ``"module.Name"``.

    Attributes:
        strategy: the strategy.
        head: the head as users hold it, if ``lookahead convert`` reads and writes it.
        settings: those of its training, if there is one, which ``lookahead train`` has as options.
        recipe: the training, a :class:`lookahead.training.recipe.Recipe`.
    """

    folder: str
    strategy: str
    head: str | None = None
    settings: str | None = None
    recipe: str | None = None

    def part(self, name: str) -> Any:
        """One of the parts, imported."""
        module, _, member = str(getattr(self, name)).rpartition(".")
        return getattr(import_module(f"{self.folder}.{module}"), member)


KINDS = {
    "lookahead": StrategyKind(folder="lookahead.strategies", strategy="lookahead.Lookahead"),
    "jacobi": StrategyKind(folder="lookahead.strategies", strategy="jacobi.Jacobi"),
    "medusa": StrategyKind(
        folder="lookahead.heads.medusa",
        strategy="strategy.Medusa",
        head="heads.MedusaHeads",
        settings="settings.MedusaSettings",
        recipe="training.MedusaRecipe",
    ),
    "eagle": StrategyKind(
        folder="lookahead.heads.eagle",
        strategy="strategy.Eagle",
        head="head.EagleHead",
        settings="settings.EagleSettings",
        recipe="training.TrainedEagle",
    ),
    "mtp": StrategyKind(folder="lookahead.heads.mtp", strategy="strategy.Mtp"),
    "redrafter": StrategyKind(
        folder="lookahead.heads.redrafter",
        strategy="strategy.ReDrafter",
        head="head.RecurrentHead",
        settings="settings.ReDrafterSettings",
        recipe="training.TrainedRecurrent",
    ),
}


def strategy_from(value: Any) -> "Strategy":
    """The strategy that a user's ``lookahead_strategy`` means: a strategy, its dict, or None for the default."""
    made: Strategy
    if value is None:
        made = KINDS["lookahead"].part("strategy")()
    elif isinstance(value, import_module("lookahead.strategies.base").Strategy):
        made = value
    elif not isinstance(value, dict):
        raise LookaheadError(
            "lookahead_strategy must be Lookahead(...), Jacobi(...), Medusa(...) or a dict of their settings: "
            f"got {value!r} of type {type(value).__name__}."
        )
    elif not isinstance(name := value.get("strategy", "lookahead"), str) or name not in KINDS:
        raise LookaheadError(f"Unknown strategy {name!r} in lookahead_strategy: expected {', '.join(KINDS)}.")
    else:
        made = KINDS[name].part("strategy").from_dict(value)
    return made
