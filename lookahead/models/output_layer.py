"""Output layer of the model that heads run beside."""

from copy import deepcopy
from itertools import chain
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from jacobi import LookaheadError
from lookahead._per_model import PerModel

Head = TypeVar("Head", bound=nn.Module)

_copies: PerModel[WeakKeyDictionary[nn.Module, nn.Module]] = PerModel(WeakKeyDictionary)  # of heads, for their models

MOST_LOGITS = 1 << 24  # numbers that scores may take at once: 64 MB in float32
COMPUTE_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # others only store


def output_layer(model: Any) -> nn.Module:
    """The layer that turns the last hidden states of ``model`` into logits; a LookaheadError if it does not say."""
    get = getattr(model, "get_output_embeddings", None)
    try:
        layer = get() if callable(get) else None
    except (NotImplementedError, AttributeError):
        layer = None
    if not isinstance(layer, nn.Module):
        raise LookaheadError(
            f"The output layer of {type(model).__name__} cannot be reached: expected get_output_embeddings() to return "
            f"a module, got {type(layer).__name__}. Medusa's heads need a causal language model."
        )
    return layer


def output_sizes(model: Any) -> tuple[int, int]:
    """The hidden size and the vocabulary of the output layer of ``model``; a LookaheadError if they cannot be seen. The
    layer's own sizes come first; the config's may differ, if embeddings were resized or are projected."""
    layer = output_layer(model)
    weight, config = _weight(layer), getattr(model, "config", None)
    candidates = [(getattr(layer, "in_features", None), getattr(layer, "out_features", None))]
    if weight is not None and weight.ndim == 2 and weight.is_floating_point():
        candidates.append((weight.shape[1], weight.shape[0]))
    if config is not None and hasattr(config, "get_text_config"):
        text = config.get_text_config()
        candidates.append((getattr(text, "hidden_size", None), getattr(text, "vocab_size", None)))
    for hidden_size, vocab_size in candidates:
        if isinstance(hidden_size, int) and isinstance(vocab_size, int):
            return hidden_size, vocab_size
    raise LookaheadError(
        f"The sizes of the output layer of {type(model).__name__}, a {type(layer).__name__}, cannot be seen: expected "
        "in_features and out_features, a weight [vocab, hidden], or hidden_size and vocab_size in the config."
    )


def placement(model: Any) -> tuple[torch.device, torch.dtype]:
    """The best place for heads: the device of the output layer of ``model``, and the dtype that it computes in."""
    layer = output_layer(model)
    tensors = list(chain(layer.parameters(), layer.buffers()))
    hook = getattr(layer, "_hf_hook", None)  # of a layer whose weight is fetched for each run
    device: Any = getattr(hook, "execution_device", None)
    if device is None:
        device = tensors[0].device if tensors else getattr(model, "device", "cpu")
    weight = _weight(layer)
    stored = [weight.dtype if weight is not None else None, getattr(model, "dtype", None)]
    computes = next((dtype for dtype in stored + [tensor.dtype for tensor in tensors] if dtype in COMPUTE_DTYPES), None)
    return torch.device(device), computes or torch.float32


def beside(model: Any, head: Head) -> Head:
    """A head that computes where and as the output layer of ``model`` does: itself, or a copy kept with the model."""
    device, dtype = placement(model)
    copies = _copies.of(model)
    for known in (head, copies.get(head)):
        first = None if known is None else next(known.parameters())
        if first is not None and (first.device, first.dtype) == (device, dtype):
            return known  # type: ignore[return-value]
    copies[head] = deepcopy(head).to(device=device, dtype=dtype)
    return copies[head]  # type: ignore[return-value]


def _weight(layer: nn.Module) -> Tensor | None:
    """The weight of a layer; None if a quantised one keeps it under another name or packed."""
    weight = getattr(layer, "weight", None)
    return weight if isinstance(weight, Tensor) else None


def copyable_weight(layer: nn.Module) -> Tensor | None:
    """The weight of a layer, ``[out, in]``; None if it is quantised, sharded or offloaded."""
    weight = _weight(layer)
    if weight is None or weight.is_meta or weight.dtype not in COMPUTE_DTYPES or weight.ndim != 2:
        return None
    return weight.detach() if type(weight.detach()) is Tensor else None
