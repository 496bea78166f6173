"""Twins of modules, and a model's own first layers as a smaller model."""

import copy
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from jacobi import LookaheadError
from lookahead._per_model import PerModel
from lookahead.models.fingerprint import weights_stamp


def twin_of(module: nn.Module, change: Callable[[Any], None]) -> Any:
    """A copy of a module and its submodules that shares all they hold; ``change`` may replace what a copy holds, but
    not write into it: dicts and tensors are still the module's own."""
    twin: Any = module.__class__.__new__(module.__class__)
    twin.__dict__.update(vars(module))
    twin.__dict__["_modules"] = {
        name: None if child is None else twin_of(child, change) for name, child in module._modules.items()
    }
    change(twin)
    return twin


_kept: PerModel[dict[int, tuple[Any, PreTrainedModel]]] = PerModel(dict)


def early_exit(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    """A model that ends after the first ``layers`` of ``model``, with its final norm and output layer. It shares all
    weights, and is kept until one of these changes. A LookaheadError if the model has no such layers."""
    stamp, kept = weights_stamp(model.parameters()), _kept.of(model)
    if layers not in kept or kept[layers][0] != stamp:
        kept[layers] = stamp, _shortened(model, layers)
    return kept[layers][1]


def _shortened(model: PreTrainedModel, layers: int) -> Any:
    name, config = type(model).__name__, model.config.get_text_config()
    count = int(getattr(config, "num_hidden_layers", None) or 0)
    stacks = [part for part, held in model.named_modules() if isinstance(held, nn.ModuleList) and len(held) == count]
    if len(stacks) != 1:
        raise LookaheadError(
            f"The layers of {name} cannot be told: expected one list of {count} layers, as the config has them, found "
            f"{len(stacks)}. Give another model to draft with."
        )
    if not 1 <= layers < count:
        raise LookaheadError(f"{name} has {count} layers: expected an early exit after 1 to {count - 1}, got {layers}.")
    config = copy.deepcopy(model.config)
    shorter = config.get_text_config()
    shorter.num_hidden_layers = layers
    if getattr(shorter, "layer_types", None):
        shorter.layer_types = shorter.layer_types[:layers]

    def change(twin: Any) -> None:
        mine = vars(twin).get("config")
        if mine is not None:
            twin.__dict__["config"] = config if type(mine) is type(config) else shorter

    twin = twin_of(model, change)
    parent, _, last = stacks[0].rpartition(".")
    held = twin.get_submodule(parent)
    held._modules[last] = nn.ModuleList(list(held._modules[last])[:layers])
    return twin
