"""What a pass over several tokens takes more than one over a single token, told by a few linear layers."""

from collections import defaultdict
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from lookahead.models.code_safety import is_plain_linear

_SIZES = (1, 4, 16)  # whole float32 passes of 135M parameters over 1, 2, 4, 8, 16, 32: 64, 102, 113, 108, 122, 150 ms
_BYTES = 16 << 20  # of weights that each size reads: more than a core's cache, so that they come from memory
_LAYERS = 5  # at most, of which the fastest counts: others may have been held up


@torch.inference_mode()
def row_costs(model: nn.Module, batch: int = 1) -> dict[int, float] | None:
    """Milliseconds that all linear layers of a model on a CPU take for so many nodes of each sequence of a ``batch``,
    by some of the shape that most weights have, others for each size, so that none finds its weights in the cache.
    None = too few to tell."""
    shapes, whole = defaultdict[object, list[Tensor]](list), 0
    for layer in model.modules():
        if is_plain_linear(layer) and layer.weight.device.type == "cpu":
            shapes[layer.weight.shape, layer.weight.dtype].append(layer.weight.data)
            whole += layer.weight.numel()
    alike = max(shapes.values(), key=lambda weights: len(weights) * weights[0].numel(), default=[])
    most = len(alike) // len(_SIZES)
    if most < 2:
        return None
    one, found = alike[0], dict[int, float]()
    count = min(most, 1 + max(1, min(_LAYERS, _BYTES // (one.numel() * one.element_size()))))
    for place, nodes in enumerate(_SIZES):
        given, taken = torch.zeros(nodes * batch, one.shape[1], dtype=one.dtype), list[float]()
        for weight in alike[place * count : (place + 1) * count]:
            begun = perf_counter()
            linear(given, weight)
            taken.append(perf_counter() - begun)
        found[nodes] = 1e3 * min(taken[1:]) * whole / one.numel()  # the first one chooses kernels
    return found
