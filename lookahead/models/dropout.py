"""What training mode makes of passes: chance, of modules that drop values out or shake them, and no KV cache."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedModel

_WORDS = ("drop", "jitter")  # in names of rates: attention_dropout, attn_pdrop, drop_prob, layerdrop, jitter_noise
_OF_CONFIGS = ("dropout", "attention_dropout", "hidden_dropout")  # which layers read there


def training_obstacle(model: PreTrainedModel) -> str | None:
    """Why passes of a model in training mode cannot be drafted for; None = they can, or it is not in that mode."""
    training = [module for module in model.modules() if module.training]
    if any(vars(module).get("gradient_checkpointing") for module in training):
        return "checkpoints gradients in training mode, where layers keep no KV cache; call model.eval()"
    chance = next((found for module in training for found in _found(module)), None)
    if chance is not None:
        return f"is in training mode, where no two passes are alike ({chance}); call model.eval()"
    return None


def _found(module: nn.Module) -> Iterator[str]:
    name, own = type(module).__name__, vars(module)
    if isinstance(module, _DropoutNd) and module.p > 0:
        yield f"{name}(p={module.p})"
    rates = (each for each in own if any(word in each for word in _WORDS))
    yield from (f"{rate} of {name}" for rate in _rates(own, rates))
    if (config := own.get("config")) is not None:
        yield from (f"{rate} of {name}'s config" for rate in _rates(vars(config), _OF_CONFIGS))


def _rates(values: Mapping[str, Any], names: Iterable[str]) -> Iterator[str]:
    for name in names:
        value = values.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            yield f"{name}={value}"
