"""The conformance record: the route by which each family of transformers was decoded, and why not by a better one.
``tests/conformance`` writes it and ``docs/models.md`` shows it. Here it stands in for the self-test: of models without
weights, of dtypes too coarse for it, and of classes that are on record for this version."""

import json
from functools import cache
from importlib import resources
from typing import Any

from transformers import PreTrainedModel

from lookahead.models.code_safety import is_safe
from lookahead.models.traits import ModelTraits

RECORD = resources.files("lookahead") / "assets" / "routes.json"


@cache
def _record() -> Any:
    return json.loads(RECORD.read_text())


def recorded_version() -> str:
    """The version of transformers that the record is of."""
    return str(_record()["transformers"])


def recorded(model: PreTrainedModel) -> list[dict[str, str]]:
    """The entries of a model's class; if there are none, those of its kind of text config. They hold ``family``,
    ``kind``, ``architecture``, ``route`` and perhaps ``reason``."""
    built = [entry for entry in _record()["families"] if entry["route"] != "unbuilt"]
    for parent in type(model).__mro__:
        entries = [entry for entry in built if entry["architecture"] == parent.__name__]
        if entries:
            # A class may be that of several families.
            own = [entry for entry in entries if entry["family"] == model.config.model_type]
            return own or entries
    text = model.config.get_text_config().model_type
    kind = "encoder-decoder" if model.config.is_encoder_decoder else "causal"
    return [entry for entry in built if entry["family"] == text and entry["kind"] == kind]


def recorded_routes(model: PreTrainedModel) -> set[str]:
    """The routes of :func:`recorded`; empty if nothing is known."""
    return {entry["route"] for entry in recorded(model)}


def unrecorded(model: PreTrainedModel, traits: ModelTraits, route: str) -> str | None:
    """Why the record does not say that a model of text alone takes a ``route``, by class and config; None = it does."""
    if traits.is_encoder_decoder or traits.config is not model.config:
        return "it is more than a decoder of text"
    if traits.rope_limit is not None or traits.index_limit is not None:
        return "its passes change with the text's length"
    if route == "tree" and traits.counts_slots:
        return "it counts positions by itself"
    return None if recorded_routes(model) == {route} else f"its class is not on record as one of route {route}"


def modified(model: PreTrainedModel) -> str | None:
    """Change made to a model since its class was recorded; None = it runs transformers' and torch's own code."""
    if any(module.training for module in model.modules()) or not is_safe(model):
        return "code other than transformers' runs in its passes, or may see their tensors"
    return None
