"""Medusa's heads for tiny models: random ones, and some that are right by construction."""

from typing import Any

import torch
from helpers.models import F64, VOCAB, counting_model, prompts, run
from torch import Tensor

from lookahead.medusa import MedusaHeads, output_layer
from lookahead.models.hidden_states import HiddenStates


def random_heads(model: Any, num_heads: int = 3, seed: int = 0, *, own_output: bool = False) -> MedusaHeads:
    """Heads with random blocks: candidates that have little to do with the text."""
    heads = MedusaHeads.for_model(model, num_heads, own_output=own_output)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in heads.blocks.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator, dtype=F64) * 0.5)
    return heads


def counting(num_heads: int = 4, period: int = 7, sharpness: float = 8.0) -> tuple[Any, MedusaHeads]:
    """``counting_model`` and heads that know what it writes: their best candidates are the model's most likely text."""
    heads = counting_heads(VOCAB, num_heads, period, sharpness / VOCAB**0.5).to(F64)
    return counting_model(period, sharpness), heads


def counting_heads(hidden_size: int, num_heads: int, period: int, weight: float) -> MedusaHeads:
    """Heads that count on from the token that a one-hot hidden state stands for, each one further ahead."""
    heads = MedusaHeads(hidden_size, VOCAB, num_heads, num_layers=0, own_output=True)
    with torch.no_grad():
        for head, layer in enumerate(heads.outputs):
            layer.weight.zero_()
            for token in range(VOCAB):
                later = token
                for _ in range(head + 2):
                    later = later % period + 1
                layer.weight[later, token] = weight
    return heads


COMBINED = ("heads", "recycling", "suffix")
SMALL = [[0, 0, 0], [0, 1], [1, 0], [2], [3]]


def fitted(model: Any, num_heads: int = 3) -> MedusaHeads:
    """Heads with output layers of their own, fitted by least squares to the model's own greedy texts."""
    heads = MedusaHeads.for_model(model, num_heads, own_output=True)
    text = run(model, prompts(24, ragged=False), do_sample=False, max_new_tokens=50)[0]
    with torch.no_grad(), HiddenStates(output_layer(model)) as states:
        states.expect()
        (hidden,) = states.take(model(text).logits)
        for head, layer in enumerate(heads.outputs):
            ahead = head + 2
            inputs = hidden[:, :-ahead].flatten(0, 1)
            targets = torch.nn.functional.one_hot(text[:, ahead:].flatten(), VOCAB).to(inputs.dtype)
            layer.weight.copy_(torch.linalg.lstsq(inputs, targets).solution.T)
    return heads


def hooks(model: Any) -> int:
    return len(output_layer(model)._forward_pre_hooks)


HIDDEN = 32


def drawn(heads: MedusaHeads, seed: int = 0) -> MedusaHeads:
    """The heads with random weights."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in heads.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator, dtype=F64) * 0.3)
    return heads


def states(*shape: int, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=F64).to(dtype)
