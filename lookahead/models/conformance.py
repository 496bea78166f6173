"""The record of the conformance run: by which route each family of transformers was decoded, and why not by a better.

``tests/conformance`` writes it; ``docs/models.md`` shows it. Here it answers for models that cannot be tried: those of
which there is only a config, and those whose dtype is too coarse for the self-test of chains.
"""

import json
from functools import cache
from importlib import resources
from typing import Any

from transformers import PreTrainedModel

RECORD = resources.files("lookahead") / "assets" / "routes.json"


@cache
def _record() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORD.read_text())
    return found


def recorded_version() -> str:
    """The version of transformers that the record is of."""
    return str(_record()["transformers"])


def recorded(model: PreTrainedModel) -> list[dict[str, str]]:
    """What was found for a model's class, or where that is not in the record, for models with its kind of text config.

    Returns:
        Entries with ``family``, ``kind``, ``architecture``, ``route`` and where there is one ``reason``; families that
        no tiny model could be made of are left out.
    """
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
    """The routes of :func:`recorded`; empty where nothing is known."""
    return {entry["route"] for entry in recorded(model)}
