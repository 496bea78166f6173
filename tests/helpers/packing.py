"""Packed weights at once, whatever a model's size, and without a trial."""

from typing import Any

import torch
from torch import nn

from lookahead.runtime import packed_layers, packing


def packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs such weights on this machine: bfloat16 needs AVX-512 or AVX-NE-CONVERT."""
    try:
        packed_layers.pack((nn.Linear(16, 16, dtype=dtype),))
    except RuntimeError:
        return False
    return True


def _tried(found: packing.Packing, groups: Any) -> None:
    found.gain, found.cost_ms = 1.0, 0.5
    found.singles = dict.fromkeys(map(packed_layers.shapes_of, groups), True)


# For `lookahead.runtime.packing`: models are large enough, every layer gains, and one pass has paid for packing.
AT_ONCE: dict[str, Any] = {"_LARGE_BYTES": 0, "_TRIAL_AFTER_MS": 1e-6, "_LARGE_AFTER_MS": 1e-6, "_try": _tried}
