"""Trials of linear layers: in which order a machine's kernels add, told by weights and rows that are nobody's.

Kernels are chosen by the number of rows, and each adds in an order of its own. Where a processor has instructions for
pairs in bfloat16, and no tiles, oneDNN's add pairs of inputs in chains, of 512 inputs up to 1,024 of them and for a
single row, else of 1,024; and chains one after the other. `_c/linear.c` adds so, whatever the number of rows.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from lookahead import _native
from lookahead.runtime.machine import found_once

_MOST_OUTPUTS = 8192  # of a layer that is tried: those of an output layer are many, and computed alike
_OUTPUTS_ASIDE = 64  # of which the last ones are computed by themselves
_NUMBERS = 65_537  # that such a weight repeats: a prime, so that no two outputs are alike
COUNTS = (2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64)  # of rows that are tried
_LEAST = 8  # rows at a time, below which passes would read weights too often
TRIED = 1 << 17  # outputs that are compared at least: of kernels that differ, one in twenty thousand does
_CHAINS = (512, 1024)  # inputs
_FEW, _MOST_PAIRS = 4, 2048  # rows
COLUMNS = 32  # outputs that lie side by side in a weight that is packed for chains


class RowRange(NamedTuple):
    """How many rows of input a layer is given at a time: so that a row's outputs are the same whatever is beside it.
    ``chain``: of so many inputs that our own kernel adds one after the other, if its others are not alike; else 0."""

    least: int = 1
    most: int = 1 << 30
    chain: int = 0


ANY_ROWS = RowRange()


def tried_weight(layer: nn.Linear) -> Tensor:
    """A weight like a layer's, with as many outputs as tell how all are computed; a model's own may be all alike."""
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


class Chains(NamedTuple):
    """Inputs of a layer that are added one after the other, before that is added to others."""

    single: int  # of a single row
    several: int


def chains_of(layer: nn.Linear) -> Chains | None:
    """A layer's chains, which are tried once a machine; None = it adds otherwise."""
    if layer.weight.dtype != torch.bfloat16 or not layer.weight.is_contiguous() or not _native.operations():
        return None
    found = found_once("chains", kind_of(layer), partial(_chains_of, layer))
    return Chains(*found) if found else None


@torch.no_grad()
def _chains_of(layer: nn.Linear) -> Chains | None:
    weight = tried_weight(layer)
    bias = None if layer.bias is None else weight[:, 0].contiguous()
    rows, half = rows_for(weight, 2 * min(_MOST_PAIRS, -(-TRIED // (2 * len(weight))))), weight.shape[1] // 2
    found = []
    for count in (1, 2):
        right = torch.cat([linear(part, weight, bias) for part in rows.split(count)])
        found.append(next((each for each in _CHAINS if torch.equal(right, in_chains(rows, weight, bias, each))), 0))
    # Once more with products of many sizes that cancel each other, which leaves of a sum its roundings.
    rows = rows[:_FEW] * torch.arange(_FEW * rows.shape[1]).remainder(13).sub(6).exp2().view(_FEW, -1).to(rows.dtype)
    rows[:, half : 2 * half], weight[:, half : 2 * half] = rows[:, :half].flip(1), -weight[:, :half].flip(1)
    for count, chain in zip((1, 2), found, strict=True):
        right = torch.cat([linear(part, weight, bias) for part in rows.split(count)])
        if not chain or not torch.equal(right, in_chains(rows, weight, bias, chain)):
            return None
    return Chains(*found)


def in_chains(rows: Tensor, weight: Tensor, bias: Tensor | None, chain: int) -> Tensor:
    """The outputs ``[row, out]`` of a layer; of no size where this machine has no such kernel."""
    return torch.ops.lookahead.multiplied(rows, weight, rows.new_empty(0) if bias is None else bias, chain)


def rows_of_alike(layers: Sequence[nn.Linear], several: bool) -> RowRange | None:
    """Limits of layers that have as many inputs; None = there are none."""
    found = [found_once("row limits", kind_of(layer), partial(rows_of_layer, layer)) for layer in layers]
    least, most = (None, 0) if None in found else (max(each[0] for each in found), min(each[1] for each in found))
    if least != 1:
        first, *others = map(chains_of, layers)
        if first is not None and all(each == first for each in others):
            return RowRange(chain=first.several if several else first.single)
    return None if least is None else RowRange(least, most)


def rows_of_layer(layer: nn.Linear) -> RowRange | None:
    """A layer's limits; None = there are none."""
    with torch.no_grad():
        weight = tried_weight(layer)
        bias = None if layer.bias is None else weight[:, 0].contiguous()
        times, several = -(-TRIED // (COUNTS[-1] * len(weight))), max(2, 2 * -(-TRIED // (2 * len(weight))))
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


def in_columns(weight: Tensor) -> Tensor:
    """A weight ``[out, in]`` packed for chains, ``[out / 32, in / 2, 64]``: pairs of inputs of 32 outputs abreast."""
    pairs = weight.detach().view(torch.int32).view(-1, COLUMNS, weight.shape[1] // 2)
    return pairs.transpose(1, 2).contiguous().view(torch.bfloat16)
