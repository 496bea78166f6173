"""What a machine allows: bytes a pass must read, how fast it can, what a pass takes, and the ceiling for a speedup."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.harness import timed
from benchmarks.step_time import WIDTHS, curve

_LARGE_BYTES = {"cpu": 512 << 20, "cuda": 4 << 30}


def weights(model: Any) -> tuple[int, int]:
    """The number of parameters, and the bytes of them that a pass over one token reads: one row of an input table."""
    head = model.get_output_embeddings()
    tables = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding) and (head is None or module.weight is not head.weight)
    }
    parameters = {id(parameter): parameter for parameter in model.parameters()}.values()
    read = sum((p.shape[1] if id(p) in tables else p.numel()) * p.element_size() for p in parameters if not p.is_meta)
    return sum(p.numel() for p in parameters), read


def cache_bytes(model: Any) -> int:
    """Bytes that one token takes in the KV cache of all layers."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    channels = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * channels * model.dtype.itemsize)


def bandwidth(device: Any, size: int, rounds: int = 7) -> dict[str, float]:
    """GB/s of summing and of copying ``size`` bytes, the fastest of a few rounds; a copy reads and writes."""
    source = torch.ones(max(1, size // 4), device=device)
    target = torch.empty_like(source)
    best = {}
    for name, factor, run in (("sum", 1, source.sum), ("copy", 2, lambda: target.copy_(source))):
        seconds = min(timed(device, run)[1] for _ in range(rounds))
        best[name] = factor * source.numel() * 4 / seconds / 1e9
    return best


def card(
    model: Any, batches: Sequence[int], context: int = 256, widths: Sequence[int] = WIDTHS, rounds: int = 9
) -> dict[str, Any]:
    """The theory card of a model on this machine.

    The floor of a pass takes the better bandwidth: from memory, or over so few bytes that a cache may hold them.
    """
    count, read = weights(model)
    kv = cache_bytes(model)
    large = bandwidth(model.device, _LARGE_BYTES[model.device.type])
    own = bandwidth(model.device, read)
    best = max(*large.values(), *own.values())
    return {
        "parameters": count,
        "weight_bytes_per_pass": read,
        "kv_bytes_per_token": kv,
        "bandwidth_gb_per_s": {"memory": large, "as many bytes as the weights": own},
        "context": context,
        "floor_ms": {batch: 1e3 * (read + batch * context * kv) / (best * 1e9) for batch in batches},
        "pass_ms": {batch: curve(model, context, widths, batch, rounds) for batch in batches},
    }


def ceiling(card: dict[str, Any], batch: int, tokens_per_pass: float, nodes: float) -> float:
    """The speedup if nothing but passes took time: S t(1)/t(T) with T = nodes + 1, between measured sizes a line."""
    taken = card["pass_ms"][batch]
    sizes = sorted(taken)
    pass_ms = np.interp(nodes + 1, sizes, [taken[size] for size in sizes])
    return float(tokens_per_pass * taken[1] / pass_ms)
