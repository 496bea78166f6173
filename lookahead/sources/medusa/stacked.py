"""All heads' blocks in one product a layer: for small heads, calling them one by one is most of what they take."""

import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from lookahead.sources.medusa.heads import MedusaHeads
from lookahead.sources.medusa.network import Output, ResBlock

_MOST_BYTES = 4 << 20  # of a block's weight; with larger ones the products themselves are what takes time
_MOST_COPIED = 64 << 20  # bytes of all weights together, which are held twice

Stamp = tuple[tuple[int, int], ...]

_stacks: "weakref.WeakKeyDictionary[MedusaHeads, tuple[Stamp, StackedBlocks]]" = weakref.WeakKeyDictionary()


class StackedBlocks:
    """What :meth:`MedusaHeads.states` computes, from copies of the heads' weights.

    Args:
        heads: all of whose blocks are plain ones in one place and dtype.
    """

    def __init__(self, heads: MedusaHeads) -> None:
        layers = list(zip(*(blocks.children() for blocks in heads.blocks), strict=True))
        with torch.no_grad():
            self._weights = [torch.stack([block.linear.weight.T for block in layer]) for layer in layers]
            self._biases = [torch.stack([block.linear.bias for block in layer])[:, None] for layer in layers]
        self._heads = heads.num_heads

    def __call__(self, hidden: Tensor) -> Tensor:
        """What the output layers read: ``[place, hidden]`` to ``[head, place, hidden]``."""
        states = hidden.to(self._weights[0].device, self._weights[0].dtype).expand(self._heads, -1, -1)
        for weight, bias in zip(self._weights, self._biases, strict=True):
            states = states + silu(torch.baddbmm(bias, states, weight))
        return states.to(hidden.device, hidden.dtype)


def fast_heads(heads: MedusaHeads) -> Callable[[Tensor, Output], Tensor]:
    """The fastest way from a few hidden states ``[place, hidden]`` to the heads' logits ``[head, place, vocab]``.

    With small blocks that is stacked copies, kept for as long as the heads live and their weights stay as they are;
    else the heads themselves.
    """
    parts = [part for module in (heads, heads.blocks) for part in (module, *module.children())]
    blocks = [block for blocks in heads.blocks for block in blocks.children()]
    if type(heads) is not MedusaHeads or not blocks or not all(map(_is_plain, blocks)) or any(map(_is_hooked, parts)):
        return heads
    weights = list(heads.blocks.parameters())
    size = max(weight.nbytes for weight in weights)
    alike = len({(weight.device, weight.dtype) for weight in weights}) == 1
    counted = not any(weight.is_inference() for weight in weights)  # changes of the others are
    if not (alike and counted) or size > _MOST_BYTES or size * len(blocks) > _MOST_COPIED:
        return heads
    stamp = tuple((weight.data_ptr(), weight._version) for weight in weights)
    known = _stacks.get(heads)
    if known is None or known[0] != stamp:
        known = _stacks[heads] = stamp, StackedBlocks(heads)
    states = known[1]
    return lambda hidden, output: heads.logits(states(hidden), output)


def _is_plain(block: nn.Module) -> bool:
    """Whether a block is one of ours as it was made: not quantised or adapted, no hooks."""
    return (
        type(block) is ResBlock and type(block.linear) is nn.Linear and not any(map(_is_hooked, (block, block.linear)))
    )


def _is_hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)
