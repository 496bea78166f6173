"""Passes in inference mode: without what autograd notes beside every operation, which ``no_grad`` alone keeps up.

Where a pass is bound by its many small operations, on a CPU and with small models, that is worth several per cent of
it. Nobody else gets to see a tensor of such a pass, and none stays behind on the model.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel

from lookahead.hidden import own_hook

_T = TypeVar("_T")
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")


class InferenceMode:
    """Runs one call's passes over a model in inference mode, if that is safe there.

    Args:
        model: any model; looked at once, here.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._is_safe = not torch.is_inference_mode_enabled() and is_safe(model)
        self._is_used = False

    def run(self, run: Callable[[], _T]) -> _T:
        """Run a pass that may be run again where it fails."""
        if not self._is_safe:
            return run()
        self._is_used = True
        try:
            with torch.inference_mode():
                return run()
        except RuntimeError as error:
            if "inference" not in str(error).lower():
                raise
            # The model does something with its tensors that they do not take in this mode.
            self.leave()
            self._is_safe = False
            return run()

    def leave(self) -> None:
        """Let nothing be found on the model that was made in a pass of this mode: it could not be trained with."""
        if not self._is_used:
            return
        for module in self._model.modules():
            for values in (module._buffers, vars(module)):
                _replace(values)


def is_safe(model: PreTrainedModel) -> bool:
    """Whether nobody is handed a tensor of a pass: no hook, no wrapped ``forward``, no cache of cast weights.

    Weights that are not plain tensors have code of their own, which need not know of this mode.
    """
    if torch.is_autocast_enabled(model.device.type) or any(getattr(torch_module, name, None) for name in _GLOBAL_HOOKS):
        return False
    return all(map(_is_plain, model.modules()))


def _is_plain(module: nn.Module) -> bool:
    settings = vars(module)
    if module._forward_hooks or "forward" in settings or settings.get("_compiled_call_impl") is not None:
        return False
    if module._forward_pre_hooks and not all(map(own_hook, module._forward_pre_hooks.values())):
        return False
    return all(weight is None or type(weight) is nn.Parameter for weight in module._parameters.values())


def _replace(values: dict[str, Any]) -> None:
    """Copy, outside of inference mode, what was made in it; also in dicts and lists, one level down."""
    for name, value in values.items():
        if isinstance(value, Tensor):
            if value.is_inference():
                values[name] = value.clone()
        elif isinstance(value, dict) and value and not name.startswith("_"):
            values[name].update({k: v.clone() for k, v in value.items() if isinstance(v, Tensor) and v.is_inference()})
        elif isinstance(value, list):
            value[:] = [v.clone() if isinstance(v, Tensor) and v.is_inference() else v for v in value]
