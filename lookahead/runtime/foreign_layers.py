"""Linear layers over weights of other packages, as those that quantise make them: whether they give a row the same
outputs beside any others, and whether they round inputs."""

import torch
from torch import nn
from transformers import PreTrainedModel

from lookahead._per_model import PerModel
from lookahead.runtime.layer_trials import COUNTS, rows_for
from lookahead.runtime.quantised_layers import QuantisedLinear

_NUDGE = 4e-6  # of an input: many roundings in float32, and hardly one to fewer bits
_MOVED = 6e-5  # of the spread of outputs: what so small a change makes of them at most where inputs are not rounded

_rounding: PerModel[dict[type, bool]] = PerModel(dict)


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
