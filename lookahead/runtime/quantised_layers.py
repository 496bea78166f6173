"""Linear layers with weights of 8 or 4 bits, by kernels for a CPU that give any number of rows the same.

Microseconds of a layer of 4,864 outputs and 896 inputs for so many rows (a thread of an EPYC, 24 layers in turn)::

    rows                      1      4      8     16     32     64   relative error of outputs
    bfloat16, packed        242    237    261    456    739  1,325   0.002
    int8, ours              129    127    143    232    394    692   0.011
    int8, oneDNN's          207    207    271    437    557    856   0.011    (without AVX-512 and VNNI)
    int4, torch's           153    238    443    879  1,701  3,329   0.078

int8 rounds each row of input by its own largest number, once for layers beside each other that read the same, which
compute as one. Sums of integers are exact, so a row's bits are the same beside any others, and more rows cost little.
int4 (32 inputs share a scale and an offset: five bits a weight) goes row by row: slow for a prompt.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from math import exp
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from jacobi import LookaheadError
from lookahead.runtime.byte_layers import in_fours, is_in_fours, product_of_bytes
from lookahead.runtime.packed_layers import SharedOutputs, can_be_packed, groups_of

BitWidth = Literal["int8", "int4"]
_NAMED = 3  # layers that an error names, at most
_LEVELS = 127  # of numbers of 8 bits, to either side of 0
_GROUP = 32  # inputs of a row of weights of 4 bits that share a scale; larger groups are no faster
_STEPS = 15  # of numbers of 4 bits, from a group's least to its largest
_OUTPUTS_TOGETHER = 16  # of which the 4-bit kernel takes multiples
_PART = 8192  # outputs that are rounded at a time, to hold no whole output layer in float32
_TINY = 1e-30  # the least step of a row or a group, for those of zeros alone


_SOURCE = """
def product(rows: Tensor, weight: Tensor, scales: Tensor, bias: Tensor, tiny: float) -> Tensor:
    wide = rows.float()
    steps = wide.abs().amax(1, True).div_(127).clamp_min_(tiny)
    numbers = wide.div(steps).round_().add_(128).to(torch.uint8)
    zeros = torch.zeros([scales.size(0)], dtype=torch.int64)
    outputs = torch.ops.onednn.qlinear_pointwise(
        numbers, 1.0, 128, weight, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return outputs.mul_(steps).add_(bias)
"""


@cache
def _kernels() -> Any:
    """Rounding of inputs, and oneDNN's product of bytes. Compiled, as a list of options cannot be traced."""
    return torch.jit.CompilationUnit(_SOURCE)


class QuantisedLinear(nn.Module):
    """A linear layer whose weight is packed and can neither be changed, moved nor saved."""

    packed: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, layer: nn.Linear, packed: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        for name, tensor in {"packed": packed, "scales": scales, "bias": bias}.items():
            self.register_buffer(name, tensor, persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        shape = (*input.shape[:-1], self.out_features)
        return self._outputs(input).to(input.dtype).reshape(shape) if input.numel() else input.new_empty(shape)

    @abstractmethod
    def _outputs(self, input: Tensor) -> Tensor:
        """Outputs ``[row, out]``."""

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = memo[id(self)] = self.__class__.__new__(self.__class__)
        twin.__dict__.update(vars(self))
        return twin

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        return self

    def _save_to_state_dict(self, *_: Any) -> None:
        raise LookaheadError("A model that quantize() changed cannot be saved: save the original one, and quantise it.")


class Int8Linear(QuantisedLinear):
    """A layer with a scale for each output, whose inputs are rounded row by row; packed with others that read them."""

    bias: Tensor  # of the group, as weight and scales
    sizes: list[int]  # outputs of each layer of the group
    outputs: SharedOutputs  # of the group
    place: int

    def _outputs(self, input: Tensor) -> Tensor:
        return self.outputs.take(self.place, input, self._of_group)

    def _of_group(self, input: Tensor) -> Sequence[Tensor]:
        rows = input.reshape(-1, self.in_features).contiguous()
        if is_in_fours(self.packed):
            outputs = product_of_bytes(rows, self.packed, self.scales, self.bias)
        else:
            outputs = _kernels().product(rows, self.packed, self.scales, self.bias, _TINY)
        return [part.contiguous() for part in outputs.split(self.sizes, -1)]


def int8_layers(group: Sequence[nn.Linear]) -> list[Int8Linear]:
    """Layers that read the same input, in int8."""
    weights = [layer.weight.detach() for layer in group]
    scales = torch.cat([weight.abs().amax(1) for weight in weights]).float().div_(_LEVELS).clamp_min_(_TINY)
    numbers = torch.empty(len(scales), group[0].in_features, dtype=torch.int8)
    parts = [part for weight in weights for part in weight.split(_PART)]
    sizes = list(map(len, parts))
    for part, scale, into in zip(parts, scales.split(sizes), numbers.split(sizes), strict=True):
        into.copy_(part.float().div_(scale[:, None]).round_())
    none = weights[0].new_zeros(1)
    bias = torch.cat([none.expand(each.out_features) if each.bias is None else each.bias.detach() for each in group])
    packed = in_fours(numbers)
    packed = torch.ops.onednn.qlinear_prepack(numbers, None) if packed is None else packed
    made, outputs = [Int8Linear(layer, packed, scales, bias) for layer in group], SharedOutputs()
    for place, layer in enumerate(made):
        layer.place, layer.sizes, layer.outputs = place, list(map(len, weights)), outputs
    return made


class Int4Linear(QuantisedLinear):
    """A layer with a scale and an offset for each group of inputs of an output."""

    def __init__(self, layer: nn.Linear) -> None:
        weight = layer.weight.detach()
        groups = weight.float().view(len(weight), -1, _GROUP)
        least, largest = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
        steps = ((largest - least) / _STEPS).clamp_min_(_TINY)
        numbers = ((groups - least) / steps).round_().to(torch.int32).view(weight.shape)
        middle = least + (_STEPS + 1) // 2 * steps  # to which the kernel's offset belongs
        scales = torch.cat([steps, middle], 2).transpose(0, 1).to(weight.dtype).contiguous()
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, 1)
        super().__init__(layer, packed, scales, None if layer.bias is None else layer.bias.detach())

    def _outputs(self, input: Tensor) -> Tensor:
        rows = input.reshape(-1, self.in_features).contiguous()
        outputs = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.packed, _GROUP, self.scales)
        return outputs if self.bias is None else outputs + self.bias


