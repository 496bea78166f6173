"""Linear layers over packed weights, those that read the same input as one.

A layer of a few rows takes little longer for more outputs, as its input is read and threads are woken once. So what
attention and feed-forward layers compute side by side from one input is packed together::

    input --+-- q_proj [256, 256]
            +-- k_proj [128, 256]  =  input --- [512, 256]      60 us -> 20 us (4 rows, bfloat16)
            +-- v_proj [128, 256]

The model's code goes on calling one layer after the other: the first computes for all, and the others take their part.

Where a processor has no instructions for a half-precision dtype, torch reads each weight once for each row, and four
rows take four times what one takes. Weights are packed in float32 there, and outputs rounded to the layer's own dtype::

    rows (576 to 1,536 outputs, one core without AVX-512)    1      4      8     16
    bfloat16, as it lies, ms                               0.23   0.86   1.70   3.36
    bfloat16, packed in float32, ms                        0.19   0.26   0.32   0.51
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from lookahead.models.code_safety import is_plain_linear
from lookahead.models.early_exit import twin_of
from lookahead.runtime.layer_trials import ANY_ROWS, COLUMNS, RowRange, chains_of, in_columns

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ROWS_HINT = 16  # of the input, for which oneDNN chooses a layout; the others cost hardly more
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # layers of one module with the same input

Group = tuple[nn.Linear, ...]  # layers that are packed as one
Shapes = tuple[torch.Size, ...]  # of a group's weights


class Part(NamedTuple):
    """What a layer's outputs come from: the packed weight and the bias of its group, of which the layer at ``place``
    has as many rows as ``sizes`` says; ``single``: a single row of input, too, gains by it."""

    weight: Tensor
    bias: Tensor | None
    sizes: tuple[int, ...]
    place: int
    single: bool


Parts = dict[int, Part]  # by the id of the layer's own weight


@dataclass(frozen=True, slots=True)
class Invariance:
    """How passes are run in which a node's numbers depend on its text alone.

    Attributes:
        rows: of linear layers, by the features of their input; of others any number.
        turns: the first position from which on nodes are attended to together, not one by one as in plain decoding.
        singly: how attention computes each node as plain decoding does (`.singly`); 0 = it does not.
    """

    rows: dict[int, RowRange]
    turns: int = 0
    singly: int = 0

    def of(self, layer: nn.Linear) -> RowRange:
        return self.rows.get(layer.in_features, ANY_ROWS)


class Packed(NamedTuple):
    """How the linear layers of passes are run: those of ``parts`` over packed weights, each within its ``limits``; None
    = in any way that is fast."""

    parts: Parts
    limits: Invariance | None = None


_SOURCE = """
def product(rows: Tensor, weight: Tensor, bias: Optional[Tensor], packed: bool, chain: int) -> Tensor:
    if chain > 0 or weight.dim() == 3:
        flat = rows.reshape(-1, rows.size(-1)).contiguous()
        none = flat.new_empty([0]) if bias is None else bias
        outputs = torch.ops.lookahead.multiplied(flat, weight, none, chain if chain > 0 else 512)
        return outputs.view(rows.shape[:-1] + [outputs.size(-1)])
    if not packed:
        return torch.nn.functional.linear(rows, weight, bias)
    outputs = torch.ops.mkldnn._linear_pointwise(rows.to(weight.dtype), weight, bias, "none", [], "")
    return outputs.to(rows.dtype)


def linear(rows: Tensor, weight: Tensor, bias: Optional[Tensor], packed: bool, least: int, most: int,
           chain: int) -> Tensor:
    count = rows.numel() // rows.size(-1)
    if least <= count and count <= most:
        return product(rows, weight, bias, packed, chain)
    flat = rows.reshape(-1, rows.size(-1))
    parts: List[Tensor] = []
    for start in range(0, count, most):
        part = flat[start : start + most]
        size = part.size(0)
        if size < least:
            part = torch.cat([part, part[:1].expand(least - size, -1)])
        parts = parts + [product(part, weight, bias, packed, chain)[:size]]
    outputs = parts[0] if len(parts) == 1 else torch.cat(parts)
    return outputs.view(rows.shape[:-1] + [outputs.size(-1)])
"""


@cache
def _kernel() -> Any:
    """oneDNN's linear layer, or ours; a RuntimeError where torch was built without it. Compiled, because the tracer of
    `runtime.tracing` knows no operation with such a list of options, and would freeze the number of rows; named as what
    saved traces may call."""
    graph = torch.jit.CompilationUnit(_SOURCE).linear.inlined_graph
    return torch._C.CompilationUnit().create_function("__torch__.lookahead.linear", graph)


def packed_linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None, limits: RowRange = ANY_ROWS) -> Tensor:
    return _kernel()(rows, weight, bias, True, *limits)


def limited_linear(rows: Tensor, weight: Tensor, bias: Tensor | None, limits: RowRange) -> Tensor:
    """torch's linear layer, given as many rows at a time as ``limits`` say."""
    return _kernel()(rows, weight, bias, False, *limits)


