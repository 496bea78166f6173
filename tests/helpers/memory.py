"""Counts what keys and values take: the bytes of all tensors whose last dimension is a size that nothing else has."""

from typing import Any

import torch
from helpers.models import initialised
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig

CHANNELS = 24  # of a head
HEADS = 3


def wide_model(layers: int = 6, **changes: Any) -> Any:
    """A tiny Llama whose keys and values take much more than anything else of it."""
    config = LlamaConfig(
        vocab_size=48, hidden_size=18, intermediate_size=16, num_hidden_layers=layers, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, head_dim=CHANNELS, max_position_embeddings=4096, initializer_range=0.3,
        bos_token_id=None, eos_token_id=None, pad_token_id=None, **changes,
    )  # fmt: skip
    return initialised(config, dtype=torch.float32)


def bytes_of(layers: int, tokens: int, batch: int = 1) -> int:
    """What the keys and values of a text take in float32."""
    return 2 * layers * batch * HEADS * tokens * CHANNELS * 4


class LiveStates(TorchDispatchMode):
    """Notes the storages of keys and values that are alive.

    Attributes:
        peak: most bytes at once since it was last set to 0.
        least: storages of fewer bytes are what one layer computes, and are not counted.
    """

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least = least
        self.peak = 0
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.ndim >= 4 and tensor.shape[-1] == CHANNELS:
                storage = tensor.untyped_storage()
                if storage.nbytes() >= self.least:
                    self._seen[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.live())
        return out

    def live(self) -> int:
        self._seen = {at: seen for at, seen in self._seen.items() if not seen[0].expired()}
        return sum(size for _, size in self._seen.values())