def is_quantised(model: nn.Module) -> bool:
    """Whether layers of a model are these."""
    return any(isinstance(part, QuantisedLinear) for part in model.modules())


@cache
def adds_exactly() -> bool:
    """Whether this machine multiplies bytes without a sum running over, which processors without VNNI let happen."""
    layer = nn.Linear(_GROUP, _OUTPUTS_TOGETHER, bias=False)
    nn.init.constant_(layer.weight, 1.0)
    try:
        with torch.no_grad():
            outputs = int8_layers([layer])[0](torch.ones(2, _GROUP))
    except (RuntimeError, AttributeError):  # there is no such kernel
        return False
    return bool((outputs - _GROUP).abs().max() < 1e-3 * _GROUP)


def quantize(model: PreTrainedModel, bits: BitWidth = "int8") -> PreTrainedModel:
    """Give the linear layers of a bfloat16 model on a CPU weights of fewer bits, in place; the model is returned.

    The output layer is among them, always in int8, and apart from then on from embeddings that it was tied to. These
    stay as they are, as do layers of other kinds. Plain ``generate`` and lookahead write the same text with the result
    as far as they do with any model in bfloat16 (:doc:`Bits <internals/bits>`).

    Args:
        bits: ``"int8"`` is the faster in passes over several nodes and prompts, ``"int4"`` takes five bits a weight.

    Raises:
        LookaheadError: the model cannot be quantised; it is as it was.
    """
    layers = _checked(model, bits)
    output = model.get_output_embeddings()
    small = {layer for layer in layers.values() if bits == "int4" and layer is not output}
    together = [group for group in groups_of(model) if small.isdisjoint(group)]
    with torch.no_grad():
        made: dict[nn.Module, QuantisedLinear] = {layer: Int4Linear(layer) for layer in small}
        for group in together:
            made |= zip(group, int8_layers(group), strict=True)
        for name, layer in layers.items():
            model.set_submodule(name, made[layer].train(layer.training))
        for weight in model.parameters():  # else the whole file that they are read from stays in memory
            weight.data = weight.data.clone()
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False
    return model


def _checked(model: PreTrainedModel, bits: str) -> dict[str, nn.Linear]:
    """A model's linear layers by their names; a LookaheadError if it cannot be quantised."""
    if bits not in get_args(BitWidth):
        raise LookaheadError(f"bits must be 'int8' or 'int4': got {bits!r}.")
    name = type(model).__name__
    if getattr(model, "is_quantized", False) or is_quantised(model):
        raise LookaheadError(f"{name} is quantised already. Load it as it was trained, in bfloat16.")
    weights = list(model.parameters())
    places = {weight.device.type for weight in weights} - {"cpu"}
    if places:
        raise LookaheadError(f"{name} is on {', '.join(sorted(places))}: expected a CPU, whose kernels these are.")
    others = {str(weight.dtype).removeprefix("torch.") for weight in weights} - {"bfloat16"}
    if others:
        raise LookaheadError(f"{name} has weights in {', '.join(sorted(others))}: load it with dtype=torch.bfloat16.")
    layers = {path: part for path, part in model.named_modules() if can_be_packed(part)}
    if not layers:
        raise LookaheadError(f"{name} has no linear layers of torch's, so nothing of it can be quantised.")
    sizes = {path: (part.in_features % _GROUP, part.out_features % _OUTPUTS_TOGETHER) for path, part in layers.items()}
    odd = [path for path, left_over in sizes.items() if any(left_over)]
    if bits == "int4" and odd:
        raise LookaheadError(
            f"{', '.join(odd[:_NAMED])} of {name} cannot take int4: expected inputs in multiples of 32 and outputs in "
            "multiples of 16. Take int8."
        )
    if not adds_exactly():
        raise LookaheadError("Here is no exact kernel for products of bytes (oneDNN; AVX-512 or AVX2 with VNNI).")
    return layers


@torch.no_grad()
def perplexity(model: PreTrainedModel, ids: Tensor) -> float:
    """How many tokens the model wavers between at each token of a text ``[1, tokens]`` behind the first."""
    logits = model(input_ids=ids).logits[0, :-1].float()
    return exp(nn.functional.cross_entropy(logits, ids[0, 1:]).item())