@cache
def computed_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which this processor multiplies numbers of ``dtype``: float32 where it has no way for it."""
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}.get(dtype, "")
    is_supported = getattr(torch.ops.mkldnn, name, None)
    return dtype if is_supported is None or is_supported() else torch.float32


def pack(group: Group) -> Tensor:
    """The weights ``[out, in]`` of a group one below the other, in columns or in oneDNN's layout."""
    return pack_weight(_joined([layer.weight for layer in group]), all(map(chains_of, group)))


def pack_weight(weight: Tensor, chained: bool) -> Tensor:
    whole = weight.detach().to(computed_dtype(weight.dtype))
    if chained and len(weight) % COLUMNS == 0:
        return in_columns(whole)
    return torch.ops.mkldnn._reorder_linear_weight(whole, _ROWS_HINT)


def packed_bytes(layers: Sequence[nn.Linear]) -> int:
    """The size of packed weights."""
    return sum(layer.weight.numel() * computed_dtype(layer.weight.dtype).itemsize for layer in layers)


def parts_of(group: Group, single: bool) -> Parts:
    """A group's layers over their packed weight, by the ids of their own."""
    biases = [layer.bias for layer in group if layer.bias is not None]
    weight = pack(group)
    bias = _joined(biases).to(weight.dtype) if biases else None
    sizes = tuple(layer.out_features for layer in group)
    return {id(layer.weight): Part(weight, bias, sizes, place, single) for place, layer in enumerate(group)}


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def can_be_packed(layer: nn.Module | None) -> TypeGuard[nn.Linear]:
    """Whether it is a plain linear layer, of a kind that oneDNN packs."""
    weight = layer.weight if is_plain_linear(layer) else None
    return weight is not None and weight.device.type == "cpu" and weight.dtype in _DTYPES and weight.is_contiguous()


def groups_of(model: nn.Module) -> list[Group]:
    """A model's linear layers in their order, those that read the same input together, each other one by itself."""
    together: dict[int, Group] = {}
    for module in model.modules():
        for names in _TOGETHER:
            group = tuple(layer for name in names if can_be_packed(layer := module._modules.get(name)))
            alike = {(layer.in_features, layer.weight.dtype, layer.bias is None) for layer in group}
            if len(group) == len(names) and len(alike) == 1:
                together |= dict.fromkeys(map(id, group), group)
    layers = filter(can_be_packed, model.modules())
    return list(dict.fromkeys(together.get(id(layer), (layer,)) for layer in layers))


def shapes_of(group: Group) -> Shapes:
    return tuple(layer.weight.shape for layer in group)


class SharedOutputs:
    """What layers that read the same input have computed of their last one, and some have not taken yet."""

    def __init__(self) -> None:
        self._last: tuple[Tensor, dict[int, Tensor]] | None = None

    def take(self, place: int, input: Tensor, compute: Callable[[Tensor], Sequence[Tensor]]) -> Tensor:
        """The outputs of the layer at ``place``; of another input than the last one, ``compute`` gives all layers'."""
        last = self._last
        if last is None or last[0] is not input or place not in last[1]:
            last = self._last = input, dict(enumerate(compute(input)))
        taken = last[1].pop(place)
        if not last[1]:
            self._last = None
        return taken


class TwinLinear(nn.Linear):
    """A linear layer of a twin, given so many rows at a time: over the packed weight of its group, or over its own."""

    packed: Tensor
    packed_bias: Tensor | None
    part: Part | None  # None = it is not packed
    outputs: SharedOutputs | None  # of the group; None = the layer is alone
    limits: RowRange

    def forward(self, input: Tensor) -> Tensor:
        part, rows = self.part, input.numel() // max(1, input.shape[-1])
        gains = part is None or part.single or self.limits.least > 1 or self.limits.chain  # or it adds as several do
        if rows == 0 or (rows == 1 and not gains):
            return nn.functional.linear(input, self.weight, self.bias)
        if part is None or (self.limits.chain and part.weight.ndim == 2):
            return limited_linear(input, self.weight, self.bias, self.limits)
        if self.outputs is None:
            return packed_linear(input, self.packed, self.packed_bias, self.limits)
        return self.outputs.take(part.place, input, self._of_group)

    def _of_group(self, input: Tensor) -> Sequence[Tensor]:
        assert self.part is not None  # it has a group
        outputs = packed_linear(input, self.packed, self.packed_bias, self.limits).split(self.part.sizes, -1)
        # Some operations round otherwise where numbers lie apart.
        return outputs if self.limits == ANY_ROWS else [part.contiguous() for part in outputs]


def packed_twin(model: nn.Module, packed: Packed) -> Any:
    """The model's modules, its linear layers run as ``packed`` says."""
    groups: dict[int, SharedOutputs] = {}  # by the id of a group's weight
    limits = packed.limits or Invariance({})

    def change(twin: Any) -> None:
        if not is_plain_linear(twin):
            return
        own, part = limits.of(twin), packed.parts.get(id(twin._parameters.get("weight")))
        if part is None and own == ANY_ROWS:
            return
        outputs = None
        if part is not None:
            twin.__dict__["_buffers"] = {"packed": part.weight, "packed_bias": part.bias}
            outputs = groups.setdefault(id(part.weight), SharedOutputs()) if len(part.sizes) > 1 else None
        twin.__dict__.update(part=part, outputs=outputs, limits=own)
        twin.__class__ = TwinLinear

    return twin_of(model, change)
