"""From data to an EAGLE head on disk."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, TrainerCallback

from lookahead.models.output_layer import output_sizes
from lookahead.sources.eagle.head import EagleHead
from lookahead.strategies.eagle import Eagle
from lookahead.training.clock import Report
from lookahead.training.data import Example
from lookahead.training.drafter import train_drafter
from lookahead.training.drafter_recipe import DrafterEvaluation, Kind, fit_drafter
from lookahead.training.eagle.fresh import fresh_head
from lookahead.training.eagle.learner import TrainedEagle
from lookahead.training.eagle.settings import EagleSettings
from lookahead.training.items import Item
from lookahead.training.stage import check_stage

_USE = """from lookahead.eagle import Eagle, EagleHead

head = EagleHead.from_pretrained("folder or name of this repository", model=model)
model.generate(**inputs, custom_generate=Eagle(head))"""


def train(
    model: PreTrainedModel,
    examples: Sequence[Example],
    settings: EagleSettings,
    folder: str | Path,
    *,
    pad: int = 0,
    resume: bool = False,
    report: Report | None = None,
    callbacks: Sequence[TrainerCallback] = (),
) -> EagleHead:
    """Train a fresh head for a model, which stays as it is, and return it in float32: see
    :func:`lookahead.training.drafter.train_drafter`."""
    check_stage(model, settings)
    more: dict[str, Any] = {"pad": pad, "resume": resume, "report": report, "callbacks": callbacks}
    kind = kind_of(model, settings)
    trained = train_drafter(model, kind.fresh(examples), examples, settings, folder, rate=kind.rate, **more)
    head: EagleHead = trained.heads.head
    return head


def fit(
    model: PreTrainedModel,
    tokenizer: Any,
    items: Sequence[Item],
    held_out: Sequence[Item],
    output: str | Path,
    settings: EagleSettings,
    *,
    name: str | None = None,
    **more: Any,
) -> DrafterEvaluation | None:
    """Train a head for a model, save and evaluate it: see :func:`lookahead.training.drafter_recipe.fit_drafter`, which
    takes ``more``. ``name`` is the model's in the head's config; None is where it was loaded from."""
    return fit_drafter(model, tokenizer, items, held_out, output, settings, kind_of(model, settings, name), **more)


def kind_of(model: PreTrainedModel, settings: EagleSettings, name: str | None = None) -> Kind:
    """EAGLE heads as the recipe of drafters sees them."""

    def fresh(examples: Sequence[Example]) -> TrainedEagle:
        return TrainedEagle(fresh_head(model, settings, examples, name), settings)

    title = f"{settings.version.upper()} head for {name}" if name else f"{settings.version.upper()} head"
    return Kind(title, "eagle", fresh, settings.rate(output_sizes(model)[0]), _strategy, _USE)


def _strategy(drafter: TrainedEagle, **settings: Any) -> Eagle:
    return Eagle(drafter.head, **settings)
