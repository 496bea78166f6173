"""A device that works by itself, played by the CPU: whoever reads its tensors would wait for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from lookahead.runtime import scores, tree
from lookahead.verify import noise, sampler

_READS = {"tolist", "numpy", "item", "__bool__", "__int__", "__float__", "__index__", "nonzero", "equal", "cpu"}
_OPERATIONS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "item"}


class OnDevice(torch.Tensor):
    """A tensor that nobody may read but by ``fetch``, nor what is made of it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.__name__ not in _READS, f"{func.__name__} waits for the device"
        return super().__torch_function__(func, types, args, kwargs or {})


class Reads(TorchDispatchMode):
    """Counts operations that read a tensor in the last of ``reads``."""

    def __init__(self, reads: list[int]) -> None:
        super().__init__()
        self.reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reads[-1] += func.__name__.split(".")[0] in _OPERATIONS
        return func(*args, **(kwargs or {}))


@contextmanager
def working_alone(*, guarded: bool = False) -> Iterator[list[int]]:
    """Passes after the prompt's run as on such a device, where ``guarded`` with tensors that cannot be read otherwise.
    Gives the number of reads of every pass, the prompt's first."""
    reads = [0]
    real_fetch, real_logits = scores.fetch, tree.TreeModel._logits

    def fetch(tensor: Tensor) -> Any:
        reads[-1] += 1
        return real_fetch(tensor.as_subclass(torch.Tensor))

    def logits(model: Any, trees: Any) -> Tensor:
        reads.append(0)
        found = functional.pad(real_logits(model, trees), (0, 0, 0, 1))[:, :-1]  # static passes have more nodes
        return found.as_subclass(OnDevice) if guarded else found

    with pytest.MonkeyPatch.context() as patch:
        for module in (scores, tree, sampler, noise):
            patch.setattr(module, "on_host", lambda device: False)
        for module in (scores, sampler):
            patch.setattr(module, "fetch", fetch)
        patch.setattr(tree.TreeModel, "_logits", logits)
        yield reads
