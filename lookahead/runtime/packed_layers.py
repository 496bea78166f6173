"""Linear layers over packed weights, and a model's twin that has them."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from lookahead.models.twins import twin_of

_ROWS_HINT = 16  # of the input, for which oneDNN chooses a layout; the others cost hardly more

Packed = dict[int, Tensor]  # by the id of the weight

_SOURCE = """
def packed_linear(rows: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
"""


@cache
def _kernel() -> Any:
    """oneDNN's linear layer; a RuntimeError where torch was built without it. Compiled, because the tracer of
    `runtime.tracing` knows no operation with such a list of options."""
    return torch.jit.CompilationUnit(_SOURCE).packed_linear


def packed_linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    output: Tensor = _kernel()(rows, weight, bias)
    return output


class PackedLinear(nn.Linear):
    """A linear layer beside whose weight lies a packed copy, ``packed``."""

    packed: Tensor
    packs_single: bool  # whether a single row, too, gains by it

    def forward(self, input: Tensor) -> Tensor:
        rows = input.numel() // max(1, input.shape[-1])
        if rows == 0 or (rows == 1 and not self.packs_single):
            return nn.functional.linear(input, self.weight, self.bias)
        return packed_linear(input, self.packed, self.bias)


def pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS_HINT)
    return packed


def twin_over(model: nn.Module, packed: Packed, singles: Mapping[torch.Size, bool]) -> Any:
    """The model's modules, its linear layers over their ``packed`` weights; ``singles`` says of each shape whether a
    single row gains as well."""

    def change(twin: Any) -> None:
        weight = packed.get(id(twin._parameters.get("weight"))) if type(twin) is nn.Linear else None
        if weight is not None:
            twin.__dict__["_buffers"] = {"packed": weight}
            twin.__dict__["packs_single"] = singles.get(twin.weight.shape, True)
            twin.__class__ = PackedLinear

    return twin_of(model, change)
