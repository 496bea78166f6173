"""Views of a model as the loop sees it, outside of ``generate``, and what waits for a model's next call."""

from typing import Any

from helpers.models import prompts

from jacobi import Wants
from lookahead.models.mask_rules import mask_rules
from lookahead.models.traits import ModelTraits
from lookahead.runtime.forward import Prompt
from lookahead.runtime.open import open_tree
from lookahead.runtime.tree import TreeModel


def tree_view(model: Any, batch: int = 1, length: int = 12, *, static: bool = False, **inputs: Any) -> TreeModel:
    """A view of a model that will read the prompt of :func:`helpers.models.prompts`."""
    given = prompts(batch, length)
    inputs = {"attention_mask": given["attention_mask"]} | inputs
    prompt = Prompt(given["input_ids"], model.generation_config, inputs, None, 40)
    return open_tree(model, ModelTraits.of(model), prompt, None, Wants(), static=static)


def buffers_of(view: TreeModel) -> Any:
    """The static buffers that a view uses now."""
    return view.executor._buffers  # type: ignore[attr-defined]


def rules_of(model: Any) -> Any:
    """What a model's layers see, see `models.mask_rules`."""
    return mask_rules(model, ModelTraits.of(model))
