"""Rows of input that linear layers may be given at a time, for a row's outputs to be the same whatever is beside it.

Kernels are chosen by the number of rows, and each adds in an order of its own. On most machines one order serves up to
some tens of rows, often for a single row, too. That is tried once a machine, with numbers of its own, and layers are
given no other numbers of rows: one is given as two, many in parts.
"""

from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel

from lookahead._per_model import PerModel
from lookahead.runtime.layer_trials import COUNTS, RowRange, linear_kinds, rows_for, rows_of_alike
from lookahead.runtime.machine import found_once
from lookahead.runtime.quantised_layers import QuantisedLinear

_NUDGE = 4e-6  # of an input: many roundings in float32, and hardly one to fewer bits
_MOVED = 6e-5  # of the spread of outputs: what so small a change makes of them at most where inputs are not rounded

_rounding: PerModel[dict[type, bool]] = PerModel(dict)


def rows_of_all(model: PreTrainedModel, several: bool = False) -> dict[int, RowRange] | None:
    """The limits of a model's linear layers, by the features of their input; None = some layer has none within which
    rows are alike. They are tried once a machine, shape and number of threads.

    Args:
        several: the outputs are those of more than one row, not of a single one, where these differ.
    """
    for kind, one in {repr(each): each for each in model.modules() if isinstance(each, QuantisedLinear)}.items():
        if not found_once("quantised", [kind, str(model.dtype)], partial(rows_are_alike, one, model.dtype)):
            return None
    kinds: dict[int, list[nn.Linear]] = {}
    for layer in linear_kinds(model.modules()):
        kinds.setdefault(layer.in_features, []).append(layer)
    limits = {features: rows_of_alike(layers, several) for features, layers in kinds.items()}
    return None if None in limits.values() else limits  # type: ignore[return-value]


@torch.no_grad()
def rows_are_alike(layer: QuantisedLinear, dtype: torch.dtype) -> bool:
    """Whether a layer that is given its rows as they come gives each the same outputs beside any others."""
    given = rows_for(torch.empty(0, layer.in_features, dtype=dtype), COUNTS[-1])
    outputs = layer(given)
    return all(torch.equal(layer(given[:count]), outputs[:count]) for count in (1, *COUNTS))


@torch.no_grad()
def rounding_layer(model: PreTrainedModel) -> str | None:
    """The class of a quantised layer that rounds its inputs to fewer bits than the model has, so that it makes much of
    little; None = there is none. Each class is tried once a model."""
    known = _rounding.of(model)
    for layer in model.modules():
        weight = getattr(layer, "weight", None)
        if not isinstance(getattr(layer, "in_features", None), int) or type(weight) is nn.Parameter:
            continue
        if type(layer) not in known:
            given = rows_for(torch.empty(0, layer.in_features, dtype=model.dtype), COUNTS[-1]).to(model.device)
            before, after = layer(given), layer(given * (1 + _NUDGE))
            known[type(layer)] = bool((after - before).abs().max() > _MOVED * before.std())
        if known[type(layer)]:
            return type(layer).__name__
    return None
