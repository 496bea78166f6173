"""Passes in inference mode: without what autograd notes beside every operation, which ``no_grad`` alone keeps up.

Where a pass is bound by its many small operations, on a CPU and with small models, that is worth several per cent of
it. Tensors of that mode can be neither trained with nor written into later, so it is used only where all code in a pass
is transformers' or torch's own, and what such code keeps on the model is copied when the call ends.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel

from lookahead.models.hidden_states import own_hook
from lookahead.runtime.attention import attention_function

_T = TypeVar("_T")
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")
_MODE_STACKS = ("_len_torch_function_stack", "_len_torch_dispatch_stack")  # of modes that see every operation
_KNOWN_CODE = ("transformers.", "torch.nn.")
_PLAIN = (bool, int, float, str, type(None))
BUILT_IN = frozenset(vars(nn.Module()))  # what every module has


class InferenceMode:
    """Runs one call's passes over a model in inference mode, if that is safe there.

    Args:
        model: any model; looked at once, before its first pass.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._is_safe: bool | None = None
        self._is_used = False

    def trust(self) -> None:
        """Take the model for safe, because somebody else has just looked at it."""
        self._is_safe = True

    def run(self, run: Callable[[], _T]) -> _T:
        """Run a pass that may be run again where it fails."""
        if self._is_safe is None:
            self._is_safe = is_safe(self._model)
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
        """Let nothing be found on the model that was made in a pass of this mode.

        What several modules share they share afterwards, too.
        """
        if not self._is_used:
            return
        copies: dict[int, tuple[Tensor, Tensor]] = {}  # with the originals, so that no id is used twice
        for holder, name, value in _held(self._model):
            holder[name] = _copied(value, copies)


def is_safe(model: PreTrainedModel) -> bool:
    """Whether nobody else is handed a tensor of a pass, and none can be left where it is not found.

    Not where gradients are wanted, hooks, modes or wrappers are at work, autocast keeps the weights that it has cast,
    weights are no plain tensors, or any code is neither transformers' nor torch's.
    """
    device = model.device.type
    if torch.is_inference_mode_enabled() or torch.is_grad_enabled() or device == "meta":
        return False
    if torch.is_autocast_enabled(device) or any(getattr(torch_module, name, None) for name in _GLOBAL_HOOKS):
        return False
    if any(getattr(torch._C, name, int)() for name in _MODE_STACKS):
        return False
    if not (_is_known(attention_function(model)) and all(map(_is_plain, model.modules()))):
        return False
    return not _held(model)


def _is_plain(module: nn.Module) -> bool:
    settings = vars(module)
    if module._forward_hooks or "forward" in settings or settings.get("_compiled_call_impl") is not None:
        return False
    if module._forward_pre_hooks and not all(map(own_hook, module._forward_pre_hooks.values())):
        return False
    kind: Any = type(module)
    if not (_is_known(kind) and _is_known(kind.forward)):
        return False
    return all(
        weight is None or (type(weight) is nn.Parameter and not weight.is_inference())
        for weight in module._parameters.values()
    )


def _is_known(code: Any) -> bool:
    return code is None or str(getattr(code, "__module__", "")).startswith(_KNOWN_CODE)


def _held(model: PreTrainedModel) -> list[tuple[dict[str, Any], str, Any]]:
    """All that modules hold of inference mode, beside parameters and other modules: where, by what name, what."""
    found: list[tuple[dict[str, Any], str, Any]] = []
    for module in model.modules():
        for name, value in list(vars(module).items()):  # other threads' passes may set some meanwhile
            if name not in BUILT_IN and type(value) not in _PLAIN and _holds_inference(value):
                found.append((vars(module), name, value))
        for name, value in list(module._buffers.items()):
            if _holds_inference(value):
                found.append((module._buffers, name, value))
    return found


def _holds_inference(value: Any, depth: int = 3) -> bool:
    """Whether a value is, or plainly contains, a tensor of inference mode."""
    if isinstance(value, Tensor):
        return value.is_inference()
    parts = value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
    return depth > 0 and any(_holds_inference(part, depth - 1) for part in parts)


def _copied(value: Any, copies: dict[int, tuple[Tensor, Tensor]]) -> Any:
    """The same with copies, made outside of inference mode, of tensors that were made in it; dicts and lists stay."""
    if not _holds_inference(value):
        return value
    if isinstance(value, Tensor):
        if id(value) not in copies:
            copies[id(value)] = value, value.clone()
        return copies[id(value)][1]
    if type(value) is dict:
        value.update({key: _copied(part, copies) for key, part in value.items()})
    elif type(value) is list:
        value[:] = [_copied(part, copies) for part in value]
    else:
        return tuple(_copied(part, copies) for part in value)
    return value
