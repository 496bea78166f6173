"""Attention whose sums run in the order of the text, so that a node's numbers depend on its text alone.

The kernels of torch add what a node sees in lanes and blocks that follow its slots and the number of rows. A token's
numbers then change by a rounding with the tree that it is drafted in, and in bfloat16 that decides texts. Here a block
is 64 positions of the text, and within it keys come one after the other: first those of the text, then nodes, parents
before children. Hidden ones add exactly nothing::

    the text so far a b c, a tree d(e, f(g))      slots  a b c d e f g      g adds  a b c d . f g
    the same once d, f and g are kept             slots  a b c d f g        g adds  a b c d f g

The kernel is `_c/attention.c`, an operation of torch's. Where plain decoding's own numbers are wanted, `_c/singly.c`
adds as torch's kernel for a single token does, if trials (`singly.py`) say so; else that one computes nodes in `turns`.
"""

import torch
from torch import Tensor, nn

from lookahead import _native
from lookahead.runtime.registry import this_pass
from lookahead.runtime.turns import attend_in_turn

_left_out: set[type[nn.Module]] = set()  # attention layers that this cannot stand in for


def leave_out(layer: nn.Module) -> None:
    """Note that a pass was to add in order, and this layer of it did not."""
    _left_out.add(type(layer))


def left_out(model: nn.Module) -> str | None:
    """Why not all of a model's attention is in order, as far as passes have shown; None = all was."""
    for layer in model.modules() if _left_out else ():
        if type(layer) in _left_out:
            return f"{type(layer).__name__} attends with masks, biases or values of its own"
    return None


def obstacle(dtype: torch.dtype = torch.bfloat16) -> str | None:
    """Why there is no such attention in a dtype of 16 bits on this machine; None = there is."""
    if _native.speedups is None:
        return f"the C part is missing ({_native.missing})"
    if not _native.operations():
        return "torch takes no operations in C here"
    states, alone = [torch.zeros(1, 1, 1, 1, dtype=dtype)] * 4, torch.tensor([[0] * 6 + [1, 0]], dtype=torch.int32)
    is_taken = torch.ops.lookahead.attended(*states, alone, 1.0, 0).ndim == states[0].ndim
    return None if is_taken else f"the C part is built without {str(dtype).removeprefix('torch.')}"


def serves(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether :func:`attend` takes these."""
    given = [query, key, value, *(() if mask is None else (mask,))]
    plain = all(each.dtype == query.dtype and each.device.type == "cpu" for each in given)
    shown = mask is None or mask.shape[1] == 1
    return plain and query.dtype.itemsize == 2 and shown and key.shape == value.shape


def scale_of(query: Tensor, scale: float | None) -> float:
    return float(query.shape[-1] ** -0.5) if scale is None else scale


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sequences: Tensor, scale: float, windowed: int = 0
) -> Tensor:
    """Attention of a pass's nodes over the history and themselves.

    Args:
        query: ``[batch, head, node, channel]``.
        key, value: ``[batch, key head, slot, channel]``; the last slots are the nodes'.
        mask: additive, ``[batch, 1, node, slot]``; None = everything is seen.
        sequences: int32 ``[batch, 7 + node]``: the slot of a sequence's first token and of the one after its last,
            the first slot of the nodes; how sums are ordered (`.singly`); slots of layers with a window, 0 = all; which
            sequence it is in plain decoding, and of how many; the depths of nodes.
        windowed: not 0 if this layer has a window.

    Returns:
        ``[batch, node, head, channel]``.
    """
    batch, heads, nodes, channels = query.shape
    turns = this_pass.turns
    if turns is not None and all(turn.whole for turn in turns):
        output = query.new_zeros(batch, nodes, heads, channels)
    else:
        shown = query.new_empty(1, 1, 1, 0) if mask is None else mask
        output = torch.ops.lookahead.attended(query, key, value, shown, sequences, scale, windowed)
        if output.shape != query.shape:
            raise ValueError("expected slots, masks and places of the same sequences and nodes")
        output = output.transpose(1, 2)
    if turns is not None:
        attend_in_turn(query, key, value, turns, scale, output)
    return output


_native.LIBRARY.impl("attend", attend, "CPU")
