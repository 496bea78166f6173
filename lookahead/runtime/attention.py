"""Grouped-query attention under an explicit mask, without repeating keys and values.

transformers repeats every key/value head before a masked SDPA call, which costs 5 to 7 times the attention itself on
a CPU. While a decode of ours runs, the registered ``sdpa`` is wrapped, for threads that are inside a tree forward.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from jacobi import LookaheadError
from lookahead.runtime import ordered_attention as ordered
from lookahead.runtime.registry import During, Wrapped, this_pass
from lookahead.runtime.split_attention import RowsMask, fused_attention, serves

# On a CPU, packed rows win for passes of few nodes, where a key head is otherwise read once for each query head of its.
# Below so many elements of repeated keys they lose, as the copies cost more than that. Figures: docs/log/passes.md.
_PACKED_NODES = 8
_PACKED_ELEMENTS = 200_000
_PACKED_COST = 0.6  # of one thread's time without packing, at most
_MOST_MASKS = 4  # of packed rows, that a pass holds
_PACKED_COST_OF_SINGLE = 0.15  # the same for one node in bfloat16, whose kernel for single rows is slow


def _grouped_sdpa(
    original: Callable[..., tuple[Tensor, None]],
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """``sdpa`` as registered; inside our pass, query heads that share a key head are attended to together."""
    if not this_pass.masked:
        attention_mask = None
    is_on_cpu, packs = query.device.type == "cpu", this_pass.packed
    biased = kwargs.get("position_bias") is not None or "s_aux" in kwargs
    is_ours = this_pass.in_tree and not biased and _is_shared(query, attention_mask)
    scale, sequences = kwargs.get("scaling"), this_pass.sequences
    if sequences is not None:
        if is_ours and ordered.serves(query, key, value, attention_mask):
            scale, windowed = ordered.scale_of(query, scale), int(bool(kwargs.get("sliding_window")))
            return torch.ops.lookahead.attend(query, key, value, attention_mask, sequences, scale, windowed), None
        ordered.leave_out(module)
    if not is_ours:
        return original(module, query, key, value, attention_mask, **kwargs)
    if attention_mask is not None and serves(query, key, value, attention_mask):
        output = packed_attention(query, key, value, attention_mask, scale, fused=True)
    elif is_on_cpu and (packing_pays(query.shape, key.shape, query.dtype) if packs is None else packs):
        output = packed_attention(query, key, value, attention_mask, scale)
    elif query.shape[1] == key.shape[1]:
        return original(module, query, key, value, attention_mask, **kwargs)
    elif is_on_cpu:
        attend = torch.nn.functional.scaled_dot_product_attention
        output = attend(query, key, value, attn_mask=attention_mask, scale=scale, enable_gqa=True)
    else:  # on CUDA a masked grouped call falls back to the slowest kernel, a packed one does not
        output = packed_attention(query, key, value, attention_mask, scale)
    return output.transpose(1, 2).contiguous(), None


def _is_shared(query: Tensor, mask: Tensor | None) -> bool:
    """Whether all heads see the same; one token without a mask sees everything."""
    return mask.shape[1] == 1 if mask is not None else query.device.type == "cpu" and query.shape[2] == 1


def _rows_mask(mask: Tensor, nodes: int, heads: int) -> RowsMask:
    """The mask of packed rows, made once a pass."""
    made, key = {} if this_pass.masks is None else this_pass.masks, (id(mask), nodes, heads)
    if key not in made:
        if len(made) >= _MOST_MASKS:  # a model that makes one in every layer
            del made[next(iter(made))]
        made[key] = RowsMask(mask, nodes, heads)
    return made[key]


def packing_pays(query: Sequence[int], key: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether :func:`packed_attention` is the faster one on a CPU, for queries and keys of these shapes."""
    (batch, heads, nodes, channels), (_, key_heads, slots, _) = query, key
    is_slow_single = nodes == 1 and dtype == torch.bfloat16
    if heads == key_heads:
        return is_slow_single
    if not is_slow_single and (nodes > _PACKED_NODES or batch * heads * slots * channels < _PACKED_ELEMENTS):
        return False
    # A thread takes one head of one row at a time, and packing leaves fewer of them, which are longer.
    threads = torch.get_num_threads()
    cost = _PACKED_COST_OF_SINGLE if is_slow_single else _PACKED_COST
    return -(-batch * key_heads // threads) * (heads // key_heads) * cost < -(-batch * heads // threads)


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, *, fused: bool = False
) -> Tensor:
    """Grouped-query attention in which the query heads of one key head are rows of one larger query.

    A single row is attended to twice, because kernels for single rows are slow where this is asked for; not so by the
    ``fused`` ones, which need a mask.

    Args:
        query: ``[batch, head, node, channel]``; so is the output, by the value's channels.
        key, value: ``[batch, key head, slot, channel]``; the value's channels may be others.
        mask: additive, ``[batch, 1, node, slot]``; None = all slots are attended to.
        scale: of the scores; None is 1 over the root of the channels.
    """
    batch, heads, nodes, channels = query.shape
    key_heads = key.shape[1]
    rows = heads // key_heads * nodes
    packed = query.reshape(batch, key_heads, rows, channels)
    if rows == 1 and not fused:
        packed = packed.expand(-1, -1, 2, -1)
    bias = None if mask is None else _rows_mask(mask, nodes, packed.shape[2] // nodes)
    if fused and bias is not None:
        output = fused_attention(packed, key, value, bias, scale, planned=this_pass.planned)
    else:
        attend = torch.nn.functional.scaled_dot_product_attention
        output = attend(packed, key, value, attn_mask=None if bias is None else bias.rows, scale=scale)[:, :, :rows]
    return output.reshape(batch, heads, nodes, value.shape[-1])


# Keeps the wrapper registered while a block runs. A user's local override goes before it, and is left alone.
grouped_attention = Wrapped(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", _grouped_sdpa).on


@contextmanager
def switched_attention(model: PreTrainedModel, name: str | None) -> Iterator[None]:
    """Run ``model`` with another attention implementation (``name``; None changes nothing) while the block runs. That
    is a setting of the model: nobody else may use the model in the meantime.

    Raises:
        LookaheadError: the model has no such implementation, or cannot change it.
    """
    if name is None or model.config.get_text_config()._attn_implementation == name:
        yield
        return
    configs = {id(part.config): part.config for part in model.modules() if isinstance(part, PreTrainedModel)}
    for config in list(configs.values()):
        subs = [getattr(config, name, None) for name in getattr(config, "sub_configs", None) or ()]
        configs |= {id(sub): sub for sub in subs if sub is not None}
    before = [(config, config._attn_implementation_internal) for config in configs.values()]
    try:
        try:
            model.set_attn_implementation(name)
        except (ValueError, ImportError) as error:
            raise LookaheadError(f"attention={name!r} cannot be used with {type(model).__name__}: {error}") from error
        used = model.config.get_text_config()._attn_implementation
        if used != name:
            raise LookaheadError(
                f"attention={name!r} cannot be used with {type(model).__name__}: its implementation, {used!r}, is "
                "fixed when the model is made. Load it with attn_implementation='sdpa'."
            )
        yield
    finally:
        for config, own in before:
            config._attn_implementation_internal = own


def tree_forward(**told: Any) -> During:
    """Mark this thread as being inside a tree forward, and tell that (`runtime.registry`) what else there is to it."""
    return During(in_tree=True, masks={}, **told)
