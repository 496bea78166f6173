"""What passes must not do where they are replayed: read tensors; and whether they draw random numbers."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_READS = {"_local_scalar_dense", "nonzero", "nonzero_numpy", "equal", "is_nonzero", "item", "masked_select", "bincount"}
_READS |= {"unique", "_unique", "_unique2", "unique_dim", "unique_consecutive"}


class HostReads(TorchDispatchMode):
    """Notes them, and copies from device to device, of this thread while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()  # their names

    @property
    def told(self) -> str:
        """What was found, in words; empty if nothing was."""
        return f"its Python reads tensors ({', '.join(sorted(self.found))})" if self.found else ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _READS or (name in ("copy_", "_to_copy") and _crosses(args, kwargs or {})):
            self.found.add(name)
        return func(*args, **(kwargs or {}))


def _crosses(args: Any, kwargs: dict[str, Any]) -> bool:
    other = args[1].device if len(args) > 1 else kwargs.get("device")
    return other is not None and torch.device(other).type != args[0].device.type


class Draws(TorchDispatchMode):
    """Whether this thread draws random numbers while it is on: generators do not tell which thread did."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:  # kernels of attention draw for dropout alone
            self.found |= "attention" not in func.overloadpacket.__name__ or _drops_out(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _drops_out(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    names = [argument.name for argument in func._schema.arguments]
    return bool((dict(zip(names, args, strict=False)) | kwargs).get("dropout_p"))
