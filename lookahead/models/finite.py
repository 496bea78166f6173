"""Check that a module's weights are numbers: looked at once, for as long as none moves or changes."""

from collections.abc import Hashable

import torch
from torch import Tensor, nn

from lookahead._per_model import PerModel, latest
from lookahead.models.fingerprint import weights_stamp
from lookahead.models.output_layer import COMPUTE_DTYPES

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
