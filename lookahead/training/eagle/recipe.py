"""EAGLE heads as the recipe of drafters sees them."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from lookahead.models.output_layer import output_sizes
from lookahead.strategies.eagle import Eagle
from lookahead.training.data import Example
from lookahead.training.drafter_recipe import Kind
from lookahead.training.eagle.fresh import fresh_head
from lookahead.training.eagle.learner import TrainedEagle
from lookahead.training.eagle.settings import EagleSettings

_USE = """from lookahead.eagle import Eagle, EagleHead

head = EagleHead.from_pretrained("folder or name of this repository", model=model)
model.generate(**inputs, custom_generate=Eagle(head))"""


def eagle(model: PreTrainedModel, settings: EagleSettings, name: str | None = None) -> Kind:
    """The kind that EAGLE heads of some settings are; ``name`` is the model's, None where it was loaded from."""

    def fresh(examples: Sequence[Example]) -> TrainedEagle:
        return TrainedEagle(fresh_head(model, settings, examples, name), settings)

    title = f"{settings.version.upper()} head for {name}" if name else f"{settings.version.upper()} head"
    return Kind(title, "eagle", fresh, settings.rate(output_sizes(model)[0]), _strategy, _USE)


def _strategy(drafter: TrainedEagle, **settings: Any) -> Eagle:
    return Eagle(drafter.head, **settings)
