"""Models with weights of 8 or 4 bits, for a CPU."""

from math import exp
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from jacobi import LookaheadError
from lookahead.runtime.packed_layers import can_be_packed, groups_of
from lookahead.runtime.quantised_layers import (
    Int4Linear,
    QuantisedLinear,
    adds_exactly,
    fits_int4,
    int8_layers,
    is_quantised,
)

BitWidth = Literal["int8", "int4"]
_NAMED = 3  # layers that an error names, at most


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
        raise LookaheadError(
            f"{name} is on {', '.join(sorted(places))}: expected a model on a CPU, whose kernels these are."
        )
    others = {str(weight.dtype).removeprefix("torch.") for weight in weights} - {"bfloat16"}
    if others:
        raise LookaheadError(f"{name} has weights in {', '.join(sorted(others))}: load it with dtype=torch.bfloat16.")
    layers = {path: part for path, part in model.named_modules() if can_be_packed(part)}
    if not layers:
        raise LookaheadError(f"{name} has no linear layers of torch's, so nothing of it can be quantised.")
    odd = [path for path, part in layers.items() if bits == "int4" and not fits_int4(part)]
    if odd:
        raise LookaheadError(
            f"{', '.join(odd[:_NAMED])} of {name} cannot take int4: expected inputs in multiples of 32 and outputs in "
            "multiples of 16. Take int8."
        )
    if not adds_exactly():
        raise LookaheadError(
            "This machine has no exact kernel for products of bytes (AVX-512 or AVX2 with VNNI, oneDNN)."
        )
    return layers


@torch.no_grad()
def perplexity(model: PreTrainedModel, ids: Tensor) -> float:
    """How many tokens the model wavers between at each token of a text ``[1, tokens]`` behind the first."""
    logits = model(input_ids=ids).logits[0, :-1].float()
    return exp(nn.functional.cross_entropy(logits, ids[0, 1:]).item())
