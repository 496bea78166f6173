"""Rows of input that linear layers may be given at a time, for a row's outputs to be the same whatever is beside it.

Kernels are chosen by the number of rows, and each adds in an order of its own. On most machines one order serves up to
some tens of rows, often for a single row, too. That is tried once a machine, with numbers of its own, and layers are
given no other numbers of rows: one is given as two, many in parts.
"""

from functools import partial

from torch import nn
from transformers import PreTrainedModel

from lookahead.models.code_safety import is_plain_linear
from lookahead.runtime.foreign_layers import foreign_rows_are_alike, rows_are_alike
from lookahead.runtime.layer_trials import RowRange, linear_kinds, rows_of_alike
from lookahead.runtime.machine import found_once
from lookahead.runtime.quantised_layers import QuantisedLinear


def rows_of_all(model: PreTrainedModel, several: bool = False) -> dict[int, RowRange] | None:
    """The limits of a model's linear layers, by the features of their input; None = some layer has none within which
    rows are alike. They are tried once a machine, shape and number of threads; layers of other code once a model.

    Args:
        several: the outputs are those of more than one row, not of a single one, where these differ.
    """
    for kind, one in {repr(each): each for each in model.modules() if isinstance(each, QuantisedLinear)}.items():
        if not found_once("quantised", [kind, str(model.dtype)], partial(rows_are_alike, one, model.dtype)):
            return None
    if not foreign_rows_are_alike(model):
        return None
    kinds: dict[int, list[nn.Linear]] = {}
    for layer in linear_kinds(filter(is_plain_linear, model.modules())):
        kinds.setdefault(layer.in_features, []).append(layer)
    limits = {features: rows_of_alike(layers, several) for features, layers in kinds.items()}
    return None if None in limits.values() else limits  # type: ignore[return-value]
