"""Linear layers of other packages' code, or over weights of theirs, as those that quantise models make them: whether
they give a row the same outputs beside any others, and whether they round inputs. Each kind is tried once a model."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from transformers import PreTrainedModel

from lookahead._per_model import PerModel
from lookahead.models.code_safety import is_plain
from lookahead.models.compat import MODEL_ERRORS
from lookahead.runtime.layer_trials import COUNTS, TRIED, rows_for

_NUDGE = 4e-6  # of an input: many roundings in float32, and hardly one to fewer bits
_MOVED = 6e-5  # of the spread of outputs: what so small a change makes of them at most where inputs are not rounded
_MOST_ROWS = 4 * COUNTS[-1]  # of a pass over a batch

Tried = dict[tuple[Any, ...], bool]  # by a forward of a layer's own, class, features of inputs and outputs, dtype

_rounding: PerModel[Tried] = PerModel(dict)
_alike: PerModel[Tried] = PerModel(dict)


def foreign_layers(model: PreTrainedModel) -> list[Any]:
    """A model's linear layers of other packages' code, or over weights of theirs, as those that quantise make them."""
    linear = [each for each in model.modules() if isinstance(getattr(each, "in_features", None), int)]
    return [each for each in linear if not (each._modules or each._forward_hooks or is_plain(each))]


def foreign_rows_are_alike(model: PreTrainedModel) -> bool:
    """Whether all of a model's foreign layers give each row the same outputs beside any others."""
    return all(_tried(model, _alike, rows_are_alike).values())


def rounding_layer(model: PreTrainedModel) -> str | None:
    """The class of a quantised layer that rounds its inputs to fewer bits than the model has, so that it makes much of
    little; None = there is none."""
    return next((name for (_, name, *_), rounds in _tried(model, _rounding, _rounds).items() if rounds), None)


def _tried(model: PreTrainedModel, kept: PerModel[Tried], test: Callable[..., bool]) -> Tried:
    """What a test finds of each kind of a model's foreign layers."""
    found, now = kept.of(model), Tried()
    for layer in foreign_layers(model):
        kind = vars(layer).get("forward"), type(layer).__name__, layer.in_features, layer.out_features, model.dtype
        if kind not in found:
            found[kind] = False
            with suppress(*MODEL_ERRORS):  # it may ask for more than rows
                found[kind] = test(layer, model.dtype, model.device)
        now[kind] = found[kind]
    return now


@torch.no_grad()
def _rounds(layer: Any, dtype: torch.dtype, device: torch.device) -> bool:
    given = rows_for(torch.empty(0, layer.in_features, dtype=dtype), COUNTS[-1]).to(device)
    before = layer(given)
    return bool((layer(given * (1 + _NUDGE)) - before).abs().max() > _MOVED * before.std())


@torch.no_grad()
def rows_are_alike(layer: Any, dtype: torch.dtype, device: torch.device | str = "cpu") -> bool:
    """Whether a layer that is given its rows as they come gives each the same outputs beside any others."""
    few = max(2, 2 * -(-TRIED // (2 * layer.out_features)))
    given = rows_for(torch.empty(0, layer.in_features, dtype=dtype), max(few, _MOST_ROWS)).to(device)
    outputs = torch.cat([layer(rows) for rows in given.split(_MOST_ROWS)])
    for count in (1, *COUNTS):
        rows = given[: few if count <= 2 else count]
        if not torch.equal(torch.cat([layer(part) for part in rows.split(count)]), outputs[: len(rows)]):
            return False
    return True
