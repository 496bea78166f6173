"""Memory of the key/value history: layers of one shape in one buffer, and their views for a pass."""

from collections.abc import Callable

import torch
from torch import Tensor

Allocate = Callable[[tuple[int, ...], Tensor], Tensor]  # (shape, a tensor of the dtype and device) -> buffer
_GRANULE = 64  # slots; capacities are rounded up to it


def _rounded(slots: int) -> int:
    return -(-slots // _GRANULE) * _GRANULE


class LayerBuffer:
    """All entries of one shape, dtype and device, in one buffer that grows geometrically.

    Attributes:
        buffer: ``[entry, batch, head, slot, channel]``.
        span: first and last-plus-one slot of the pass that the views below are for.
        fresh: for each entry, the slots of the pass; unused with static shapes.
        history: for each entry, all slots up to the pass's last; with static shapes, up to the span's last.
    """

    def __init__(
        self, entries: list[Tensor], capacity: int, allocate: Allocate | None = None, *, pinned: bool = False
    ) -> None:
        first = entries[0]
        batch, heads, length, channels = first.shape
        shape = (len(entries), batch, heads, _rounded(max(capacity, length)), channels)
        self.buffer = first.new_empty(shape, pin_memory=pinned) if allocate is None else allocate(shape, first)
        for slot, entry in enumerate(entries):
            self.buffer[slot, :, :, :length] = entry
        self.span = (0, 0)
        self.fresh: tuple[Tensor, ...] = ()
        self.history: tuple[Tensor, ...] = ()

    def open(self, start: int, stop: int) -> None:
        """Make the views for a pass over slots ``start`` to ``stop``: once for all layers, growing where needed."""
        if self.span == (start, stop):
            return
        capacity = self.buffer.shape[3]
        if stop > capacity:
            self.grow(_rounded(max(stop, 2 * capacity)))
        self.span = (start, stop)
        self.fresh = self.buffer[:, :, :, start:stop].unbind(0)
        self.history = self.buffer[:, :, :, :stop].unbind(0)

    def open_static(self, span: int) -> None:
        """Make the views for passes that read ``span`` slots, wherever they write."""
        if self.span != (-1, span):
            self.span = (-1, span)
            self.fresh = ()
            self.history = self.buffer[:, :, :, :span].unbind(0)

    def grow(self, capacity: int) -> None:
        """Go on in a buffer of ``capacity`` slots, zero past those of the old one."""
        old = self.buffer
        with torch.inference_mode(old.is_inference()):  # a pass in inference mode may be what asks for it
            buffer = old.new_zeros((*old.shape[:3], capacity, old.shape[4]), pin_memory=old.is_pinned())
            buffer[:, :, :, : old.shape[3]] = old
        self.buffer, self.span = buffer, (0, 0)
