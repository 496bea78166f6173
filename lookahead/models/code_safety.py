"""Whether the code of a model's passes is known: transformers' and torch's own, unwrapped and unwatched."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lookahead.models.hidden_states import own_hook

_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")
_MODE_STACKS = ("_len_torch_function_stack", "_len_torch_dispatch_stack")  # of modes that see every operation
_KNOWN_CODE = ("transformers.", "torch.nn.")
_PLAIN = (bool, int, float, str, type(None))
# Methods of ``generate`` that each of its passes rests on, and that ours go without.
_STEPS = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "_prefill")
BUILT_IN = frozenset(vars(nn.Module()))  # what every module has


def is_safe(model: PreTrainedModel) -> bool:
    """True if no inference-mode tensor can escape a forward pass. Gradients, hooks, modes, wrappers, autocast, tensor
    subclasses and any but transformers' and torch's code forbid it."""
    device = model.device.type
    if torch.is_inference_mode_enabled() or torch.is_grad_enabled() or device == "meta":
        return False
    if torch.is_autocast_enabled(device) or any(getattr(torch_module, name, None) for name in _GLOBAL_HOOKS):
        return False
    if any(getattr(torch._C, name, int)() for name in _MODE_STACKS):
        return False
    if not (_is_known(attention_function(model)) and all(map(_is_plain, model.modules()))):
        return False
    return not inference_tensors(model)


def attention_function(model: PreTrainedModel) -> Callable[..., Any] | None:
    """What is registered for a model's attention implementation, under our wrapper; None = the model has its own."""
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
    """Whether a function and all that it wraps are code of a file, of transformers or of torch."""
    while function is not None:
        home = str(getattr(function, "__globals__", {}).get("__name__", ""))
        if home != file and not home.startswith(("transformers.", "torch.")):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def steps_of(model: PreTrainedModel) -> tuple[Any, ...]:
    """The functions that stand for :func:`replaced_step`'s methods in a model's class; None where it has none."""
    return tuple(getattr(type(model), name, None) for name in _STEPS)


def _is_plain(module: nn.Module) -> bool:
    settings = vars(module)
    if module._forward_hooks or "forward" in settings or settings.get("_compiled_call_impl") is not None:
        return False
    if module._forward_pre_hooks and not all(map(own_hook, module._forward_pre_hooks.values())):
        return False
    kind: Any = type(module)
    if not (_is_known(kind) and _is_known(kind.forward)):
        return False
    weights = (weight for weight in module._parameters.values() if weight is not None)
    return all(type(weight) is nn.Parameter and not weight.is_inference() for weight in weights)


def _is_known(code: Any) -> bool:
    return code is None or str(getattr(code, "__module__", "")).startswith(_KNOWN_CODE)


def inference_tensors(model: PreTrainedModel) -> list[tuple[dict[str, Any], str, Any]]:
    """All that modules hold of inference mode, beside parameters and other modules: where, by what name, what."""
    found: list[tuple[dict[str, Any], str, Any]] = []
    for module in model.modules():
        own = vars(module)
        for name in own.keys() - BUILT_IN:  # a copy: other threads' passes may set some meanwhile
            value = own.get(name)
            if type(value) not in _PLAIN and holds_inference(value):
                found.append((own, name, value))
        for name, value in list(module._buffers.items()):
            if holds_inference(value):
                found.append((module._buffers, name, value))
    return found


def holds_inference(value: Any, depth: int = 3) -> bool:
    """Whether a value is a tensor of inference mode, or a dict, list or tuple with one in it."""
    if isinstance(value, Tensor):
        return value.is_inference()
    parts = value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
    return depth > 0 and any(holds_inference(part, depth - 1) for part in parts)
