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


def _trained(folder: str, strategy: str, head: str, settings: str, recipe: str) -> StrategyKind:
    """Heads that are trained, whose parts lie in modules of the same names."""
    parts = {"strategy": f"strategy.{strategy}", "settings": f"settings.{settings}", "recipe": f"training.{recipe}"}
    return StrategyKind(folder=f"lookahead.heads.{folder}", head=head, **parts)


KINDS = {
    "lookahead": StrategyKind(folder="lookahead.strategies", strategy="lookahead.Lookahead"),
    "jacobi": StrategyKind(folder="lookahead.strategies", strategy="jacobi.Jacobi"),
    "medusa": _trained("medusa", "Medusa", "heads.MedusaHeads", "MedusaSettings", "MedusaRecipe"),
    "eagle": _trained("eagle", "Eagle", "head.EagleHead", "EagleSettings", "TrainedEagle"),
    "mtp": StrategyKind(folder="lookahead.heads.mtp", strategy="strategy.Mtp"),
    "redrafter": _trained("redrafter", "ReDrafter", "head.RecurrentHead", "ReDrafterSettings", "TrainedRecurrent"),
    "block": _trained("block", "Block", "head.BlockHead", "BlockSettings", "TrainedBlock"),
}


def drafts_with(head: Any) -> Any:
    """The strategy class for a head, which may be one as users hold it, or where one lies; None for what is no head,
    and where a model lies. A LookaheadError says why none can be read from a place without a model."""
    heads = {name: kind for name, kind in KINDS.items() if kind.head is not None}
    if not isinstance(head, str):
        for kind in heads.values():
            made = kind.part("head")
            if isinstance(head, made) or type(head).__name__ in getattr(made, "assistants", ()):
                return kind.part("strategy")
        return None
    config = import_module("lookahead.heads.storage").locate(head, {}).config()
    names, known = list(map(str, config.get("architectures") or ())), import_module("transformers")
    if not config or (names and all("For" in name and hasattr(known, name) for name in names)):
        return None
    told = []
    for name, kind in heads.items():
        try:
            kind.part("head").from_pretrained(head)
        except LookaheadError as error:
            told.append(f"As {name}: {error}")
        else:
            return kind.part("strategy")
    raise LookaheadError(f"{head} holds neither a model that is known here nor a head. {' '.join(told)}")


def strategy_from(value: Any) -> "Strategy":
    """The strategy that a user's ``lookahead_strategy`` means: a strategy, its dict, or None for the default."""
    given: Any = {} if value is None else value
    if isinstance(given, import_module("lookahead.strategies.base").Strategy):
        return given
    if not isinstance(given, dict):
        raise LookaheadError(
            "lookahead_strategy must be Lookahead(...), Jacobi(...), Medusa(...) or a dict of their settings: "
            f"got {value!r} of type {type(value).__name__}."
        )
    if not isinstance(name := given.get("strategy", "lookahead"), str) or name not in KINDS:
        raise LookaheadError(f"Unknown strategy {name!r} in lookahead_strategy: expected {', '.join(KINDS)}.")
    return KINDS[name].part("strategy").from_dict(given)
