"""Check that the code of a model's passes is known: transformers' and torch's own, unwrapped and unwatched."""

from collections.abc import Callable, Container
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lookahead.models.hidden_states import own_hook

_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")
_MODE_STACKS = ("_len_torch_function_stack", "_len_torch_dispatch_stack")  # of modes that see every operation
_KNOWN_CODE = ("transformers.", "torch.nn.", "lookahead.runtime.quantised_layers")
# Methods of ``generate`` that each of its passes rests on, and that ours go without.
_STEPS = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "_prefill")
BUILT_IN = frozenset(vars(nn.Module()))  # what every module has


def is_safe(model: PreTrainedModel, aside: Container[nn.Module] = ()) -> bool:
    """True if nothing but transformers' and torch's code sees the tensors of a pass, beside the modules ``aside``.
    Gradients, hooks, modes, wrappers, autocast, tensor subclasses, tensors of inference mode and other code forbid it.
    """
    device = model.device.type
    if torch.is_inference_mode_enabled() or torch.is_grad_enabled() or device == "meta":
        return False
    hooked = any(getattr(torch_module, name, None) for name in _GLOBAL_HOOKS)
    if hooked or torch.is_autocast_enabled(device) or any(getattr(torch._C, name, int)() for name in _MODE_STACKS):
        return False
    return _is_known(attention_function(model)) and all(each in aside or is_plain(each) for each in model.modules())


def attention_function(model: PreTrainedModel) -> Callable[..., Any] | None:
    """Function registered for a model's attention implementation, under our wrapper; None = the model has its own."""
    function = ALL_ATTENTION_FUNCTIONS.get(model.config.get_text_config()._attn_implementation)
    return getattr(function, "lookahead_original", function)


def replaced_step(model: PreTrainedModel) -> str | None:
    """Name of a method that passes of ``generate`` rest on and that was replaced: on the object, as PEFT does for soft
    prompts, or in its class; None = all are the classes' own."""
    for name in _STEPS:
        home = next((kind for kind in type(model).__mro__ if name in vars(kind)), None)
        if home is None:
            continue
        found, original = getattr(model, name), vars(home)[name]
        is_bound = getattr(found, "__func__", None) is original and found.__self__ is model
        if not (is_bound and _stands_in(original, home.__module__)):
            return name
    return None


def _stands_in(function: Any, file: str) -> bool:
    """True if a function and all that it wraps are code of a file, of transformers or of torch."""
    while function is not None:
        home = str(getattr(function, "__globals__", {}).get("__name__", ""))
        if home != file and not home.startswith(("transformers.", "torch.")):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def steps_of(model: PreTrainedModel) -> tuple[Any, ...]:
    """The functions that stand for :func:`replaced_step`'s methods in a model's class; None where it has none."""
    return tuple(getattr(type(model), name, None) for name in _STEPS)


def is_plain_linear(layer: nn.Module | None) -> TypeGuard[nn.Linear]:
    """Whether it is torch's own linear layer, over a plain weight."""
    return type(layer) is nn.Linear and type(layer.weight) is nn.Parameter and "forward" not in vars(layer)


def is_plain(module: nn.Module) -> bool:
    """Whether a module is transformers' or torch's code over plain weights, which nothing else sees."""
    settings, kind = vars(module), type(module)
    if module._forward_hooks or "forward" in settings or settings.get("_compiled_call_impl") is not None:
        return False
    if not (all(map(own_hook, module._forward_pre_hooks.values())) and _is_known(kind) and _is_known(kind.forward)):
        return False
    if any(buffer is not None and buffer.is_inference() for buffer in module._buffers.values()):
        return False
    weights = (weight for weight in module._parameters.values() if weight is not None)
    return all(type(weight) is nn.Parameter and not weight.is_inference() for weight in weights)


def _is_known(code: Any) -> bool:
    return code is None or str(getattr(code, "__module__", "")).startswith(_KNOWN_CODE)
