"""Trials of linear layers: in which order a machine's kernels add, told by weights and rows that are nobody's."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

_MOST_OUTPUTS = 8192  # of a layer that is tried: those of an output layer are many, and computed alike
_OUTPUTS_ASIDE = 64  # of which the last ones are computed by themselves
_NUMBERS = 65_537  # that such a weight repeats: a prime, so that no two outputs are alike
COUNTS = (2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64)
_LEAST = 8  # rows at a time, below which passes would read weights too often
_TRIED = 1 << 17  # that are compared at least: of kernels that differ, one in twenty thousand outputs does


class RowRange(NamedTuple):
    """How many rows of input a layer is given at a time: so that a row's outputs are the same whatever is beside it."""

    least: int = 1
    most: int = 1 << 30


ANY_ROWS = RowRange()


def tried_weight(layer: nn.Linear) -> Tensor:
    """A weight like a layer's, with as many outputs as tell how all are computed. Its numbers are none of the model's,
    whose weights may be all alike."""
    outputs, features = layer.weight.shape
    if outputs > _MOST_OUTPUTS:
        outputs = _MOST_OUTPUTS + outputs % _OUTPUTS_ASIDE
    numbers = torch.empty(_NUMBERS).uniform_(-1.0, 1.0, generator=torch.Generator().manual_seed(0))
    count = outputs * features
    return numbers.to(layer.weight.dtype).repeat(-(-count // _NUMBERS))[:count].view(outputs, features)


def rows_for(weight: Tensor, count: int) -> Tensor:
    """Rows of input to try a weight ``[out, in]`` with."""
    return torch.arange(count * weight.shape[1], dtype=torch.float32).sin_().to(weight.dtype).view(count, -1)


def linear_kinds(layers: Iterable[nn.Module]) -> list[nn.Linear]:
    """One linear layer of each kind that kernels tell apart."""
    linear = (layer for layer in layers if isinstance(layer, nn.Linear))
    return list({(layer.weight.shape, layer.weight.dtype, layer.bias is None): layer for layer in linear}.values())


def kind_of(layer: nn.Linear) -> list[Any]:
    weight = layer.weight
    return [*weight.shape, str(weight.dtype), layer.bias is not None]


def rows_of_layer(layer: nn.Linear) -> RowRange | None:
    """A layer's limits; None = there are none."""
    with torch.no_grad():
        weight = tried_weight(layer)
        bias = None if layer.bias is None else weight[:, 0].contiguous()
        times, several = -(-_TRIED // (COUNTS[-1] * len(weight))), max(2, 2 * -(-_TRIED // (2 * len(weight))))
        tried = rows_for(weight, COUNTS[-1] * times).split(COUNTS[-1])

        def outputs(count: int) -> Tensor:
            parts = (part for rows in tried for part in rows[:several].split(count))
            return torch.cat([linear(part, weight, bias) for part in parts])

        pairs = outputs(2)
        most = 0
        for count in COUNTS:
            known = torch.cat([part[:count] for part in pairs.split(min(COUNTS[-1], several))])
            if not torch.equal(torch.cat([linear(rows[:count], weight, bias)[:several] for rows in tried]), known):
                break
            most = count
        if most < _LEAST:
            return None
        return RowRange(1 if torch.equal(outputs(1), pairs) else 2, most)
