"""Recurrent heads as the recipe of drafters sees them."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from lookahead.models.output_layer import output_sizes
from lookahead.strategies.redrafter import ReDrafter
from lookahead.training.data import Example
from lookahead.training.drafter_recipe import Kind
from lookahead.training.redrafter.learner import TrainedRecurrent, fresh_head
from lookahead.training.redrafter.settings import ReDrafterSettings

_USE = """from lookahead.redrafter import RecurrentHead, ReDrafter

head = RecurrentHead.from_pretrained("folder or name of this repository", model=model)
model.generate(**inputs, custom_generate=ReDrafter(head))"""


def redrafter(model: PreTrainedModel, settings: ReDrafterSettings, name: str | None = None) -> Kind:
    """The kind that recurrent heads of some settings are; ``name`` is the model's."""

    def fresh(examples: Sequence[Example]) -> TrainedRecurrent:
        return TrainedRecurrent(fresh_head(model, settings), settings)

    title = f"ReDrafter head for {name}" if name else "ReDrafter head"
    return Kind(title, "redrafter", fresh, settings.rate(output_sizes(model)[0]), _strategy, _USE)


def _strategy(drafter: TrainedRecurrent, **settings: Any) -> ReDrafter:
    return ReDrafter(drafter.head, **settings)
