"""A module with other parts in the places of its own, which stays as it is."""

from collections.abc import Callable
from typing import Any

from torch import nn


def twin_of(module: nn.Module, change: Callable[[Any], None]) -> Any:
    """A copy of a module and its submodules that shares all they hold; ``change`` may replace what a copy holds, but
    not write into it: dicts and tensors are still the module's own."""
    twin: Any = module.__class__.__new__(module.__class__)
    twin.__dict__.update(vars(module))
    twin.__dict__["_modules"] = {
        name: None if child is None else twin_of(child, change) for name, child in module._modules.items()
    }
    change(twin)
    return twin
