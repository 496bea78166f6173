"""Medusa's heads for tiny models: random ones, and some that are right by construction."""

from typing import Any

import torch
from helpers.models import F64, VOCAB, counting_model

from lookahead.medusa import MedusaHeads


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
    model = counting_model(period, sharpness)
    heads = MedusaHeads(VOCAB, VOCAB, num_heads, num_layers=0, own_output=True).to(F64)
    with torch.no_grad():
        for head, layer in enumerate(heads.outputs):
            layer.weight.zero_()
            for token in range(VOCAB):
                later = token
                for _ in range(head + 2):
                    later = later % period + 1
                layer.weight[later, token] = sharpness / VOCAB**0.5
    return model, heads
