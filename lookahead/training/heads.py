"""From data to a head on disk, of the kind that its settings name."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, TrainerCallback

from jacobi import LookaheadError
from lookahead.training.clock import Report
from lookahead.training.data import Example
from lookahead.training.drafter import train_drafter
from lookahead.training.drafter_recipe import DrafterEvaluation, Kind, fit_drafter
from lookahead.training.eagle.recipe import eagle
from lookahead.training.eagle.settings import EagleSettings
from lookahead.training.items import Item
from lookahead.training.redrafter.recipe import redrafter
from lookahead.training.redrafter.settings import ReDrafterSettings
from lookahead.training.stage import check_stage

HeadSettings = EagleSettings | ReDrafterSettings

_KINDS: dict[type[HeadSettings], Callable[..., Kind]] = {EagleSettings: eagle, ReDrafterSettings: redrafter}


def train(
    model: PreTrainedModel,
    examples: Sequence[Example],
    settings: HeadSettings,
    folder: str | Path,
    *,
    pad: int = 0,
    resume: bool = False,
    report: Report | None = None,
    callbacks: Sequence[TrainerCallback] = (),
) -> Any:
    """Train a fresh head for a model, which stays as it is, and return it in float32: an ``EagleHead`` or a
    ``RecurrentHead``, see :func:`lookahead.training.drafter.train_drafter`."""
    check_stage(model, settings)
    more: dict[str, Any] = {"pad": pad, "resume": resume, "report": report, "callbacks": callbacks}
    kind = _kind_of(settings)(model, settings)
    trained = train_drafter(model, kind.fresh(examples), examples, settings, folder, rate=kind.rate, **more)
    return trained.heads.head


def fit(
    model: PreTrainedModel,
    tokenizer: Any,
    items: Sequence[Item],
    held_out: Sequence[Item],
    output: str | Path,
    settings: HeadSettings,
    *,
    name: str | None = None,
    **more: Any,
) -> DrafterEvaluation | None:
    """Train a head for a model, save and evaluate it: see :func:`lookahead.training.drafter_recipe.fit_drafter`, which
    takes ``more``. ``name`` is the model's in the head's files; None is where it was loaded from."""
    kind = _kind_of(settings)(model, settings, name)
    return fit_drafter(model, tokenizer, items, held_out, output, settings, kind, **more)


def _kind_of(settings: HeadSettings) -> Callable[..., Kind]:
    found = next((kind for each, kind in _KINDS.items() if isinstance(settings, each)), None)
    if found is None:
        expected = " or ".join(each.__name__ for each in _KINDS)
        raise LookaheadError(f"settings must be {expected}: got {settings!r}.")
    return found
