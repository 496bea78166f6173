"""All heads' blocks in one product a layer: small heads take most of their time in being called one by one."""

from collections.abc import Callable, Hashable

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from lookahead._per_model import PerModel
from lookahead.models.fingerprint import is_hooked, weights_stamp
from lookahead.sources.medusa.heads import MedusaHeads
from lookahead.sources.medusa.network import Output, ResBlock

_MOST_BYTES = 4 << 20  # of a block's weight; with larger ones the products themselves take the time
_MOST_COPIED = 64 << 20  # bytes of all weights together, which are held twice

States = Callable[[Tensor], Tensor]  # from [token, hidden] to what the output layers read, [head, token, hidden]

_stacks: PerModel[dict[Hashable, States]] = PerModel(dict)  # of each heads' module, by the stamp of its weights


def _stacked(heads: MedusaHeads) -> States:
    """What :meth:`MedusaHeads.states` computes, from stacked copies of the heads' weights."""
    layers = list(zip(*(blocks.children() for blocks in heads.blocks), strict=True))
    with torch.no_grad():
        weights = [torch.stack([block.linear.weight.T for block in layer]) for layer in layers]
        biases = [torch.stack([block.linear.bias for block in layer])[:, None] for layer in layers]
    count = heads.num_heads  # of the heads nothing else is kept

    def states(hidden: Tensor) -> Tensor:
        found = hidden.to(weights[0].device, weights[0].dtype).expand(count, -1, -1)
        for weight, bias in zip(weights, biases, strict=True):
            found = found + silu(torch.baddbmm(bias, found, weight))
        return found.to(hidden.device, hidden.dtype)

    return states


def fast_heads(heads: MedusaHeads) -> Callable[[Tensor, Output], Tensor]:
    """The fastest way from a few hidden states ``[token, hidden]`` to the heads' logits ``[head, token, vocab]``.

    For small blocks those are stacked copies, kept until a weight changes; otherwise the heads themselves.
    """
    parts = [part for module in (heads, heads.blocks) for part in (module, *module.children())]
    blocks = [block for blocks in heads.blocks for block in blocks.children()]
    if type(heads) is not MedusaHeads or not blocks or not all(map(_is_plain, blocks)) or any(map(is_hooked, parts)):
        return heads
    weights = list(heads.blocks.parameters())
    size = max(weight.nbytes for weight in weights)
    alike = len({(weight.device, weight.dtype) for weight in weights}) == 1
    counted = not any(weight.is_inference() for weight in weights)  # changes of the others are
    if not (alike and counted) or size > _MOST_BYTES or size * len(blocks) > _MOST_COPIED:
        return heads
    stamp, kept = weights_stamp(weights), _stacks.of(heads)
    states = kept.get(stamp)
    if states is None:
        kept.clear()
        states = kept[stamp] = _stacked(heads)
    return lambda hidden, output: heads.logits(states(hidden), output)


def _is_plain(block: nn.Module) -> bool:
    """Whether a block is as it was made: not quantised or adapted, no hooks."""
    return type(block) is ResBlock and type(block.linear) is nn.Linear and not any(map(is_hooked, block.modules()))
