"""Fingerprint of the model that something was made for: weights, settings and code; and whether weights are numbers."""

import sys
import weakref
from collections.abc import Hashable, Iterable, Iterator
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
import torch.nn.functional
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from lookahead._per_model import PerModel, latest
from lookahead.models.code_safety import BUILT_IN, attention_function
from lookahead.models.hidden_states import own_hook
from lookahead.models.output_layer import COMPUTE_DTYPES

_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})
_NO_SETTINGS = BUILT_IN - {"training"}
_COMMON = frozenset(PreTrainedModel.__mro__)  # has hundreds of methods, and none of them in a pass
_PRECISION = ("allow_tf32", "fp32_precision")
_SWITCHES: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (torch, ("get_float32_matmul_precision", "get_deterministic_debug_mode")),
    (torch.backends.cuda, ("flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled", "cudnn_sdp_enabled")),
    (torch.backends.cuda, ("fp16_bf16_reduction_math_sdp_allowed", "preferred_blas_library")),
    (torch.backends.cuda.matmul, ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")),
    (torch.backends.cuda.matmul, ("allow_fp16_accumulation", *_PRECISION)),
    (torch.backends.cudnn, ("enabled", "benchmark", "deterministic", *_PRECISION)),
    (torch.backends.mkldnn, ("enabled", "deterministic", *_PRECISION)),
)


def fingerprint(model: PreTrainedModel) -> Hashable:
    """A value that changes when the model would run other operations, or on other memory. Weights, hooks, every setting
    (some switch adapters), functions that its code calls and torch's switches count. It holds no reference to it."""
    configs: dict[int, Hashable] = {}
    numbers: dict[int, int] = {}  # of weights in their order: which modules share one
    parts: list[Hashable] = [_setting(model.config, configs), *_switches()]
    modules = list(model.modules())
    for module in modules:
        settings = vars(module)
        parts.append(frozenset((name, _setting(settings[name], configs)) for name in settings.keys() - _NO_SETTINGS))
        before = [hook for hook in module._forward_pre_hooks.values() if not own_hook(hook)]
        parts.append((weakref.ref(type(module)), len(module._forward_hooks), len(before)))
        for held in (module._parameters, module._buffers):
            parts += [(numbers.setdefault(id(tensor), len(numbers)), *_place(tensor)) for tensor in held.values()]
    parts += _code(model, dict.fromkeys(map(type, modules)))
    return tuple(parts)


def is_hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def weights_stamp(weights: Iterable[Tensor]) -> Hashable:
    """A value that changes when a weight has moved or was changed in place, of which inference tensors tell nothing."""
    return tuple((*_place(weight)[:2], 0 if weight.is_inference() else weight._version) for weight in weights)


def _place(tensor: Tensor | None) -> tuple[Hashable, ...]:
    """Where a tensor's numbers lie, and how."""
    if tensor is None:
        return (0,)
    try:
        return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
    except RuntimeError:  # some quantized weights have no memory of their own
        return (id(tensor),)


def _switches() -> Iterator[Hashable]:
    """Switches of kernels for all models; asked by old and new names, of which torch may refuse to tell one."""
    for home, names in _SWITCHES:
        for name in names:
            try:
                value = getattr(home, name, None)
                yield value() if callable(value) else value
            except RuntimeError:
                yield "several"


def _setting(value: Any, configs: dict[int, Hashable], depth: int = 4) -> Hashable:
    """A setting as a value to compare: unknown classes are told apart by class only, lists and dicts to a ``depth``."""
    kind: Any = type(value)
    if kind in _PLAIN:
        return kind, value  # 1, 1.0 and True are not the same
    if isinstance(value, np.generic):
        return kind, value.tobytes()
    if isinstance(value, PretrainedConfig):
        if id(value) not in configs:
            configs[id(value)] = ()  # while it is looked into, and where it holds itself
            configs[id(value)] = tuple((name, _setting(part, configs)) for name, part in vars(value).items())
        return configs[id(value)]
    if isinstance(value, MethodType):
        return weakref.ref(value.__func__), id(value.__self__)
    if isinstance(value, FunctionType | type):
        return weakref.ref(value)
    if isinstance(value, Tensor | np.ndarray) or callable(value):
        return kind, id(value)
    if depth and isinstance(value, dict):
        return tuple((str(name), _setting(part, configs, depth - 1)) for name, part in list(value.items()))
    if depth and isinstance(value, list | tuple | set | frozenset):
        return tuple(_setting(part, configs, depth - 1) for part in value)
    return kind


def _code(model: PreTrainedModel, kinds: Iterable[type]) -> Iterator[Hashable]:
    """The functions that a pass may call: methods, and what the modules' files define or import."""
    yield from (weakref.ref(nn.Module.__call__), weakref.ref(nn.Module._call_impl))
    files: dict[str, None] = {}
    for kind in dict.fromkeys(base for derived in kinds for base in derived.__mro__):
        if kind not in _COMMON:
            files[kind.__module__] = None
            yield from _functions(vars(kind))
    attention = attention_function(model)
    for name in (*files, str(getattr(attention, "__module__", "")), torch.nn.functional.__name__):
        file = sys.modules.get(name)
        if file is not None:
            yield from _functions(vars(file))
    if isinstance(attention, FunctionType):
        yield weakref.ref(attention)


def _functions(names: Any) -> Iterator[Hashable]:
    for name, value in list(names.items()):
        if isinstance(value, FunctionType):
            yield name, weakref.ref(value)
        elif callable(value) and not isinstance(value, type):  # written in C, wrapped, or somebody's object
            yield name, id(value)


_seen: PerModel[dict[Hashable, str | None]] = PerModel(dict)  # of a module, what is broken in weights of this stamp


def broken_weight(module: nn.Module) -> str | None:
    """Broken weight, as "3 of 1024 numbers of fc.weight are NaN or infinite"; None = nothing. Weights that are
    quantised, sharded or on no device are not looked at. What is written through ``.data`` later goes unseen."""
    return latest(_seen.of(module), weights_stamp(module.parameters()), lambda: look_for_broken_weight(module))


@torch.no_grad()
def look_for_broken_weight(module: nn.Module) -> str | None:
    """The same, whatever was seen before."""
    for name, weight in module.named_parameters():
        if type(weight.detach()) is not Tensor or weight.dtype not in COMPUTE_DTYPES or weight.is_meta:
            continue
        # A sum takes no memory; where one overflows, a closer look decides.
        wide = torch.float64 if weight.dtype is torch.float64 else torch.float32
        if not weight.sum(dtype=wide).isfinite() and (bad := int((~weight.isfinite()).sum())):
            return f"{bad} of {weight.numel()} numbers of {name} are NaN or infinite"
    return None
